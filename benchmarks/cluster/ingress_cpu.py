"""The ingress's CPU time per streamed token over HTTP and gRPC, with no model and no Ray.

Three processes: a worker's channel whose engine makes one token a stream every `--step-ms`, the
ingress (pool, request core and both listeners, as in production), and the client, this one. Paced,
so a busy machine changes the figures little: CPU time is counted, by thread, not wall time. With
`--profile FILE` the ingress's event loop runs under cProfile. Linux: threads are read from /proc.

    python -m benchmarks.cluster.ingress_cpu
    python -m benchmarks.cluster.ingress_cpu --streams 1 --paths gRPC --profile /tmp/grpc.prof
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import multiprocessing
import socket
import statistics
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
import uvloop

from benchmarks.common import record
from penstock.deployments.bench.load import Job
from penstock.deployments.bench.open_loop import BenchCall, run_load
from penstock.deployments.bench.targets import target_of
from penstock.deployments.config import ServeConfig
from penstock.deployments.ingress.core.bounds.connections import Connections
from penstock.deployments.ingress.core.runtime import ModelRuntime
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.deployments.ingress.grpc.server import start_server
from penstock.deployments.ingress.http.app import build_app
from penstock.deployments.ingress.http.listener.protocol import bounded_protocol
from penstock.deployments.ingress.http.listener.tls import TlsServer
from penstock.deployments.ingress.journal.journals import Journals
from penstock.deployments.ingress.tracing.opening import open_tracer
from penstock.deployments.options import StateOptions
from penstock.deployments.security.certificates import Certificates
from penstock.deployments.state.factory import open_store
from penstock.workers.channel.server import ChannelServer
from penstock.workers.request import Delta, FinishReason, FirstTokenTimes, Request
from penstock.workers.stats import EngineStats, WorkerInfo
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model

MODEL = "builtin"
VOCAB_SIZE, MAX_MODEL_LEN = 8192, 4096


class PacedEngine:
    """One token of every request each step, on a thread of its own."""

    def __init__(self, channel: ChannelServer, step_s: float):
        self._channel = channel
        self._step_s = step_s
        self._left: dict[str, int] = {}  # tokens still to come, by request
        self._new: set[str] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request: Request) -> None:
        with self._lock:
            self._left[request.request_id] = request.params.max_tokens or 16
            self._new.add(request.request_id)

    def cancel(self, request_id: str) -> None:
        with self._lock:
            self._left.pop(request_id, None)

    @property
    def is_stalled(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        return EngineStats()

    def _run(self) -> None:
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + self._step_s, time.monotonic())
            time.sleep(max(0.0, due_s - time.monotonic()))
            with self._lock:
                deltas = [self._delta(name) for name in list(self._left)]
            if deltas:
                self._channel.deliver(deltas)

    def _delta(self, name: str) -> Delta:
        self._left[name] -= 1
        delta = Delta(name, [300 + self._left[name] % 4000])
        if name in self._new:
            self._new.remove(name)
            delta.times = FirstTokenTimes(0.0, 0.0)
        if self._left[name] == 0:
            delta.finish_reason = FinishReason.LENGTH
            del self._left[name]
        return delta


def run_worker(pipe: Connection, step_s: float) -> None:
    channel = ChannelServer("127.0.0.1", MODEL, MAX_MODEL_LEN)
    channel.start(PacedEngine(channel, step_s))
    pipe.send(channel.info)
    pipe.recv()


def run_ingress(
    pipe: Connection,
    worker: WorkerInfo,
    profile: str | None,
    state_url: str | None = None,
    tls_files: tuple[str, str] | None = None,
    traces: ServeConfig | None = None,
) -> None:
    """`state_url`: of the store of journals; None: there are none. `tls_files`: certificate and
    key; None: no TLS. `traces`: the settings of traces; None: there are none."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as Ray's actors do
        runner.run(_ingress(pipe, worker, profile, state_url, tls_files, traces))


async def _ingress(
    pipe: Connection,
    worker: WorkerInfo,
    profile: str | None,
    state_url: str | None,
    tls_files: tuple[str, str] | None,
    traces: ServeConfig | None,
) -> None:
    journals = None
    if state_url is not None:
        journals = Journals(await open_store(StateOptions(state_url=state_url)), "bench")
    pool = WorkerPool("bench")
    pool.update([worker])
    core = RequestCore(
        ModelRuntime(
            Tokenizer.load(resolve_model(MODEL)),
            pool,
            model_name=MODEL,
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
        ),
        tracer=None if traces is None else open_tracer(traces, "bench"),
    )
    listener = socket.create_server(("127.0.0.1", 0))
    app = build_app(core, journals=journals)
    connections = Connections(4096, 4096)
    config = uvicorn.Config(
        app,
        http=bounded_protocol(connections, core.metrics.num_errors_returned),
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
    )
    certificates = None if tls_files is None else Certificates(*tls_files)
    http = (
        uvicorn.Server(config)
        if certificates is None
        else TlsServer(config, certificates.server_context, connections)
    )
    serving = asyncio.ensure_future(http.serve(sockets=[listener]))
    over_grpc = await start_server(
        core, "127.0.0.1:0", journals=journals, certificates=certificates
    )
    while not (http.started and pool.ready()):
        await asyncio.sleep(0.01)
    ports = listener.getsockname()[1], over_grpc.port
    gc.collect()
    gc.freeze()
    profiler = cProfile.Profile()
    if profile is not None:
        profiler.enable()
    s = "" if certificates is None else "s"
    urls = (f"http{s}://127.0.0.1:{ports[0]}", f"grpc{s}://127.0.0.1:{ports[1]}")
    pipe.send(dict(zip(("HTTP, SSE", "gRPC"), urls, strict=True)))
    await asyncio.to_thread(pipe.recv)
    if profile is not None:
        profiler.disable()
        profiler.dump_stats(profile)
    http.should_exit = True
    await over_grpc.stop(0)
    await serving
    if journals is not None:
        await journals.close()
    if core.tracer is not None:
        await asyncio.to_thread(core.tracer.close)
    await pool.close()


