"""What journals of streams cost: TTFT, gaps between tokens, and the ingress's CPU per token.

Three ingresses over one worker: without journals, with a folder (SQLite), with Redis. They take
turns within each round, so that a busy machine hits all of them, and what a journal adds is the
difference to the ingress without one in the same round. The first row of each path is a second turn
without journals in each round: what it adds is noise. The worker makes one token a stream every
`--step-ms` (see ingress_cpu.py); the client is this process. The defaults keep two cores half idle:
8 streams of 50 tokens a second.

    python -m benchmarks.cluster.journal_cost
    python -m benchmarks.cluster.journal_cost --streams 64 --rounds 8 --json out.json

The load average of the machine is recorded before each round: what else ran then is in the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster.ingress_cpu import cpu_ms, run_ingress, run_worker
from benchmarks.common import record
from benchmarks.state.stores import redis_server
from penstock.deployments.bench.figures import Outcome
from penstock.deployments.bench.load import Job
from penstock.deployments.bench.open_loop import BenchCall, run_load
from penstock.deployments.bench.targets import target_of

OFF, AGAIN, FOLDER, REDIS = "off", "off, again", "SQLite", "Redis"
STORES = (OFF, AGAIN, FOLDER, REDIS)
QUARTILES = (25, 50, 75)
PATHS = ("HTTP, SSE", "gRPC")


async def measure(
    args: argparse.Namespace, urls: dict[str, dict[str, str]], pids: dict[str, int]
) -> list[dict[str, Any]]:
    """Of each round, path and store: TTFT and gaps in ms, CPU milliseconds per token."""
    rng = np.random.default_rng(0)
    job = Job(0.0, args.input_len, args.output_len)
    rows = []
    for number in range(args.rounds + 1):
        load = os.getloadavg()[0]
        for path in PATHS:
            for store in STORES[:: 1 if number % 2 else -1]:
                ingress = OFF if store == AGAIN else store
                target = target_of(
                    urls[ingress][path],
                    model=None,
                    api_key=None,
                    is_chat=False,
                    sampling={"temperature": 0.0, "ignore_eos": True},
                    extra_body={},
                )
                ids = rng.integers(1000, size=(args.requests, args.input_len))
                calls = [
                    BenchCall(job, [int(n) for n in row], args.output_len, None) for row in ids
                ]
                before = sum(cpu_ms(pids[ingress]).values())
                outcomes = await run_load(target, calls, max_concurrency=args.streams)
                used_ms = sum(cpu_ms(pids[ingress]).values()) - before
                await target.close()
                errors = {outcome.error for outcome in outcomes if outcome.error}
                assert not errors, errors
                rows.append(
                    {
                        "round": number,
                        "path": path,
                        "store": store,
                        "load": load,
                        "cpu_ms_per_token": used_ms / (args.requests * args.output_len),
                        **latencies(outcomes),
                    }
                )
    return [row for row in rows if row["round"]]  # the first one warms up


def latencies(outcomes: list[Outcome]) -> dict[str, float]:
    ttft = [1e3 * each.ttft_s for each in outcomes]
    gaps = [
        1e3 * (later.at_s - earlier.at_s)
        for each in outcomes
        for earlier, later in pairwise(each.chunks)
    ]
    return {
        "ttft_p50_ms": float(np.percentile(ttft, 50)),
        "ttft_p99_ms": float(np.percentile(ttft, 99)),
        "gap_p50_ms": float(np.percentile(gaps, 50)),
        "gap_p99_ms": float(np.percentile(gaps, 99)),
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each path and store: medians over the rounds, and quartiles of what the store adds."""
    names = [name for name in rows[0] if name.endswith(("_ms", "_token"))]
    found = []
    for path in PATHS:
        by_store = {
            store: [row for row in rows if row["path"] == path and row["store"] == store]
            for store in STORES
        }
        for store, mine in by_store.items():
            row: dict[str, Any] = {"path": path, "store": store}
            for name in names:
                row[name] = statistics.median(each[name] for each in mine)
                added = [each[name] - base[name] for each, base in zip(mine, by_store[OFF])]
                row[f"added_{name}"] = [float(each) for each in np.percentile(added, QUARTILES)]
            found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=8, help="under way at a time")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=7, help="after one that warms up")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipe, worker_end = context.Pipe()
    worker = context.Process(target=run_worker, args=(worker_end, args.step_ms / 1e3), daemon=True)
    worker.start()
    info = pipe.recv()
    with tempfile.TemporaryDirectory() as name, redis_server(Path(name), "everysec") as redis:
        folder = Path(name) / "state"
        stores = {
            OFF: None,
            FOLDER: f"sqlite://{folder}",
            REDIS: f"redis://127.0.0.1:{redis.port}/0",
        }
        urls, pids, ends = {}, {}, [(pipe, worker)]
        for store, state_url in stores.items():
            to_ingress, end = context.Pipe()
            ingress = context.Process(
                target=run_ingress, args=(end, info, None, state_url), daemon=True
            )
            ingress.start()
            urls[store] = to_ingress.recv()
            assert ingress.pid is not None, "it has started"
            pids[store] = ingress.pid
            ends.insert(0, (to_ingress, ingress))
        rows = asyncio.run(measure(args, urls, pids))
        for each, process in ends:
            each.send("stop")
            process.join(10)
    for row in summary(rows):
        print(", ".join(f"{name} {_shown(value)}" for name, value in row.items()))
    if args.json:
        record.write(args.json, __file__, {"rows": summary(rows), "rounds": rows})


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(f"{each:+.3f}" for each in value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
