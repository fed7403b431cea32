"""What the way through the cluster costs: `penstock serve` against the bare engine, in one run.

Starts a server of its own on free ports and an engine in this process, with the same model, number
format and threads. One at a time, each path gets one request in turn, so that what is compared lies
a moment apart, and each has rested while the others were measured; the added time to first token is
the median of the differences within a turn. With many under way, round after round in turn;
of ratios the median of those within one round. What the ingress's CPU does with nothing to do is
measured before each round, so that a token's own share can be separated from it.

The client shares the machine with the server, so its own CPU time, which the bare engine is spared,
is printed as well; with `--compute-cores`, which is the server's setting of that name, and
`--client-core` it keeps off the engine's core, as a client on another machine does.
Linux: processes are read from /proc.

`--model model-b` is the shape of Qwen2.5-0.5B with random weights, as in offline.py: a model of the
size that people serve on a CPU, where the built-in one is so small that client, ingress and engine
fight for the cores.

    python -m benchmarks.cluster.overhead
    python -m benchmarks.cluster.overhead --model model-b --rounds 3 --num-many 32
    python -m benchmarks.cluster.overhead --rounds 3 --threads 1 --compute-cores 1 --client-core 0
    python -m benchmarks.cluster.overhead --model model-b --weights int8 --quantize-lm-head \
        --mixed --num-many 64 --concurrency 64 --num-single 2 --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.cluster.overhead_report import summary, table
from benchmarks.common import record
from benchmarks.common.bare_engine import BareEngine, make_model_b
from benchmarks.common.server_process import cpu_s, served
from benchmarks.engine.offline import mixed_sizes
from penstock.deployments.bench.figures import Outcome, Slo, figures_of
from penstock.deployments.bench.load import Job
from penstock.deployments.bench.open_loop import BenchCall, run_load
from penstock.deployments.bench.targets import Target, target_of
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.evaluation.machine import cpu_name
from penstock.workers.models.loader import load_model

REST_S = 3.0  # how long the server is watched doing nothing, before each round

Run = Callable[[list[BenchCall], int], Awaitable[list[Outcome]]]
Row = dict[str, Any]


def make_calls(sizes: Iterable[tuple[int, int]], rng: np.random.Generator) -> list[BenchCall]:
    """Of prompt and answer lengths, prompts that no one has sent before: the prefix cache has
    nothing to give."""
    return [
        BenchCall(Job(0.0, prompt, output), rng.integers(1000, size=prompt).tolist(), output, None)
        for prompt, output in sizes
    ]


class Meter:
    """CPU seconds of this process, of the ingress and of the worker, since it was made."""

    def __init__(self, pids: list[int]):
        self._pids = pids
        self._before, self._before_s = self._read(), time.perf_counter()

    def _read(self) -> list[float]:
        return [time.process_time(), *map(cpu_s, self._pids)]

    def used(self) -> np.ndarray:
        """Wall seconds, then those of the three processes."""
        wall_s = time.perf_counter() - self._before_s
        return np.array([wall_s, *np.subtract(self._read(), self._before)])


@contextlib.contextmanager
def kept_to(core: int | None) -> Iterator[None]:
    """All threads of this process run on that core meanwhile; None: wherever they like."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    _bind({core})
    try:
        yield
    finally:
        _bind(before)


def _bind(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)


class Bench:
    """One run: the paths, their requests, and what it took."""

    def __init__(self, args: argparse.Namespace, paths: dict[str, Run], pids: list[int]):
        self._args, self._paths, self._pids = args, paths, pids
        self._rng = np.random.default_rng(args.seed)

    async def round(self, number: int) -> Row:
        """What the ingress uses at rest, and of each path its figures with one and many."""
        meter = Meter(self._pids)
        await asyncio.sleep(REST_S)
        wall_s, _, ingress_s, _ = meter.used()
        single = await self._one_at_a_time()
        many = {path: await self._many(path) for path in self._order(number)}
        return {
            "ingress_at_rest": ingress_s / wall_s,
            "paths": {path: {"1": single[path], "many": many[path]} for path in self._paths},
        }

    async def _one_at_a_time(self) -> dict[str, Row]:
        outcomes: dict[str, list[Outcome]] = {path: [] for path in self._paths}
        used = {path: np.zeros(4) for path in self._paths}
        for turn in range(self._args.num_single):
            for path in self._order(turn):
                calls = self._calls(1)
                meter = Meter(self._pids)
                outcomes[path] += await self._run(path, calls, 1)
                used[path] += meter.used()
        rows = {path: self._row(path, outcomes[path], used[path]) for path in self._paths}
        for path, row in rows.items():
            row["ttfts_ms"] = [
                round((each.chunks[0].at_s - each.sent_s) * 1e3, 3) for each in outcomes[path]
            ]
        return rows

    async def _many(self, path: str) -> Row:
        num = self._args.num_many
        if self._args.mixed:  # the same lengths for each path and round
            sizes = mixed_sizes(num, random.Random(self._args.seed))
            calls = make_calls(sizes, self._rng)
        else:
            calls = self._calls(num)
        meter = Meter(self._pids)
        outcomes = await self._run(path, calls, self._args.concurrency)
        return self._row(path, outcomes, meter.used())

    async def _run(self, path: str, calls: list[BenchCall], most: int) -> list[Outcome]:
        with kept_to(None if path == "bare" else self._args.client_core):
            return await self._paths[path](calls, most)

    def _calls(self, num: int) -> list[BenchCall]:
        return make_calls([(self._args.input_len, self._args.output_len)] * num, self._rng)

    def _order(self, turn: int) -> list[str]:
        """Another one comes first in each turn, and none comes twice in a row."""
        names = list(self._paths)
        first = turn % len(names)
        return names[first:] + names[:first]

    def _row(self, path: str, outcomes: list[Outcome], used: np.ndarray) -> Row:
        figures = figures_of(outcomes, Slo())
        wanted = sum(each.job.output_tokens for each in outcomes)
        assert not figures["errors"], figures["errors"]
        assert figures["output_tokens"] == wanted, (figures["output_tokens"], wanted)
        wall_s, here_s, ingress_s, worker_s = used
        row = {
            "tokens_per_s": figures["output_tokens_per_s"],
            "wall_ms": wall_s * 1e3 / wanted,
            "engine_cpu_ms": (here_s if path == "bare" else worker_s) * 1e3 / wanted,
        }
        if path != "bare":
            row |= {
                "ingress_cpu_ms": ingress_s * 1e3 / wanted,
                "client_cpu_ms": here_s * 1e3 / wanted,
            }
        return row