def cpu_ms(pid: int) -> dict[str, float]:
    """CPU milliseconds that a process has used, by thread name."""
    used: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        on_cpu_ns = int((task / "schedstat").read_text().split()[0])
        used[name] = used.get(name, 0.0) + on_cpu_ns / 1e6
    return used


async def measure(
    args: argparse.Namespace, urls: dict[str, str], pids: dict[str, int]
) -> list[dict[str, Any]]:
    """Of each round and path: CPU milliseconds per token of each process, and by thread."""
    rng = np.random.default_rng(0)
    job = Job(0.0, args.input_len, args.output_len)
    sampling = {"temperature": 0.0, "ignore_eos": True}
    rows = []
    for number in range(args.rounds + 1):
        for path in args.paths[:: 1 if number % 2 else -1]:
            target = target_of(
                urls[path],
                model=None,
                api_key=None,
                is_chat=False,
                sampling=sampling,
                extra_body={},
            )
            ids = rng.integers(1000, size=(args.requests, args.input_len))
            calls = [BenchCall(job, [int(n) for n in row], args.output_len, None) for row in ids]
            before = {name: cpu_ms(pid) for name, pid in pids.items()}
            outcomes = await run_load(target, calls, max_concurrency=args.streams)
            after = {name: cpu_ms(pid) for name, pid in pids.items()}
            await target.close()
            errors = {outcome.error for outcome in outcomes if outcome.error}
            assert not errors, errors
            num_tokens = args.requests * args.output_len
            row: dict[str, Any] = {"round": number, "path": path}
            row["chunks"] = sum(len(outcome.chunks) for outcome in outcomes) / num_tokens
            for name in pids:
                threads = {
                    each: (used - before[name].get(each, 0.0)) / num_tokens
                    for each, used in after[name].items()
                }
                row[name] = sum(threads.values())
                row[f"{name} threads"] = threads
            rows.append(row)
    return [row for row in rows if row["round"]]  # the first one warms up


def summary(rows: list[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a path: medians over the rounds, as the page of results shows them."""
    names = {
        "ingress_cpu_ms_per_token": "ingress",
        "messages_per_token": "chunks",
        "channel_cpu_ms_per_token": "worker",
    }
    return [
        {"step_ms": args.step_ms, "path": path}
        | {
            key: statistics.median(row[name] for row in rows if row["path"] == path)
            for key, name in names.items()
        }
        for path in args.paths
    ]


def table(rows: list[dict[str, Any]], paths: list[str]) -> str:
    lines = ["| path | ingress CPU per token | its threads | worker's channel | chunks per token |"]
    lines.append("|" + " --- |" * 5)
    for path in paths:
        mine = [row for row in rows if row["path"] == path]

        def median(name: str, mine: list[dict[str, Any]] = mine) -> float:
            return statistics.median(row[name] for row in mine)

        threads: dict[str, list[float]] = {}
        for row in mine:
            for name, used in row["ingress threads"].items():
                threads.setdefault(name, []).append(used)
        parts = {name: statistics.median(used) for name, used in threads.items()}
        shown = ", ".join(
            f"{name} {used:.3f}"
            for name, used in sorted(parts.items(), key=lambda each: -each[1])
            if used >= 0.001
        )
        lines.append(
            f"| {path} | {median('ingress'):.3f} ms | {shown} | {median('worker'):.3f} ms "
            f"| {median('chunks'):.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=32, help="under way at a time")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    parser.add_argument("--paths", nargs="+", default=["HTTP, SSE", "gRPC"])
    parser.add_argument("--profile", metavar="FILE", help="cProfile of the ingress's event loop")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    to_worker, worker_end = context.Pipe()
    worker = context.Process(target=run_worker, args=(worker_end, args.step_ms / 1e3), daemon=True)
    worker.start()
    info = to_worker.recv()
    to_ingress, ingress_end = context.Pipe()
    ingress = context.Process(
        target=run_ingress, args=(ingress_end, info, args.profile), daemon=True
    )
    ingress.start()
    urls = to_ingress.recv()
    assert worker.pid is not None and ingress.pid is not None, "both have started"
    rows = asyncio.run(measure(args, urls, {"worker": worker.pid, "ingress": ingress.pid}))
    for pipe, process in ((to_ingress, ingress), (to_worker, worker)):
        pipe.send("stop")
        process.join(10)
    print(table(rows, args.paths))
    if args.json:
        record.write(args.json, __file__, {"rows": summary(rows, args), "rounds": rows})


if __name__ == "__main__":
    main()
