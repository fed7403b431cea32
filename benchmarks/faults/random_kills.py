"""Processes are killed at random under mixed load: does any client get anything else?

    python -m benchmarks.faults.random_kills --kills 1000
    python -m benchmarks.faults.random_kills --cluster --kills 80 --minutes 15 \\
        --targets worker,ingress,gate,expert-store

The second one kills all roles of a live cluster: cluster_kills.py. The first one kills workers
only, and a thousand take minutes: several worker processes (a real engine and channel each, no Ray)
behind one request core and its worker pool. While callers run calls of all features, one of the
processes is killed with SIGKILL, or stopped for some seconds and then killed, at random moments;
each is replaced. Every answer is compared with that of an undisturbed worker: text, ids, ranks of
logprobs, tool calls, finish and stop reasons, and counted tokens. At the end no worker may hold a
block. A call without a seed gets one by its context, as from an ingress with journals.

The guard: a worker is killed only while another one is connected, and no call has met two kills
so far: a request that ended three workers is refused, and a slow machine may be as long about one.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import record
from benchmarks.faults import figures
from benchmarks.faults.cluster_kills import failed, run_on_cluster
from benchmarks.faults.worker_process import CONFIG, MODEL, WorkerProcess
from benchmarks.faults.workload import Answer, answer, make_call, where
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.runtime import ModelRuntime
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.dispatch.lost_requests import PAUSE_BOUNDS
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.workers.context_policy import ContextSettings
from penstock.workers.stats import Histogram
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model

HELD_S = 30.0
MOST_KILLS = 2  # of workers, while one call runs


class ExactHistogram(Histogram):
    """One that also keeps each value."""

    def __init__(self, bounds: tuple[float, ...]):
        super().__init__(bounds)
        self.values: list[float] = []

    def observe(self, value: float, times: int = 1) -> None:
        super().observe(value, times)
        self.values += [value] * times


@dataclass
class Run:
    """The state of one run."""

    pool: WorkerPool
    core: RequestCore
    workers: list[WorkerProcess]
    expected: dict[int, Answer]
    num_kills: int = 0
    num_stops: int = 0
    num_calls: int = 0
    kills_met: dict[int, int] = field(default_factory=dict)  # by the call of each caller
    differing: list[int] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    by_feature: Counter[str] = field(default_factory=Counter)
    pauses: ExactHistogram = field(default_factory=lambda: ExactHistogram(PAUSE_BOUNDS))

    def publish(self) -> None:
        """What the registry would tell the pool."""
        self.pool.update([worker.info for worker in self.workers])


async def main_async(options: argparse.Namespace) -> dict[str, Any]:
    workers = [await asyncio.to_thread(WorkerProcess) for _ in range(options.workers)]
    pool = WorkerPool("faults")
    core = RequestCore(
        ModelRuntime(
            Tokenizer.load(resolve_model("builtin")),
            pool,
            model_name="builtin",
            vocab_size=MODEL.config.vocab_size,
            max_model_len=2048,
            contexts=ContextSettings.of(CONFIG, 2048),
        )
    )
    run = Run(pool, core, workers, {})
    pool.lost_requests.pauses = run.pauses
    run.publish()
    while pool.num_connected < len(workers):
        await asyncio.sleep(0.01)
    for number in range(options.calls):  # before any fault
        _, call, num_choices = make_call(number)
        run.expected[number] = await answer(core, call, num_choices)
    print(f"{options.calls} undisturbed answers; now {options.kills} kills", flush=True)
    began_s = time.monotonic()
    stopping = asyncio.Event()
    callers = [
        asyncio.ensure_future(_call_forever(run, options, seed, stopping))
        for seed in range(options.callers)
    ]
    await _kill_at_random(run, options)
    stopping.set()
    await asyncio.gather(*callers)
    seconds = time.monotonic() - began_s
    num_held = await _num_held(run)
    await pool.close()
    for worker in run.workers:
        worker.kill()
    return _results(run, seconds, num_held)


async def _num_held(run: Run) -> int:
    """Blocks that workers hold at the end. Those of the last answers go within HELD_S."""
    until_s = time.monotonic() + HELD_S
    while True:
        await asyncio.sleep(1.0)
        num_held = sum(worker.stats().num_live_blocks for worker in run.workers)
        if not num_held or time.monotonic() > until_s:
            return num_held


async def _call_forever(
    run: Run, options: argparse.Namespace, seed: int, stopping: asyncio.Event
) -> None:
    rng = random.Random(seed)
    while not stopping.is_set():
        number = rng.randrange(options.calls)
        feature, call, num_choices = make_call(number)
        run.num_calls += 1
        run.by_feature[feature] += 1
        run.kills_met[seed] = 0
        try:
            got = await answer(run.core, call, num_choices)
        except ServiceError as error:
            run.lost[error.code] += 1
            print(f"call {number} ({feature}) ended with {error.code}", flush=True)
            continue
        finally:
            del run.kills_met[seed]
        if got != run.expected[number]:
            run.differing.append(number)
            print(
                f"call {number} ({feature}) differs {where(got, run.expected[number])}", flush=True
            )


async def _kill_at_random(run: Run, options: argparse.Namespace) -> None:
    rng = random.Random(options.seed)
    while run.num_kills < options.kills:
        await asyncio.sleep(rng.expovariate(1.0 / options.every_s))
        while run.pool.num_connected < 2 or max(run.kills_met.values(), default=0) >= MOST_KILLS:
            await asyncio.sleep(0.01)
        index = rng.randrange(len(run.workers))
        victim = run.workers[index]
        if rng.random() < options.stop_share:  # silent first, as a partition is
            run.num_stops += 1
            victim.send(signal.SIGSTOP)
            await asyncio.sleep(rng.uniform(0.0, 7.0))
        run.kills_met = {caller: num + 1 for caller, num in run.kills_met.items()}
        await asyncio.to_thread(victim.kill)
        run.num_kills += 1
        run.workers[index] = await asyncio.to_thread(WorkerProcess)
        run.publish()
        if run.num_kills % 50 == 0:
            print(f"{run.num_kills} kills, {run.num_calls} calls", flush=True)


def _results(run: Run, seconds: float, num_held: int) -> dict[str, Any]:
    lost = run.pool.lost_requests
    return {
        "kills": run.num_kills,
        "of these stopped first": run.num_stops,
        "seconds": round(seconds, 1),
        "calls": run.num_calls,
        "calls by feature": dict(sorted(run.by_feature.items())),
        "requests continued": lost.num_continued,
        "differing answers": len(run.differing),
        "lost requests": dict(run.lost),
        "blocks held at the end": num_held,
        "pauses s": figures.summary(run.pauses.values),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--every-s", type=float, help="mean time between kills; 0.5, or 5")
    parser.add_argument("--cluster", action="store_true", help="on a live cluster, all roles")
    parser.add_argument(
        "--targets",
        default="worker,ingress,gate,expert-store",
        help="with --cluster: roles, also registry and controller",
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="with --cluster: at most")
    parser.add_argument("--stop-share", type=float, default=0.02, help="stopped before the kill")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument("--calls", type=int, default=100, help="different calls")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule of kills")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    if options.every_s is None:
        options.every_s = 5.0 if options.cluster else 0.5
    results = run_on_cluster(options) if options.cluster else asyncio.run(main_async(options))
    for name, value in results.items():
        print(f"{name}: {value}")
    if options.json:
        record.write(options.json, __file__, results, threads=1)
    if failed(results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
