"""Time per token over a slow host link, by the number of experts in the cache and by its policy.

decode     One token at a time, batch of one. demand: no expert is kept between tokens; LRU over
           all layers; fair: LRU by fair shares of the layers; each of them also with prefetch, when
           the measured counters allow it (prefetch), at every layer (always), or where trials find
           that it pays (auto, which needs --warm 200). neurons: moe_mode sparse, from a pool of
           neurons. streamed: moe_mode streamed, all of whose neurons come from such a pool.
           int8: moe_mode quantized.
formats    The same with experts in --formats: what a quantised expert saves, whole and by neurons.
prompt     A prompt in one step, with its layers' experts streamed ahead or loaded on demand.

Printed next to each: the lower bound of a token that loads all its experts, L * k * bytes / B.

    python -m benchmarks.experts.speed --out OUT
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.experts.common import (
    MODEL,
    books,
    drain,
    finish,
    made_up_model,
    parser_of,
    temporary_expert_file,
)
from benchmarks.experts.interleave import (
    DEMAND,
    Runner,
    Turns,
    empty,
    make_engine,
    table,
    take_turns,
)
from penstock.workers.engine.engine import Engine
from penstock.workers.experts.build import ExpertSettings
from penstock.workers.experts.expert_file import Manifest, copies_for

LONG_PROMPT = 512
Modes = dict[str, dict[str, Any]]  # settings by name
MODES: Modes = {
    "LRU": {"is_fair": False},
    "LRU + always": {"is_fair": False, "prefetch": True},
    "fair": {},
    "fair + prefetch": {"prefetch": True},
    "fair + always": {"prefetch": True},
    "fair + auto": {"prefetch": None},
    "fair + neurons": {"mode": "sparse"},
    "fair + neurons + always": {"mode": "sparse", "prefetch": True},
    "fair + streamed": {"mode": "streamed"},
    "fair + streamed + always": {"mode": "streamed", "prefetch": True},
    "fair + int8": {"mode": "quantized"},
}
FORMAT_MODES = ("fair", "fair + always", "fair + neurons")  # those that a quantised expert has


class Decoding:
    """Engines of one link, as they are added."""

    def __init__(self, args: argparse.Namespace, prompt: Sequence[int], bytes_per_s: float):
        self.args, self.prompt, self.bytes_per_s = args, prompt, bytes_per_s
        self.turns = Turns(args.warm, args.new, args.model)
        self.runners: list[Runner] = []

    def add(self, weights: str, manifest: Manifest, modes: Modes) -> None:
        """One engine without a cache, one that keeps nothing, and each of `modes` by size."""
        common: dict[str, Any] = {"manifest": manifest, "bytes_per_s": self.bytes_per_s}
        self._start("no cache of experts", weights, 100, None)
        nothing = ExpertSettings(num_slots=4, prefetch=False, **common)
        self._start(DEMAND, weights, 0, nothing)
        for percent in self.args.percent:
            num_slots = max(1, round(manifest.num_all * percent / 100))
            for name, options in modes.items():
                values = {"prefetch": False, "keep": self.args.keep, **options, **common}
                settings = ExpertSettings(num_slots=num_slots, **values)
                self._start(name, weights, percent, settings)

    def run(self) -> dict[str, Any]:
        try:
            rows = take_turns(self.runners, self.turns, self.bytes_per_s)
        finally:
            for each in self.runners:
                each.engine.close()
        return {"bytes_per_s": self.bytes_per_s, "keep": self.args.keep, "rows": rows}

    def _start(
        self, name: str, weights: str, percent: int, settings: ExpertSettings | None
    ) -> None:
        start = (name, weights, percent, settings, self.prompt, self.turns)
        self.runners.append(Runner.start(*start))


def decode(args: argparse.Namespace, prompt: Sequence[int], bytes_per_s: float) -> dict[str, Any]:
    """Seconds of a token by mode and share, and what was moved for it."""
    with temporary_expert_file(args.model, args.weights, copies="int8") as manifest:
        decoding = Decoding(args, prompt, bytes_per_s)
        decoding.add(args.weights, manifest, {name: MODES[name] for name in args.modes})
        return decoding.run()


def formats(args: argparse.Namespace, prompt: Sequence[int], bytes_per_s: float) -> dict[str, Any]:
    """The same by number format."""
    decoding = Decoding(args, prompt, bytes_per_s)
    with ExitStack() as stack:
        for weights in args.formats:
            copies = copies_for("sparse", weights, "")
            manifest = stack.enter_context(temporary_expert_file(MODEL, weights, copies=copies))
            decoding.add(weights, manifest, {name: MODES[name] for name in FORMAT_MODES})
        return decoding.run()


def prompt_times(
    args: argparse.Namespace, prompt: Sequence[int], bytes_per_s: float
) -> dict[str, Any]:
    """Milliseconds of a prompt, by whether its experts are streamed; nothing there at its start."""
    engines: dict[str, Engine] = {}
    times: dict[str, list[float]] = {"on demand": [], "streamed": []}
    with temporary_expert_file(MODEL, args.weights) as manifest:
        for name in times:
            settings = ExpertSettings(
                num_slots=args.prompt_slots,
                prefetch=False,
                manifest=manifest,
                bytes_per_s=bytes_per_s,
            )
            engines[name] = make_engine(args.weights, settings)
        routed = engines["on demand"].model.routed
        assert routed is not None
        routed.predictor = None
        for _ in range(args.prompts + 1):
            for name, engine in engines.items():
                empty(engine)
                began_s = time.perf_counter()
                drain(engine, prompt[:LONG_PROMPT], 1)
                times[name].append(1e3 * (time.perf_counter() - began_s))
        for engine in engines.values():
            engine.close()
    medians = {name: statistics.median(each[1:]) for name, each in times.items()}
    return {"bytes_per_s": bytes_per_s, "slots": args.prompt_slots, **medians}


PARTS = {"decode": decode, "formats": formats, "prompt": prompt_times}


def lines(found: dict[str, Any]) -> list[str]:
    text = []
    for each in [*found.get("decode", []), *found.get("formats", [])]:
        link = f"Link {each['bytes_per_s'] / 1e9:g} GB/s"
        text += [f"{link}; sparse keeps {each['keep']:g} of the neurons", "", *table(each["rows"])]
    for each in found.get("prompt", []):
        text.append(
            f"prompt of {LONG_PROMPT} tokens, {each['slots']} slots, link "
            f"{each['bytes_per_s'] / 1e9:g} GB/s: on demand {each['on demand']:.0f} ms, streamed "
            f"{each['streamed']:.0f} ms"
        )
    return text


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["decode", "prompt"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE",
                        help=f"of decode: {', '.join(MODES)}")  # fmt: skip
    parser.add_argument("--weights", default="fp32", help="number format that is computed in")
    parser.add_argument("--formats", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--gb-per-s", type=float, nargs="+", default=[0.04, 0.4])
    parser.add_argument("--percent", type=int, nargs="+", default=[5, 10, 25, 50, 100])
    parser.add_argument("--keep", type=float, default=0.2, help="share of neurons")
    parser.add_argument("--new", type=int, default=24, help="tokens that are timed")
    parser.add_argument("--warm", type=int, default=8, help="tokens before them")
    parser.add_argument("--experts", type=int, help="decode a made-up model; its experts a layer")
    parser.add_argument("--prompts", type=int, default=5, help="prompts that are timed")
    parser.add_argument("--prompt-slots", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rates = [1e9 * rate for rate in args.gb_per_s]
    with tempfile.TemporaryDirectory() as folder:
        args.model, prompt = MODEL, books(args.corpus)[0]
        if args.experts is not None:
            args.model, prompt = made_up_model(Path(folder), args.experts)
        found = {part: [PARTS[part](args, prompt, rate) for rate in rates] for part in args.parts}
    finish(__file__, args, {"experts": args.experts, **found}, lines)


if __name__ == "__main__":
    main()
