"""How long /health, /ready and /live take at an ingress that has far too much to do.

Four processes: a worker's channel that makes one token a stream each `--step-ms`, the ingress, a
client that keeps `--streams` streams open, and this one, which asks for the health over a
connection that it keeps and over a new one, each `--every-ms`. The first phase has no load. The
ingress's event loop runs whatever it has in turns, so what health waits for is the longest turn
and, on a machine with few cores, its share of them: `loadavg` is in the record.

    python -m benchmarks.cluster.health_under_load --streams 500
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.cluster.ingress_cpu import cpu_ms, run_ingress, run_worker
from benchmarks.common import record

PATHS = ("/health", "/ready", "/live")


def run_clients(pipe: Connection, port: int, num_streams: int, max_tokens: int) -> None:
    """Keep `num_streams` streams open until told to end; then send how many ended, and how."""
    asyncio.run(_clients(pipe, port, num_streams, max_tokens))


async def _clients(pipe: Connection, port: int, num_streams: int, max_tokens: int) -> None:
    """Over plain sockets: a client's library would take more of the machine than the ingress."""
    counts = {"begun": 0, "ended": 0, "refused": 0}
    body = {"prompt": "It was a bright morning. " * 40, "max_tokens": max_tokens, "stream": True}
    content = json.dumps({**body, "ignore_eos": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )

    async def keep_one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while True:
            writer.write(head.encode() + content)
            first = await reader.readline()
            if b" 200 " not in first:
                counts["refused"] += 1
                await reader.readuntil(b"}}")
                continue
            counts["begun"] += 1
            await reader.readuntil(b"data: [DONE]")
            while await reader.readline() != b"0\r\n":
                pass
            await reader.readline()
            counts["ended"] += 1

    tasks = [asyncio.ensure_future(keep_one()) for _ in range(num_streams)]
    while counts["begun"] + counts["refused"] < num_streams:
        await asyncio.sleep(0.1)
    pipe.send("all have begun")
    await asyncio.to_thread(pipe.recv)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    pipe.send(counts)


async def probe(url: str, seconds: float, every_s: float) -> dict[str, Any]:
    """Latencies in ms over a kept connection and over new ones, in turn over PATHS."""
    kept_ms: list[float] = []
    fresh_ms: list[float] = []
    failed = 0
    until_s = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=30) as kept:
        number = 0
        while time.monotonic() < until_s:
            path, number = PATHS[number % len(PATHS)], number + 1
            for times, is_fresh in ((kept_ms, False), (fresh_ms, True)):
                began_s = time.perf_counter()
                if is_fresh:
                    async with httpx.AsyncClient(base_url=url, timeout=30) as fresh:
                        began_s = time.perf_counter()  # the client itself takes milliseconds
                        answer = await fresh.get(path)
                else:
                    answer = await kept.get(path)
                times.append(1000 * (time.perf_counter() - began_s))
                failed += answer.status_code != 200
            await asyncio.sleep(every_s)
    return {"kept": _quantiles(kept_ms), "new": _quantiles(fresh_ms), "failed": failed}


def _quantiles(times_ms: list[float]) -> dict[str, float]:
    values = np.percentile(times_ms, [50, 95, 99, 100])
    named = dict(zip(("p50", "p95", "p99", "max"), (round(float(v), 1) for v in values)))
    return {"num": len(times_ms), **named}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--every-ms", type=float, default=50.0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ends: dict[str, tuple[Connection, Any]] = {}

    def start(name: str, run: Any, *arguments: Any) -> Connection:
        near, far = context.Pipe()
        process = context.Process(target=run, args=(far, *arguments), daemon=True)
        process.start()
        ends[name] = near, process
        return near

    worker = start("worker", run_worker, args.step_ms / 1000).recv()
    url = start("ingress", run_ingress, worker, None).recv()["HTTP, SSE"]
    phases = {"idle": asyncio.run(probe(url, args.seconds, args.every_ms / 1000))}
    port = int(url.rsplit(":", 1)[1])
    clients = start("clients", run_clients, port, args.streams, args.output_len)
    clients.recv()  # all have begun
    pid = ends["ingress"][1].pid
    before, began_s = sum(cpu_ms(pid).values()), time.monotonic()
    phases["loaded"] = asyncio.run(probe(url, args.seconds, args.every_ms / 1000))
    used = (sum(cpu_ms(pid).values()) - before) / 1000 / (time.monotonic() - began_s)
    load = [round(each, 1) for each in os.getloadavg()]
    clients.send("end")
    statuses = clients.recv()
    for name in ("ingress", "worker"):
        near, process = ends[name]
        near.send("end")
        process.join(20)
    for name, found in phases.items():
        print(name, found)
    print("streams:", statuses, "load average:", load, f"CPUs of the ingress: {used:.2f}")
    if args.json is not None:
        results = {"phases": phases, "statuses": statuses, "loadavg": load, "ingress_cpus": used}
        record.write(args.json, __file__, results)


if __name__ == "__main__":
    main()
