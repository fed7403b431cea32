"""What traces cost an ingress: CPU per request, with and without them, in one run.

Four ingresses over one worker: two without traces, one that traces each request, and one that
traces every tenth. They take turns within each round, so that a busy machine hits all, and what
traces add is the difference within a round. The row "off, again" is of the second one without
traces: what it adds is noise. The worker makes one token a stream every `--step-ms` (see
ingress_cpu.py); client and receiver are this process, and its CPU is not counted.

    python -m benchmarks.cluster.trace_cost
    python -m benchmarks.cluster.trace_cost --output-len 8 --rounds 9 --json out.json
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks.cluster.ingress_cpu import cpu_ms, run_ingress, run_worker
from benchmarks.common import record
from penstock.deployments.bench.load import Job
from penstock.deployments.bench.open_loop import BenchCall, run_load
from penstock.deployments.bench.targets import target_of
from penstock.deployments.config import ServeConfig

OFF, AGAIN = "off", "off, again"
RATIOS = {OFF: None, AGAIN: None, "every tenth": 0.1, "on": 1.0}
PATHS = ("HTTP, SSE", "gRPC")
QUARTILES = (25, 50, 75)


@contextmanager
def receiver() -> Iterator[tuple[str, list[int]]]:
    """The address of a receiver of OTLP, and how many spans each message had."""
    counts: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            message = ExportTraceServiceRequest.FromString(body)
            scopes = (each for group in message.resource_spans for each in group.scope_spans)
            counts.append(sum(len(scope.spans) for scope in scopes))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", counts
    finally:
        server.shutdown()
        server.server_close()


async def measure(
    args: argparse.Namespace, urls: dict[str, dict[str, str]], pids: dict[str, int]
) -> list[dict[str, Any]]:
    """Of each round, path and way: CPU ms per request of the ingress, all its threads together."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(args.rounds + 1):
        for path in PATHS:
            for way in list(RATIOS)[:: 1 if number % 2 else -1]:
                load = os.getloadavg()[0]
                used = await _cpu_ms_of_requests(args, urls[way][path], pids[way], rng)
                row = {"round": number, "path": path, "way": way, "load": load}
                rows.append({**row, "cpu_ms_per_request": used / args.requests})
    return [row for row in rows if row["round"]]  # the first one warms up


async def _cpu_ms_of_requests(
    args: argparse.Namespace, url: str, pid: int, rng: np.random.Generator
) -> float:
    """Until the thread of the exporter has sent what the requests left, too."""
    target = target_of(
        url,
        model=None,
        api_key=None,
        is_chat=False,
        sampling={"temperature": 0.0, "ignore_eos": True},
        extra_body={},
    )
    job = Job(0.0, args.input_len, args.output_len)
    ids = rng.integers(1000, size=(args.requests, args.input_len))
    calls = [BenchCall(job, [int(n) for n in row], args.output_len, None) for row in ids]
    before = sum(cpu_ms(pid).values())
    outcomes = await run_load(target, calls, max_concurrency=args.streams)
    await asyncio.sleep(2 * args.delay_ms / 1e3)
    used = sum(cpu_ms(pid).values()) - before
    await target.close()
    errors = {outcome.error for outcome in outcomes if outcome.error}
    if errors:
        raise RuntimeError(f"requests failed: {errors}")
    return used


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each path and way: the median, and quartiles of what it adds and of the ratio."""
    found = []
    for path in PATHS:
        by_way = {
            way: [
                row["cpu_ms_per_request"]
                for row in rows
                if row["path"] == path and row["way"] == way
            ]
            for way in RATIOS
        }
        for way, mine in by_way.items():
            added = [each - base for each, base in zip(mine, by_way[OFF], strict=True)]
            ratios = [each / base for each, base in zip(mine, by_way[OFF], strict=True)]
            found.append(
                {
                    "path": path,
                    "way": way,
                    "cpu_ms_per_request": statistics.median(mine),
                    "added_cpu_ms_per_request": [float(n) for n in np.percentile(added, QUARTILES)],
                    "ratio": [float(n) for n in np.percentile(ratios, QUARTILES)],
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=16, help="under way at a time")
    parser.add_argument("--requests", type=int, default=128, help="of each turn")
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--delay-ms", type=int, default=500, help="of the exporter's batches")
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = str(args.delay_ms)
    context = multiprocessing.get_context("spawn")
    to_worker, worker_end = context.Pipe()
    worker = context.Process(target=run_worker, args=(worker_end, args.step_ms / 1e3), daemon=True)
    worker.start()
    info = to_worker.recv()
    with receiver() as (url, counts):
        urls, pids, ends = {}, {}, [(to_worker, worker)]
        for way, ratio in RATIOS.items():
            traces = None
            if ratio is not None:
                traces = ServeConfig(otlp_traces_endpoint=url, otlp_traces_sample_ratio=ratio)
            to_ingress, end = context.Pipe()
            ingress = context.Process(
                target=run_ingress, args=(end, info, None, None, None, traces), daemon=True
            )
            ingress.start()
            urls[way] = to_ingress.recv()
            pids[way] = ingress.pid or 0
            ends.insert(0, (to_ingress, ingress))
        rows = asyncio.run(measure(args, urls, pids))
        for each, process in ends:
            each.send("stop")
            process.join(10)
    found = summary(rows)
    for row in found:
        print(", ".join(f"{name} {_shown(value)}" for name, value in row.items()))
    print(f"{sum(counts)} spans in {len(counts)} messages")
    if args.json:
        record.write(args.json, __file__, {"rows": found, "rounds": rows, "spans": sum(counts)})


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(f"{each:.3f}" for each in value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