async def measure(
    args: argparse.Namespace, bare: BareEngine, urls: dict[str, str], pids: list[int]
) -> list[Row]:
    """The rounds, but for the first one, which warms up."""
    sampling = {"temperature": 0.0, "ignore_eos": True}
    targets = {
        name: target_of(
            url, model=None, api_key=None, is_chat=False, sampling=sampling, extra_body={}
        )
        for name, url in urls.items()
    }
    for target in targets.values():
        await target.model()
    paths: dict[str, Run] = {"bare": lambda calls, most: asyncio.to_thread(bare.run, calls, most)}
    paths |= {name: _through(target) for name, target in targets.items()}
    bench = Bench(args, paths, pids)
    rounds = [await bench.round(i) for i in tqdm(range(args.rounds + 1), unit="round")]
    for target in targets.values():
        await target.close()
    return rounds[1:]


def _through(target: Target) -> Run:
    return lambda calls, most: run_load(target, calls, max_concurrency=most)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin", help="or model-b, or a folder")
    parser.add_argument(
        "--weights", choices=["auto", "fp32", "bf16", "int8", "int4"], default="auto"
    )
    parser.add_argument("--quantize-lm-head", action="store_true")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--num-single", type=int, default=6, help="requests, one at a time")
    parser.add_argument("--num-many", type=int, default=512, help="requests, many under way")
    parser.add_argument(
        "--mixed", action="store_true", help="many: prompts of 16 to 512, answers of 16 to 256"
    )
    parser.add_argument("--compute-cores", metavar="LIST", help="of server and bare engine alike")
    parser.add_argument("--client-core", type=int, help="where the client runs, if bound")
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
    model = load_model(
        path,
        weights=args.weights,
        quantize_lm_head=args.quantize_lm_head,
        device="cpu",
        progress=False,
    )
    config = EngineConfig(
        weights=args.weights,
        device="cpu",
        threads=args.threads,
        compute_cores=args.compute_cores,
    )
    engine = Engine(config, model)
    load_before = os.getloadavg()[0]
    flags = ["--weights", args.weights, "--threads", str(args.threads)]
    if args.compute_cores is not None:
        flags += ["--compute-cores", args.compute_cores]
    if args.quantize_lm_head:
        flags.append("--quantize-lm-head")
    with served(path, flags) as (urls, pids):
        bare = BareEngine(engine, args.threads, config.cores)
        rounds = asyncio.run(measure(args, bare, urls, pids))
        bare.stop()
    load_after = os.getloadavg()[0]
    rows = summary(rounds)
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "load_before": load_before,
        "load_after": load_after,
        "args": {name: str(value) for name, value in vars(args).items()},
    }
    lengths = "mixed" if args.mixed else "the same"
    print(
        f"\n{about['date']}, {about['cpu']}, {about['cores']} cores, {args.threads} threads each, "
        f"torch {torch.__version__}, {args.model} ({args.weights}), prompts of {args.input_len}, "
        f"answers of {args.output_len} tokens (many: {lengths}), "
        f"{args.rounds * args.num_single} turns of one at a time, "
        f"{args.rounds} rounds of {args.num_many} with {args.concurrency} under way, "
        f"compute on {args.compute_cores or 'any core'}, client on "
        f"{'any' if args.client_core is None else args.client_core}; "
        f"load average {load_before:.1f} before, {load_after:.1f} after\n"
    )
    print(table(rows, args.concurrency))
    if args.json:
        content = {"about": about, "summary": rows, "rounds": rounds}
        record.write(args.json, __file__, content, threads=args.threads)


if __name__ == "__main__":
    main()
