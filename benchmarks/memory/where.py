"""Where K and V in host memory pay, and where activations in the tail of the KV pool do.

host    A prompt of 1,024 tokens comes back after its blocks went to host memory, over links that
        are slower and faster than computing it again (pressure.py). Time to the first token over
        that of computing it again, by the link.
arena   The same requests, all at once, in the same memory with `activation_memory` separate and
        tail: tokens a second and mean time to the first token, tail over separate, by the memory.

SmolLM2, bf16, one thread. Below 1 a time is shorter; above it the idea costs.

    python -m benchmarks.memory.where --out OUT.json --plot OUT.png
    python -m benchmarks.memory.where --read OUT.json --plot OUT.png
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.common import record
from benchmarks.memory.pressure import (
    NUM_PROMPTS,
    PROMPT_LEN,
    break_even_bytes_per_s,
    measure_link,
    run,
)
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from penstock.workers.weights.hub import resolve_model

MODES = ("separate", "tail")


def host_rows(model: Decoder, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each link and `kv_restore`: the rate over break-even, and seconds to the first token."""
    even = break_even_bytes_per_s(model, PROMPT_LEN // 16 + 8)
    found = []
    num_prompts = len(args.links) * NUM_PROMPTS * (2 + args.turns)
    with tqdm(total=num_prompts, unit="prompt", desc="host") as bar:
        for times in args.links:
            for row in measure_link(model, times * even, args, bar):
                kept = {key: row[key] for key in ("mode", "seconds", "loaded", "computed")}
                found.append({"link": times, "mb_per_s": times * even / 1e6, **kept})
    return found


def requests(args: argparse.Namespace, seed: int) -> list[Request]:
    rng = random.Random(seed)
    found = []
    for i in range(args.requests):
        prompt = tuple(rng.randrange(3, 8000) for _ in range(rng.randint(64, 700)))
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=rng.randint(16, 96))
        found.append(Request(f"{seed}-{i}", prompt, params))
    return found


def serve(model: Decoder, gb: float, mode: str, load: Sequence[Request]) -> dict[str, Any]:
    """One run in an engine of its own, and the ids that it gave."""
    config = EngineConfig(
        kv_cache_gb=gb,
        activation_memory="tail" if mode == "tail" else "separate",
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        prefix_cache=False,
        threads=1,
    )
    engine = Engine(config, model)
    first_s: dict[str, float] = {}
    began_s = time.perf_counter()
    ids = run(
        engine, load, lambda d: first_s.setdefault(d.request_id, time.perf_counter() - began_s)
    )
    seconds, stats = time.perf_counter() - began_s, engine.stats()
    engine.close()
    return {
        "gb": gb,
        "mode": mode,
        "blocks": stats.num_blocks,
        "tokens_per_s": sum(map(len, ids.values())) / seconds,
        "ttft_s": statistics.fmean(first_s.values()),
        "preemptions": stats.num_preemptions,
        "shortened_steps": stats.num_shortened_steps,
        "ids": ids,
    }


def arena_rows(model: Decoder, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each memory and round, both modes in turns; their ids must be equal."""
    found = []
    with tqdm(total=2 * args.rounds * len(args.gb), unit="run", desc="arena") as bar:
        for gb in args.gb:
            for number in range(args.rounds):
                load = requests(args, number)
                pair = []
                for mode in MODES if number % 2 else MODES[::-1]:
                    pair.append({"round": number, **serve(model, gb, mode, load)})
                    bar.update()
                if pair[0].pop("ids") != pair[1].pop("ids"):
                    raise SystemExit(f"where: the ids at {gb} GiB differ between modes")
                found += pair
    return found


def ratios(rows: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    """By memory: the median of tail over separate, round by round."""
    found = []
    for gb in dict.fromkeys(row["gb"] for row in rows):
        of = {(r["round"], r["mode"]): r[key] for r in rows if r["gb"] == gb}
        rounds = sorted({number for number, _ in of})
        found.append((gb, statistics.median(of[n, "tail"] / of[n, "separate"] for n in rounds)))
    return found


def plot(results: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    again = {r["link"]: r["seconds"] for r in results["host"] if r["mode"] == "recompute"}
    for mode in ("load", "auto"):
        points = [(r["link"], r["seconds"] / again[r["link"]]) for r in results["host"]
                  if r["mode"] == mode]  # fmt: skip
        left.plot(*zip(*sorted(points)), marker="o", label=mode)
    left.set(title="K and V in host memory: first token of a prompt that returns", xscale="log",
             yscale="log", xlabel="link, times the rate of computing it again",
             ylabel="time, computing again = 1")  # fmt: skip
    for key, label in (("ttft_s", "mean time to first token"), ("tokens_per_s", "tokens/s")):
        right.plot(*zip(*ratios(results["arena"], key)), marker="o", label=label)
    right.set(title="activations in the tail of the pool, separate = 1", xscale="log",
              xlabel="GiB for KV and activations", ylabel="tail over separate")  # fmt: skip
    for axes in (left, right):
        axes.axhline(1, color="black", linewidth=0.8)
        axes.grid(alpha=0.3)
        axes.legend()
    left.axhspan(1, left.get_ylim()[1], alpha=0.08, color="red")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--links", type=float, nargs="+", default=[0.05, 0.2, 0.5, 1, 2, 5, 20],
                        help="times the rate of computing a prompt again")  # fmt: skip
    parser.add_argument("--turns", type=int, default=1, help="times that each prompt comes back")
    parser.add_argument("--gb", type=float, nargs="+", default=[0.06, 0.08, 0.12, 0.2, 0.4])
    parser.add_argument("--requests", type=int, default=24, help="of a round, all at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, metavar="OUT.json")
    parser.add_argument("--read", type=Path, metavar="OUT.json", help="plot this, measure nothing")
    parser.add_argument("--plot", type=Path, metavar="OUT.png")
    args = parser.parse_args()
    if args.read:
        results = json.loads(args.read.read_text())["results"]
    else:
        torch.set_num_threads(1)
        model = load_model(resolve_model(args.model), weights="bf16", progress=False)
        results = {"arena": arena_rows(model, args), "host": host_rows(model, args)}
        if args.out:
            record.write(args.out, __file__, results, threads=1)
    for key in ("tokens_per_s", "ttft_s"):
        print(key, *(f"{gb:g} GiB: {ratio:.2f}x" for gb, ratio in ratios(results["arena"], key)))
    for row in results["host"]:
        print(f"link {row['link']:g}: {row['mode']} {row['seconds']:.2f} s")
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
