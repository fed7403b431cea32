"""What TLS between clients and an ingress costs: CPU per token, TTFT, and a new connection.

Two ingresses over one worker, without TLS and with it. They take turns within each round, so that a
busy machine hits both, and what TLS adds is the difference within a round. The row "plain, again"
is a second turn without TLS in each round: what it adds is noise. The worker makes one token a
stream every `--step-ms` (see ingress_cpu.py); the client is this process, and its CPU is not
counted.

    python -m benchmarks.cluster.tls_cost
    python -m benchmarks.cluster.tls_cost --streams 32 --rounds 5 --json out.json
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster.ingress_cpu import cpu_ms, run_ingress, run_worker
from benchmarks.common import record
from penstock.deployments.bench.load import Job
from penstock.deployments.bench.open_loop import BenchCall, run_load
from penstock.deployments.bench.targets import Target, target_of
from penstock.deployments.client.tls import ClientTls
from penstock.deployments.security.authority import make_all

PLAIN, AGAIN, TLS = "plain", "plain, again", "TLS"
WAYS = (PLAIN, AGAIN, TLS)
PATHS = ("HTTP, SSE", "gRPC")
QUARTILES = (25, 50, 75)


class Bench:
    """The two ingresses, and how to reach them."""

    def __init__(self, urls: dict[str, dict[str, str]], pids: dict[str, int], ca_file: str):
        self._urls, self._pids = urls, pids
        self._tls = ClientTls(ca_file)

    def target(self, way: str, path: str) -> Target:
        return target_of(
            self._urls[TLS if way == TLS else PLAIN][path],
            model=None,
            api_key=None,
            is_chat=False,
            sampling={"temperature": 0.0, "ignore_eos": True},
            extra_body={},
            tls=self._tls,
        )

    def cpu_ms(self, way: str) -> float:
        return sum(cpu_ms(self._pids[TLS if way == TLS else PLAIN]).values())


async def measure(args: argparse.Namespace, bench: Bench) -> list[dict[str, Any]]:
    """Of each round, path and way: CPU ms per token, TTFT in ms, and of a new connection both."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(args.rounds + 1):
        load = os.getloadavg()[0]
        for path in PATHS:
            for way in WAYS[:: 1 if number % 2 else -1]:
                ids = rng.integers(1000, size=(args.requests, args.input_len))
                row: dict[str, Any] = {"round": number, "path": path, "way": way, "load": load}
                row |= await _streams(args, bench, way, path, ids)
                row |= await _connections(args, bench, way, path)
                rows.append(row)
    return [row for row in rows if row["round"]]  # the first one warms up


async def _streams(
    args: argparse.Namespace, bench: Bench, way: str, path: str, ids: Any
) -> dict[str, float]:
    """Over connections that are open already."""

    def calls(output_len: int) -> list[BenchCall]:
        job = Job(0.0, args.input_len, output_len)
        return [BenchCall(job, [int(n) for n in row], output_len, None) for row in ids]

    target = bench.target(way, path)
    await run_load(target, calls(1)[: args.streams], max_concurrency=args.streams)
    before = bench.cpu_ms(way)
    outcomes = await run_load(target, calls(args.output_len), max_concurrency=args.streams)
    used_ms = bench.cpu_ms(way) - before
    alone = await run_load(target, calls(1), max_concurrency=1)
    await target.close()
    errors = {outcome.error for outcome in (*outcomes, *alone) if outcome.error}
    assert not errors, errors
    return {
        "cpu_ms_per_token": used_ms / (args.requests * args.output_len),
        "ttft_p50_ms": 1e3 * statistics.median(each.ttft_s for each in outcomes),
        "ttft_alone_p50_ms": 1e3 * statistics.median(each.ttft_s for each in alone),
    }


async def _connections(
    args: argparse.Namespace, bench: Bench, way: str, path: str
) -> dict[str, float]:
    """One after the other: connect, and ask for the models."""
    times_ms, before = [], bench.cpu_ms(way)
    for _ in range(args.connections):
        target = bench.target(way, path)
        began_s = time.perf_counter()
        await target.model()
        times_ms.append(1e3 * (time.perf_counter() - began_s))
        await target.close()
    return {
        "connect_p50_ms": statistics.median(times_ms),
        "connect_cpu_ms": (bench.cpu_ms(way) - before) / args.connections,
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each path and way: medians over the rounds, and quartiles of what it adds to plain."""
    names = [name for name in rows[0] if name.endswith(("_ms", "_token"))]
    found = []
    for path in PATHS:
        by_way = {
            way: [row for row in rows if row["path"] == path and row["way"] == way] for way in WAYS
        }
        for way, mine in by_way.items():
            row: dict[str, Any] = {"path": path, "way": way}
            for name in names:
                row[name] = statistics.median(each[name] for each in mine)
                added = [each[name] - base[name] for each, base in zip(mine, by_way[PLAIN])]
                row[f"added_{name}"] = [float(each) for each in np.percentile(added, QUARTILES)]
            found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=8, help="under way at a time")
    parser.add_argument("--requests", type=int, default=64, help="of each turn")
    parser.add_argument("--connections", type=int, default=20, help="new ones of each turn")
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    to_worker, worker_end = context.Pipe()
    worker = context.Process(target=run_worker, args=(worker_end, args.step_ms / 1e3), daemon=True)
    worker.start()
    info = to_worker.recv()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_all(folder, "bench", days=1)
        files = (str(folder / "server.crt"), str(folder / "server.key"))
        urls, pids, ends = {}, {}, [(to_worker, worker)]
        for way, tls_files in ((PLAIN, None), (TLS, files)):
            to_ingress, end = context.Pipe()
            ingress = context.Process(
                target=run_ingress, args=(end, info, None, None, tls_files), daemon=True
            )
            ingress.start()
            urls[way] = to_ingress.recv()
            assert ingress.pid is not None, "it has started"
            pids[way] = ingress.pid
            ends.insert(0, (to_ingress, ingress))
        rows = asyncio.run(measure(args, Bench(urls, pids, str(folder / "ca.crt"))))
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
