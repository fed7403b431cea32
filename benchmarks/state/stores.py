"""What an append costs, on SQLite (NORMAL, FULL) and on Redis (AOF off, everysec, always).

One caller appends 1, 10 and 50 records of 120 bytes at a time, and 50 callers append one record
each to streams of their own, as an ingress with 50 running answers would. CPU is of this process,
its writer thread included, and beside it of the Redis server; latency is of one append, from the
caller's view. Redis runs here, started and ended by this program; loopback TCP.

    python -m benchmarks.state.stores
    python -m benchmarks.state.stores --seconds 5 --json out.json

Files lie in a temporary folder; set TMPDIR to measure another disk.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import socket
import sqlite3
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import record
from penstock.deployments.options import StateOptions
from penstock.deployments.state.embedded.store import EmbeddedStore
from penstock.deployments.state.factory import open_store
from penstock.deployments.state.store import StateDown, Store

RECORD = bytes(range(120))
BATCHES = (1, 10, 50)
CALLERS = 50
BUDGET_S = 5.0
WARM_S = 0.3
FSYNC = {"off": ("no", "everysec"), "everysec": ("yes", "everysec"), "always": ("yes", "always")}
STORES = ("SQLite NORMAL", "SQLite FULL", *(f"Redis AOF {name}" for name in FSYNC))


@dataclass(frozen=True)
class Server:
    """A redis-server of this program."""

    process: psutil.Process
    port: int


@contextlib.contextmanager
def redis_server(folder: Path, fsync: str) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    aof, policy = FSYNC[fsync]
    command = ["redis-server", "--port", port, "--bind", "127.0.0.1", "--dir", folder]
    command += ["--save", "", "--appendonly", aof, "--appendfsync", policy]
    server = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL)
    try:
        yield Server(psutil.Process(server.pid), port)
    finally:
        server.terminate()
        server.wait()


@contextlib.asynccontextmanager
async def opened(name: str, folder: Path) -> AsyncIterator[tuple[Store, Server | None]]:
    """The store called `name`, and the process of its server."""
    store: Store
    if name.startswith("SQLite"):
        store = await EmbeddedStore.open(folder / "state", name.split()[1])
        yield store, None
        await store.close()
        return
    with redis_server(folder, name.split()[2]) as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        store = await open_store(StateOptions(state_url=url))
        while not store.status().is_up:
            await asyncio.sleep(0.05)
        yield store, server
        await store.close()


async def measure(
    store: Store, server: Server | None, batch: int, callers: int, seconds: float
) -> dict[str, float]:
    """Appends to new streams for `seconds`. Rates and CPU are of records, latencies of calls."""
    label = secrets.token_hex(4)
    took_s: list[float] = []
    ends = time.perf_counter() + seconds

    async def append(stream: str) -> None:
        index, records = 0, [RECORD] * batch
        began = time.perf_counter()
        while began < ends:
            try:
                index = await store.append(stream, index, records, ttl_s=600, budget_s=BUDGET_S)
            except StateDown:  # a busy disk: the same records again
                continue
            took_s.append(time.perf_counter() - began)
            began = time.perf_counter()

    began, cpu_s, server_s = time.perf_counter(), time.process_time(), _cpu_s(server)
    await asyncio.gather(*(append(f"{label}-{n}") for n in range(callers)))
    wall_s, num = time.perf_counter() - began, batch * len(took_s)
    centiles = statistics.quantiles(took_s, n=100)
    return {
        "batch": batch,
        "callers": callers,
        "appends_per_s": num / wall_s,
        "cpu_us": (time.process_time() - cpu_s) / num * 1e6,
        "server_cpu_us": (_cpu_s(server) - server_s) / num * 1e6,
        "p50_ms": centiles[49] * 1e3,
        "p99_ms": centiles[98] * 1e3,
    }


def _cpu_s(server: Server | None) -> float:
    return 0.0 if server is None else sum(server.process.cpu_times()[:2])


async def run(seconds: float) -> list[dict[str, Any]]:
    rows = []
    for name in STORES:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-state-") as folder:
            async with opened(name, Path(folder)) as (store, server):
                for batch, callers in (*((batch, 1) for batch in BATCHES), (1, CALLERS)):
                    await measure(store, server, batch, callers, WARM_S)
                    row = await measure(store, server, batch, callers, seconds)
                    rows.append({"store": name, **row})
    return rows


def medians(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Row by row and figure by figure, over the rounds."""
    return [
        {
            key: value if isinstance(value, str) else statistics.median(row[key] for row in rows)
            for key, value in rows[0].items()
        }
        for rows in zip(*rounds)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="of each row")
    parser.add_argument("--rounds", type=int, default=3, help="runs; the figures are their medians")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    loads, rounds = [], []
    for _ in range(args.rounds):
        loads.append(os.getloadavg()[0])
        rounds.append(asyncio.run(run(args.seconds)))
    rows = medians(rounds)
    for row in rows:
        print(
            f"{row['store']:18} {row['batch']:3} x {row['callers']:2}  "
            f"{row['appends_per_s']:8,.0f} /s  "
            f"{row['cpu_us']:6.1f} + {row['server_cpu_us']:5.1f} us  "
            f"p50 {row['p50_ms']:7.2f} ms  p99 {row['p99_ms']:7.2f} ms"
        )
    if args.json is not None:
        version = subprocess.run(["redis-server", "--version"], capture_output=True, text=True)
        about = {
            "load": loads,  # of the machine before each round: other programs ran on it
            "seconds": args.seconds,
            "rounds": args.rounds,
            "record_bytes": len(RECORD),
            "sqlite": sqlite3.sqlite_version,
            "redis": version.stdout.split("v=")[-1].split()[0],
            "redis_py": metadata.version("redis"),
        }
        record.write(args.json, __file__, {"about": about, "rows": rows})


if __name__ == "__main__":
    main()
