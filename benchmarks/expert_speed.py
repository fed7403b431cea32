"""Time of a token over a slow link, by how many experts the cache holds and what it does with them.

decode     One token at a time, batch of one. demand: nothing is kept from token to token; LRU over
           all layers; fair: LRU by fair shares of the layers; each of them also with prefetch, as
           the measured counters allow it (prefetch) or at every layer (always). neurons: moe_mode
           sparse. twins: moe_mode quantized. Beside them the floor of a token that loads all that
           it needs, L * k * bytes / B. All engines take turns, a token each, so that a slow moment
           hits all of them.
prompt     A prompt in one step, its layers' experts streamed ahead or only on demand, in turns.

    python benchmarks/expert_speed.py --out benchmarks/results/2026-11-21-experts-speed
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import builtin_data as data
import expert_store
import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from penstock.workers.config import EngineConfig
from penstock.workers.engine import Engine
from penstock.workers.experts.arena import Manifest
from penstock.workers.experts.checkpoint_experts import CheckpointExperts
from penstock.workers.experts.opening import ExpertSettings
from penstock.workers.experts.writer import manifest_path, write_arena
from penstock.workers.models.folder import resolve_model
from penstock.workers.models.loader import load_model, open_model
from penstock.workers.request import Request, SamplingParams

MODEL = "builtin-moe"
PROMPT, LONG_PROMPT = 64, 512
LOOKUPS = ("num_hits", "num_partial", "num_misses")
MODES: dict[str, dict[str, Any]] = {
    "LRU": {"is_fair": False},
    "LRU + always": {"is_fair": False, "prefetch": True},
    "fair": {},
    "fair + prefetch": {"prefetch": True},
    "fair + always": {"prefetch": True},
    "fair + neurons": {"mode": "sparse"},
    "fair + neurons + always": {"mode": "sparse", "prefetch": True},
    "fair + twins": {"mode": "quantized"},
}


@dataclass
class Runner:
    """One engine in the middle of an answer."""

    name: str
    percent: int
    engine: Engine
    seconds: list[float] = field(default_factory=list)

    def step(self) -> None:
        if self.name == "demand":
            empty(self.engine)
        began_s = time.perf_counter()
        self.engine.step()
        self.seconds.append(time.perf_counter() - began_s)


def empty(engine: Engine) -> None:
    """Have nothing in the slots."""
    assert engine.model.routed is not None
    table = engine.model.routed.cache.table
    for slot in table:
        if slot.key is not None and slot.is_idle:
            table.give_back(slot)


def make_engine(args: argparse.Namespace, settings: ExpertSettings | None, always: bool) -> Engine:
    """`always`: prefetch whatever the counters say."""
    model = load_model(MODEL, weights=args.weights, progress=False, experts=settings)
    if always and model.routed is not None:
        model.routed.meter.clock = lambda: 0.0
    mode = "exact" if settings is None else settings.mode
    config = EngineConfig(
        max_num_seqs=1, num_blocks=64, prefix_cache=False, moe_mode=mode, expert_cache_gb=1.0,
        activation_memory="separate",
    )  # fmt: skip
    return Engine(config, model)


def decode(
    args: argparse.Namespace, manifest: Manifest, prompt: Sequence[int], bytes_per_s: float
) -> dict[str, Any]:
    """Seconds of a token by mode and share, and what was moved for it."""
    common: dict[str, Any] = {"manifest": manifest, "bytes_per_s": bytes_per_s}
    runners: list[Runner] = []

    def add(name: str, percent: int, settings: ExpertSettings | None) -> None:
        engine = make_engine(args, settings, name.endswith("always"))
        params = SamplingParams(max_tokens=args.new + args.warm, temperature=0, ignore_eos=True)
        engine.add(Request("one", tuple(prompt[:PROMPT]), params))
        engine.step()  # the prompt
        runners.append(Runner(name, percent, engine))

    try:
        add("no cache of experts", 100, None)
        add("demand", 0, ExpertSettings(num_slots=4, prefetch=False, **common))
        for percent in args.percent:
            num_slots = max(1, round(manifest.num_all * percent / 100))
            for name, options in MODES.items():
                values = {"prefetch": False, "keep": args.keep, **options, **common}
                add(name, percent, ExpertSettings(num_slots=num_slots, **values))
        return take_turns(args, runners, manifest, bytes_per_s)
    finally:
        for each in runners:
            each.engine.close()


def take_turns(
    args: argparse.Namespace, runners: list[Runner], manifest: Manifest, bytes_per_s: float
) -> dict[str, Any]:
    before: dict[int, Any] = {}
    turns = range(args.warm + args.new - 1)
    for turn in tqdm(turns, desc=f"{bytes_per_s / 1e9:g} GB/s", mininterval=20):
        if turn == args.warm:
            before = {id(each): each.engine.stats().experts for each in runners}
        for each in runners:
            each.step()
    top_k = runners[0].engine.model.config.num_experts_per_token
    per_expert = manifest.inner * manifest.row_bytes
    return {
        "bytes_per_s": bytes_per_s,
        "expert_mb": per_expert / 1e6,
        "floor_ms": 1e3 * len(manifest.layers) * top_k * per_expert / bytes_per_s,
        "keep": args.keep,
        "rows": [row_of(each, before[id(each)], args.warm) for each in runners],
    }


def row_of(runner: Runner, then: Any, warm: int) -> dict[str, Any]:
    times = runner.seconds[warm:]
    row: dict[str, Any] = {
        "mode": runner.name,
        "percent": runner.percent,
        "token_ms": 1e3 * statistics.median(times),
        "mean_ms": 1e3 * statistics.fmean(times),
    }
    now = runner.engine.stats().experts
    if now is None:
        return row
    wanted = sum(getattr(now, n) - getattr(then, n) for n in LOOKUPS)
    neurons = now.num_neurons_wanted - then.num_neurons_wanted
    return row | {
        "slots": now.num_slots,
        "hit_rate": (now.num_hits - then.num_hits) / wanted,
        "partial_rate": (now.num_partial - then.num_partial) / wanted,
        "neuron_hit_rate": (now.num_neurons_there - then.num_neurons_there) / max(1, neurons),
        "demand_mb": (now.demand_bytes - then.demand_bytes) / 1e6 / len(times),
        "prefetch_mb": (now.prefetch_bytes - then.prefetch_bytes) / 1e6 / len(times),
        "stall_ms": 1e3 * (now.stall_s - then.stall_s) / len(times),
        "link_busy": (now.link_busy_s - then.link_busy_s) / sum(times),
    }


def prompt_times(
    args: argparse.Namespace, manifest: Manifest, prompt: Sequence[int], bytes_per_s: float
) -> dict[str, Any]:
    """Milliseconds of a prompt, by whether its experts are streamed; nothing there at its start."""
    engines: dict[str, Engine] = {}
    for name in ("on demand", "streamed"):
        settings = ExpertSettings(
            num_slots=args.prompt_slots, prefetch=False, manifest=manifest, bytes_per_s=bytes_per_s
        )
        engines[name] = make_engine(args, settings, False)
        if name == "on demand":
            engines[name].model.routed.predictor = None  # type: ignore[union-attr]
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(args.prompts + 1):
        for name, engine in engines.items():
            empty(engine)
            began_s = time.perf_counter()
            expert_store.drain(engine, prompt[:LONG_PROMPT], 1)
            times[name].append(1e3 * (time.perf_counter() - began_s))
    for engine in engines.values():
        engine.close()
    medians = {name: statistics.median(each[1:]) for name, each in times.items()}
    return {"bytes_per_s": bytes_per_s, "slots": args.prompt_slots, **medians}


def report(found: dict[str, Any]) -> str:
    lines = [found["machine"], ""]
    for table in found.get("decode", []):
        lines += _decode_lines(table)
    for each in found.get("prompt", []):
        lines.append(
            f"prompt of {LONG_PROMPT} tokens, {each['slots']} slots, link "
            f"{each['bytes_per_s'] / 1e9:g} GB/s: on demand {each['on demand']:.0f} ms, streamed "
            f"{each['streamed']:.0f} ms"
        )
    return "\n".join(lines)


def _decode_lines(table: dict[str, Any]) -> list[str]:
    lines = [
        f"Link {table['bytes_per_s'] / 1e9:g} GB/s, expert {table['expert_mb']:.2f} MB, floor of a "
        f"token that loads all it needs {table['floor_ms']:.2f} ms; neurons kept {table['keep']:g}",
        "",
        f"{'cache':>6} {'slots':>5} {'mode':24} {'ms/token':>9} {'hits %':>7} {'part %':>7} "
        f"{'neurons %':>9} {'stall ms':>9} {'MB asked':>9} {'MB ahead':>9} {'link %':>7}",
    ]
    for row in table["rows"]:
        text = f"{row['percent']:>5}% {row.get('slots', '-'):>5} {row['mode']:24} "
        text += f"{row['token_ms']:>9.2f}"
        if "slots" in row:
            text += (
                f" {100 * row['hit_rate']:>7.1f} {100 * row['partial_rate']:>7.1f} "
                f"{100 * row['neuron_hit_rate']:>9.1f} "
                f"{row['stall_ms']:>9.2f} {row['demand_mb']:>9.2f} {row['prefetch_mb']:>9.2f} "
                f"{100 * row['link_busy']:>7.1f}"
            )
        lines.append(text)
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    corpus = expert_store.ROOT.parent / "shared" / "data" / "classics"
    parser.add_argument("--parts", nargs="+", default=["decode", "prompt"])
    parser.add_argument("--corpus", type=Path, default=corpus, help="with heldout-BOOK.txt.xz")
    parser.add_argument("--weights", default="fp32", help="number format that is computed in")
    parser.add_argument("--gb-per-s", type=float, nargs="+", default=[0.04, 0.4])
    parser.add_argument("--percent", type=int, nargs="+", default=[5, 10, 25, 50, 100])
    parser.add_argument("--keep", type=float, default=0.2, help="share of neurons")
    parser.add_argument("--new", type=int, default=24, help="tokens that are timed")
    parser.add_argument("--warm", type=int, default=8, help="tokens before them")
    parser.add_argument("--prompts", type=int, default=5, help="prompts that are timed")
    parser.add_argument("--prompt-slots", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="path without a suffix")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(MODEL), local_files_only=True)
    prompt = data.heldout_tokens(args.corpus, data.HELDOUT_BOOKS[0], tokenizer)[0]
    experts = CheckpointExperts(*open_model(MODEL, args.weights, "cpu"))
    path = Path(f"/dev/shm/penstock-bench-{os.getpid()}.arena")
    found: dict[str, Any] = {"machine": expert_store.machine(), "command": " ".join(sys.argv)}
    parts: dict[str, Callable[..., dict[str, Any]]] = {"decode": decode, "prompt": prompt_times}
    try:
        manifest = write_arena(experts, path, torch.float32, has_twins=True)
        for part in args.parts:
            rates = [1e9 * rate for rate in args.gb_per_s]
            found[part] = [parts[part](args, manifest, prompt, rate) for rate in rates]
    finally:
        path.unlink(missing_ok=True)
        manifest_path(path).unlink(missing_ok=True)
    text = report(found)
    print(text)
    if args.out is not None:
        args.out.with_name(args.out.name + ".json").write_text(json.dumps(found, indent=1) + "\n")
        args.out.with_name(args.out.name + ".txt").write_text(text + "\n")


if __name__ == "__main__":
    main()
