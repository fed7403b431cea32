"""Rows that need Ray: a live `penstock serve`, whose processes are found by role.

Each row starts a cluster of its own (one to several minutes on two cores), and ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.faults.cluster import ENGINE_FLAGS, ClusterSetup, LiveCluster, live_cluster
from benchmarks.faults.table.house import Streamed, over_grpc
from benchmarks.faults.table.rows import Scale, Seen, row
from penstock.deployments.bench.own_server import free_port
from penstock.deployments.supervision.processes import descendants, is_running

PROMPT = "It was a bright morning, and"
LONG: dict[str, Any] = {"max_tokens": 900}
WHOLE_S = 300.0
LOAD_END_S = 2.0
DRAIN_S = 30.0


@contextlib.asynccontextmanager
async def running(setup: ClusterSetup) -> AsyncIterator[LiveCluster]:
    """`live_cluster` beside an event loop that goes on."""
    manager = live_cluster(setup)
    cluster = await asyncio.to_thread(manager.__enter__)
    try:
        yield cluster
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)


class Callers:
    """Streams one after another on each caller, compared with the first answers to them."""

    def __init__(self, cluster: LiveCluster, seen: Seen, max_tokens: int = 100):
        self._cluster, self._seen, self._max_tokens = cluster, seen, max_tokens
        self.expected: dict[int, list[Streamed]] = {}  # answers that count as right
        self._is_over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def one(self, number: int) -> Streamed:
        return await over_grpc(
            self._cluster.grpc_target, PROMPT, seed=number, max_tokens=self._max_tokens
        )

    async def learn(self, numbers: range) -> None:
        for number in numbers:
            self.expected.setdefault(number, []).append(await self.one(number))

    def begin(self, num_callers: int) -> None:
        self._tasks = [asyncio.ensure_future(self._call(n)) for n in range(num_callers)]

    async def end(self) -> None:
        self._is_over.set()
        await asyncio.gather(*self._tasks)

    async def _call(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._is_over.is_set():
            number = rng.choice(list(self.expected))
            got = await self.one(number)
            self._seen.count("answers compared")
            is_right = any(got.content == each.content for each in self.expected[number])
            self._seen.check(is_right, f"an answer differs: {got.error or got.text[:60]}")


@row(
    6,
    "Head's control plane dies",
    injected="kill -9 of Ray's GCS under streams, on a head without a store for it",
    promised="running streams finish with equal ids",
    needs=("ray",),
)
async def head_dies(scale: Scale, seen: Seen) -> None:
    async with running(ClusterSetup(num_workers=1, num_ingress=1, state="none")) as cluster:
        expected = [await over_grpc(cluster.grpc_target, PROMPT, seed=n, **LONG) for n in range(3)]
        begun = asyncio.Event()

        async def told(num_tokens: int) -> None:
            begun.set()

        streams = [
            asyncio.ensure_future(
                over_grpc(cluster.grpc_target, PROMPT, told=told, seed=n, resume_s=0.0, **LONG)
            )
            for n in range(3)
        ]
        await begun.wait()
        cluster.kill(cluster.pids("gcs")[0])
        killed_s = time.monotonic()
        for n, got in enumerate(await asyncio.gather(*streams)):
            seen.count("streams compared")
            seen.check(
                got.content == expected[n].content, f"a running stream ended with {got.error!r}"
            )
        seen.note("streams ended after s", time.monotonic() - killed_s)
        await asyncio.sleep(15.0)
        later = await over_grpc(cluster.grpc_target, PROMPT, timeout_s=20.0, resume_s=0.0)
        seen.note("a request 15 s later", later.error or "served")
        seen.note("penstock serve", "runs" if is_running(cluster.pid) else "has ended")


@row(
    14,
    "SIGTERM at load time",
    injected="SIGTERM of `penstock serve` at a random time of its first 5 s",
    promised="it exits within 2 s, and leaves no process and no port",
    needs=("ray",),
)
async def sigterm_while_loading(scale: Scale, seen: Seen) -> None:
    rng = random.Random(scale.seed)
    for _ in range(scale.of(2, 10)):
        await asyncio.to_thread(_end_while_loading, rng.uniform(0.0, 5.0), seen)
    slowest = seen.facts["longest to the exit s"]
    seen.check(slowest <= LOAD_END_S, f"it took {slowest} s to exit")


def _end_while_loading(after_s: float, seen: Seen) -> None:
    ports = {name: free_port() for name in ("http", "grpc", "metrics")}
    command = [sys.executable, "-m", "penstock.deployments.cli", "serve", "builtin"]
    command += [*ENGINE_FLAGS, *(f"--{name}-port={port}" for name, port in ports.items())]
    with tempfile.TemporaryDirectory(prefix="pst-", ignore_cleanup_errors=True) as folder:
        out = (Path(folder) / "log").open("wb")
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env={**os.environ, "TMPDIR": folder, "XDG_STATE_HOME": folder},
            process_group=0,
        )
        time.sleep(after_s)
        children = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        began_s = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        seen.most("longest to the exit s", time.monotonic() - began_s)
        seen.count(f"exit {process.returncode}")
        if process.returncode is None:
            process.kill()
        time.sleep(0.5)
        left = [pid for pid in children if is_running(pid)]
        seen.check(not left, f"{len(left)} processes are left")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for port in ports.values():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                seen.check(False, f"port {port} still accepts")


@row(
    15,
    "Update under load",
    injected="`penstock serve --ray-address` again with other settings, under streams; then with a "
    "model that does not exist",
    promised="0 failed requests, each answer wholly of one setting; a failed update keeps the old",
    needs=("ray",),
)
async def update(scale: Scale, seen: Seen) -> None:
    setup = ClusterSetup(num_workers=2, num_ingress=1, state="none")
    async with running(setup) as cluster:
        callers = Callers(cluster, seen)
        await callers.learn(range(4))
        callers.begin(3)
        began_s = time.monotonic()
        bad = await asyncio.to_thread(_again, cluster, "no-such-folder/", ())
        seen.note("exit of an update that cannot work", bad)
        seen.check(bad != 0, "an update with a model that does not exist succeeded")
        for n in range(scale.of(1, 3)):
            done = await asyncio.to_thread(
                _again, cluster, "builtin", ("--max-num-batched-tokens", str(256 + 64 * n))
            )
            seen.count("updates")
            seen.check(done == 0, f"the update ended with {done}")
        seen.note("seconds", time.monotonic() - began_s)
        await callers.end()


def _again(cluster: LiveCluster, model: str, flags: tuple[str, ...]) -> int:
    """Deploy once more on the cluster's Ray, until it serves; then leave. The exit status.

    `penstock serve --ray-address` removes its application when it is ended by a signal, so that it
    is killed instead.
    """
    with open(f"/proc/{cluster.pid}/environ", "rb") as file:
        pairs = (part.partition(b"=") for part in file.read().split(b"\0") if part)
        environment = {name.decode(): value.decode() for name, _, value in pairs}
    raylet = psutil.Process(cluster.pids("raylet")[0]).cmdline()
    address = next(part.partition("=")[2] for part in raylet if part.startswith("--gcs-address"))
    command = cluster.setup.command(cluster.ports, cluster.state_url)
    command[4] = model
    command += ["--ray-address", address, *flags]
    log = cluster.folder / f"again-{time.monotonic_ns()}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    until_s = time.monotonic() + WHOLE_S
    while process.poll() is None and time.monotonic() < until_s:
        if b"ready after" in log.read_bytes():
            process.kill()
            process.wait()
            return 0
        time.sleep(0.2)
    process.kill()
    process.wait()
    return process.returncode or 1


@row(
    27,
    "Autoscale down",
    injected="num_workers 1:2, load that needs two for a while, then little",
    promised="the second worker drains without a failed request; one is left, and stays alone",
    needs=("ray",),
)
async def autoscale_down(scale: Scale, seen: Seen) -> None:
    flags = ("--num-workers", "1:2", "--target-wait-s", "0.5", "--scale-down-after-s", "2")
    setup = ClusterSetup(num_workers=1, num_ingress=1, state="none", flags=flags)
    async with running(setup) as cluster:
        callers = Callers(cluster, seen, max_tokens=300)
        await callers.learn(range(4))
        callers.begin(48)
        grown = await _until(lambda: len(cluster.pids("worker")) == 2, WHOLE_S)
        seen.note("a second worker after s", grown)
        seen.check(grown is not None, "no second worker was started")
        await asyncio.sleep(20.0)
        await callers.end()
        shrunk = await _until(lambda: len(cluster.pids("worker")) == 1, 2 * WHOLE_S)
        seen.note("one worker again after s", shrunk)
        seen.check(shrunk is not None, "the second worker was not given back")
        after = await callers.one(0)
        seen.check(after.content == callers.expected[0][0].content, f"later: {after.error}")
        if shrunk is not None:
            await asyncio.sleep(scale.of(10, 60))
            number = len(cluster.pids("worker"))
            seen.check(number == 1, f"{number} workers later")


async def _until(condition: Callable[[], Any], within_s: float) -> float | None:
    """Seconds until it holds; None: it did not in time."""
    began_s = time.monotonic()
    while time.monotonic() < began_s + within_s:
        if await asyncio.to_thread(condition):
            return round(time.monotonic() - began_s, 1)
        await asyncio.sleep(0.25)
    return None


@row(
    28,
    "Expert store lost",
    injected="kill -9 and SIGSTOP of the expert store's process under streams of a model with "
    "experts, whose cache holds a part of them",
    promised="a request is computed rightly, or fails; never other ids; the store comes back",
    needs=("ray",),
)
async def expert_store_lost(scale: Scale, seen: Seen) -> None:
    setup = ClusterSetup(
        model="builtin-moe", num_workers=1, num_ingress=1, state="none", expert_cache_gb=0.004
    )
    async with running(setup) as cluster:
        callers = Callers(cluster, seen, max_tokens=60)
        await callers.learn(range(4))
        callers.begin(3)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            pid = cluster.pids("expert-store")[0]
            cluster.kill(pid, number)
            seen.count(f"{number.name} of the store")
            await asyncio.sleep(10.0)
            if number == signal.SIGSTOP:
                cluster.kill(pid, signal.SIGCONT)
            seen.note("whole again after s", await asyncio.to_thread(cluster.await_whole, WHOLE_S))
        await callers.end()
        seen.check(
            httpx.get(f"{cluster.http_url}/ready", timeout=30).status_code == 200, "not ready"
        )
