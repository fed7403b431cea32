"""What the way through the cluster costs: `penstock serve` against the bare engine, in one run.

Starts a server of its own on free ports and an engine in this process, with the same model, number
format and threads, and measures them in turn, round after round, so that whatever else the machine
does strikes both; medians over the rounds are shown, and of differences and ratios the medians of
those within one round. Added time to first token with one request at
a time, throughput with 32 under way, and the CPU time of the ingress per streamed token.

The client shares the machine with the server, so its own CPU time, which the bare engine is spared,
is told as well. Linux: processes are read from /proc.

One at a time, the bare engine gets its next request as soon as the last one ends, and is warm; the
one behind the path has always rested for some milliseconds, and a prefill takes it longer. With
`--rest-ms` both rest for as long before each request.

`--model model-b` is the shape of Qwen2.5-0.5B with random weights, as in offline.py: a model of the
size that people serve on a CPU, where the built-in one is so small that client, ingress and engine
fight for the cores.

    python benchmarks/path_overhead.py
    python benchmarks/path_overhead.py --model model-b --rounds 3 --num-many 32
    python benchmarks/path_overhead.py --rounds 3 --threads 1 --json out.json
    python benchmarks/path_overhead.py --rounds 3 --threads 1 --rest-ms 20
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bare_engine import BareEngine, make_model_b
from server_process import cpu_s, served
from tqdm import tqdm

from penstock.deployments.bench_figures import Outcome, Slo, figures_of
from penstock.deployments.bench_load import Job
from penstock.deployments.bench_serve import BenchCall, run_load
from penstock.deployments.bench_targets import Target, target_of
from penstock.workers.config import EngineConfig
from penstock.workers.engine import Engine
from penstock.workers.models.loader import load_model

TARGETS = {"ttft_ms": 5.0, "throughput": 0.85, "cpu_ms": 0.1}
COLUMNS = (
    *("path", "TTFT p50, 1 at a time", "added", "tokens/s, {n} under way", "of bare"),
    *("ingress CPU per token, {n} / 1 under way", "engine process", "client"),
)


def make_calls(num: int, prompt: int, output: int, rng: np.random.Generator) -> list[BenchCall]:
    """Prompts that no one has sent before: the prefix cache has nothing to give."""
    job = Job(0.0, prompt, output)
    ids = rng.integers(1000, size=(num, prompt))
    return [BenchCall(job, [int(n) for n in row], output, None) for row in ids]


def measure_bare(
    bare: BareEngine, calls: list[BenchCall], concurrency: int, wanted: int, rest_s: float
) -> dict[str, float]:
    before_s = time.process_time()
    outcomes = []
    for part in _parts(calls, rest_s):
        time.sleep(rest_s)
        outcomes += bare.run(part, concurrency)
    return _row(outcomes, wanted) | {
        "engine_cpu_ms": (time.process_time() - before_s) * 1e3 / wanted
    }


def _parts(calls: list[BenchCall], rest_s: float) -> list[list[BenchCall]]:
    """What is sent without a rest in between."""
    return [[call] for call in calls] if rest_s else [calls]


async def measure_path(
    target: Target,
    calls: list[BenchCall],
    concurrency: int,
    wanted: int,
    rest_s: float,
    pids: list[int],
) -> dict[str, float]:
    before = [time.process_time(), *map(cpu_s, pids)]
    outcomes = []
    for part in _parts(calls, rest_s):
        await asyncio.sleep(rest_s)
        outcomes += await run_load(target, part, max_concurrency=concurrency)
    after = [time.process_time(), *map(cpu_s, pids)]
    names = ("client_cpu_ms", "ingress_cpu_ms", "engine_cpu_ms")
    used = {name: (b - a) * 1e3 / wanted for name, a, b in zip(names, before, after)}
    return _row(outcomes, wanted) | used


def _row(outcomes: list[Outcome], wanted: int) -> dict[str, float]:
    figures = figures_of(outcomes, Slo())
    assert not figures["errors"], figures["errors"]
    assert figures["output_tokens"] == wanted, (figures["output_tokens"], wanted)
    return {
        "ttft_ms": figures["ttft_ms"]["p50"],
        "tokens_per_s": figures["output_tokens_per_s"],
    }


async def measure(
    args: argparse.Namespace, bare: BareEngine, urls: dict[str, str], pids: list[int]
) -> list[dict[str, Any]]:
    """For each round, of each path, its figures with one and with many under way."""
    rng = np.random.default_rng(args.seed)
    targets = {
        name: target_of(
            url,
            model=None,
            api_key=None,
            is_chat=False,
            sampling={"temperature": 0.0, "ignore_eos": True},
            extra_body={},
        )
        for name, url in urls.items()
    }
    for target in targets.values():
        await target.model()
    rounds: list[dict[str, Any]] = []
    for number in tqdm(range(args.rounds + 1), unit="round"):
        figures: dict[str, Any] = {}
        for concurrency, num in ((1, args.num_single), (args.concurrency, args.num_many)):
            wanted = num * args.output_len
            rest_s = args.rest_ms / 1e3 if concurrency == 1 else 0.0
            # Whoever came first in one round comes last in the next.
            paths: list[str] = ["bare", *targets][:: 1 if number % 2 else -1]
            for path in paths:
                calls = make_calls(num, args.input_len, args.output_len, rng)
                if path == "bare":
                    how = (bare, calls, concurrency, wanted, rest_s)
                    row = await asyncio.to_thread(measure_bare, *how)
                else:
                    how_far = (targets[path], calls, concurrency, wanted, rest_s)
                    row = await measure_path(*how_far, pids)
                figures.setdefault(path, {})[str(concurrency)] = row
        rounds.append(figures)
    for target in targets.values():
        await target.close()
    return rounds[1:]  # the first one warms up


def summary(rounds: list[dict[str, Any]], many: str) -> dict[str, dict[str, float]]:
    """Medians over the rounds; differences and ratios are of one round each, then their median."""

    def median(values: Iterator[float]) -> float:
        return statistics.median(values)

    rows = {}
    for path in rounds[0]:
        row = {
            "ttft_ms": median(each[path]["1"]["ttft_ms"] for each in rounds),
            "tokens_per_s": median(each[path][many]["tokens_per_s"] for each in rounds),
            "engine_cpu_ms": median(each[path][many]["engine_cpu_ms"] for each in rounds),
        }
        if path != "bare":
            row |= {
                "added_ttft_ms": median(
                    each[path]["1"]["ttft_ms"] - each["bare"]["1"]["ttft_ms"] for each in rounds
                ),
                "throughput_ratio": median(
                    each[path][many]["tokens_per_s"] / each["bare"][many]["tokens_per_s"]
                    for each in rounds
                ),
                "cpu_ms": median(each[path][many]["ingress_cpu_ms"] for each in rounds),
                "cpu_ms_single": median(each[path]["1"]["ingress_cpu_ms"] for each in rounds),
                "client_cpu_ms": median(each[path][many]["client_cpu_ms"] for each in rounds),
            }
        rows[path] = row
    return rows


def table(rows: dict[str, dict[str, float]], concurrency: int) -> str:
    head = "| " + " | ".join(COLUMNS).format(n=concurrency) + " |"
    lines = [head, "|" + " --- |" * len(COLUMNS)]
    for path, row in rows.items():
        cells = [f"{row['ttft_ms']:.1f} ms", "", f"{row['tokens_per_s']:.0f}", "", ""]
        cells += [f"{row['engine_cpu_ms']:.3f} ms", ""]
        if path != "bare":
            cells[1] = f"{row['added_ttft_ms']:+.1f} ms"
            cells[3] = f"{100 * row['throughput_ratio']:.0f} %"
            cells[4] = f"{row['cpu_ms']:.3f} / {row['cpu_ms_single']:.3f} ms"
            cells[6] = f"{row['client_cpu_ms']:.3f} ms"
        lines.append(f"| {path} | " + " | ".join(cells) + " |")
    lines.append(
        f"| target | | at most {TARGETS['ttft_ms']:g} ms | | at least "
        f"{100 * TARGETS['throughput']:.0f} % | at most {TARGETS['cpu_ms']:g} ms | | |"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin", help="or model-b, or a folder")
    parser.add_argument("--weights", choices=["auto", "fp32", "bf16"], default="auto")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--num-single", type=int, default=6, help="requests, one at a time")
    parser.add_argument("--num-many", type=int, default=64, help="requests, many under way")
    parser.add_argument("--rest-ms", type=float, default=0.0, help="before each, one at a time")
    parser.add_argument("--rounds", type=int, default=9, help="after one that warms up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pst-model-") as folder:
        path = make_model_b(Path(folder)) if args.model == "model-b" else args.model
        run(args, path)


def run(args: argparse.Namespace, path: str) -> None:
    """Measure the model at `path`, and tell."""
    torch.set_num_threads(args.threads)
    model = load_model(path, weights=args.weights, device="cpu", progress=False)
    engine = Engine(EngineConfig(weights=args.weights, device="cpu", threads=args.threads), model)
    load_before = os.getloadavg()[0]
    flags = ["--weights", args.weights, "--threads", str(args.threads)]
    with served(path, flags) as (urls, pids):
        bare = BareEngine(engine, args.threads)
        rounds = asyncio.run(measure(args, bare, urls, pids))
        bare.stop()
    load_after = os.getloadavg()[0]
    rows = summary(rounds, str(args.concurrency))
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "load_before": load_before,
        "load_after": load_after,
        "args": {name: str(value) for name, value in vars(args).items()},
    }
    print(
        f"\n{about['date']}, {about['cpu']}, {about['cores']} cores, {args.threads} threads each, "
        f"torch {torch.__version__}, {args.model} ({args.weights}), prompts of {args.input_len}, "
        f"answers of {args.output_len} tokens, {args.rest_ms:g} ms of rest before each of one at a "
        f"time, medians of {args.rounds} rounds; "
        f"load average {load_before:.1f} before, {load_after:.1f} after\n"
    )
    print(table(rows, args.concurrency))
    if args.json:
        content = {"about": about, "summary": rows, "rounds": rounds}
        args.json.write_text(json.dumps(content, indent=2) + "\n")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
