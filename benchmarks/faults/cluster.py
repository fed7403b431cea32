"""A live `penstock serve` for fault runs: started, its processes found by role, killed, awaited.

    with live_cluster(ClusterSetup(num_workers=2, num_ingress=2)) as cluster:
        cluster.kill(cluster.pids("worker")[0])
        cluster.await_whole(120.0)

Everything is a process of its own, as in production: workers, ingresses, gate, registry, expert
store, Ray's GCS and raylet, Serve's controller, and a redis-server where there are two ingresses.
Roles are told apart by the titles that Ray gives its processes. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.state.stores import redis_server
from penstock.deployments.bench.own_server import free_port
from penstock.deployments.supervision.processes import descendants, is_running

TITLES = {
    "worker": "ray::ServeReplica:penstock:Worker",
    "ingress": "ray::ServeReplica:penstock:Ingress",
    "gate": "ray::GateServer",
    "registry": "ray::Registry",
    "expert-store": "ray::StoreActor",
    "controller": "ray::ServeController",
    "gcs": "ray/core/src/ray/gcs/gcs_server",
    "raylet": "ray/core/src/ray/raylet/raylet",
}
SUPERVISED = ("worker", "ingress", "gate", "registry", "expert-store", "controller")  # restarted
ENGINE_FLAGS = (
    *("--weights", "fp32", "--device", "cpu", "--threads", "1", "--cpus-per-worker", "0.5"),
    *("--num-blocks", "600", "--max-num-seqs", "16"),
)
# After the last heartbeat of a process the registry lists it for 3 s; a view is 1 s old.
FORGOTTEN_S = 5.0
POLL_S = 0.25
STATUS_TIMEOUT_S = 3.0
START_S = 600.0
END_S = 90.0


@dataclass(frozen=True)
class ClusterSetup:
    """What is started. `state`: "redis" (of its own), "sqlite" (one ingress), or "none"."""

    model: str = "builtin"
    num_workers: int = 2
    num_ingress: int = 2
    state: str = "redis"
    expert_cache_gb: float | None = None  # for MoE models: experts in the expert store
    flags: tuple[str, ...] = ()  # of `penstock serve`, after and above all others
    key: str | None = None  # for the status, where `flags` name a file of API keys

    @property
    def expected(self) -> dict[str, int]:
        """How many processes of each supervised role there are when nothing is wrong."""
        numbers = dict.fromkeys(("gate", "registry", "controller"), 1)
        if self.expert_cache_gb is not None:
            numbers["expert-store"] = 1
        return {"worker": self.num_workers, "ingress": self.num_ingress, **numbers}

    def command(self, ports: dict[str, int], state_url: str | None) -> list[str]:
        parts = [sys.executable, "-m", "penstock.deployments.cli", "serve", self.model]
        parts += ENGINE_FLAGS
        parts += ["--num-workers", str(self.num_workers), "--num-ingress", str(self.num_ingress)]
        for name, port in ports.items():
            parts += [f"--{name}-port", str(port)]
        if state_url is not None:
            parts += ["--state-url", state_url]
        if self.expert_cache_gb is not None:
            parts += ["--expert-cache-gb", str(self.expert_cache_gb)]
        return [*parts, *self.flags]


@dataclass
class LiveCluster:
    """A running cluster. `pid` is that of `penstock serve`; faults are by pid alone."""

    setup: ClusterSetup
    pid: int
    ports: dict[str, int]  # http, grpc, metrics
    folder: Path  # with serve.log, and Ray's logs below
    state_url: str | None
    redis_pid: int | None
    fault_s: float = 0.0  # time.monotonic() of the last fault
    started_s: float = field(default_factory=time.monotonic)

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.ports['http']}"

    @property
    def grpc_target(self) -> str:
        return f"127.0.0.1:{self.ports['grpc']}"

    @property
    def log(self) -> str:
        """What `penstock serve` has printed."""
        return (self.folder / "serve.log").read_text(errors="replace")

    def warnings(self, most: int = 60) -> list[str]:
        """The last warnings and errors that Serve's controller and the replicas have logged."""
        lines = []
        for path in self.folder.glob("penstock-ray-*/session_2*/logs/serve/*.log"):
            with contextlib.suppress(OSError):
                lines += [
                    (line[line.find("20") :], path.stem)
                    for line in path.read_text(errors="replace").splitlines()
                    if line.startswith(("WARNING", "ERROR"))
                ]
        return [f"{name}: {line}" for line, name in sorted(lines)[-most:]]

    def by_role(self) -> dict[str, list[int]]:
        """The pids of the living processes of each role; "serve" is the driver itself."""
        found: dict[str, list[int]] = {"serve": [self.pid], **{role: [] for role in TITLES}}
        for pid in descendants(self.pid):
            with contextlib.suppress(psutil.Error):
                words = " ".join(psutil.Process(pid).cmdline())
                for role, title in TITLES.items():
                    if title in words and is_running(pid):
                        found[role].append(pid)
        if self.redis_pid is not None:
            found["redis"] = [self.redis_pid]
        return found

    def pids(self, role: str) -> list[int]:
        return self.by_role()[role]

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Send SIGKILL, or SIGSTOP (with a SIGKILL or SIGCONT to follow), or SIGTERM."""
        self.fault_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def status(self) -> dict[str, Any] | None:
        """/v1/penstock/status of an ingress, over a new connection; None: no answer."""
        try:
            answer = httpx.get(
                f"{self.http_url}/v1/penstock/status",
                headers={"authorization": f"Bearer {self.setup.key or 'none'}"},
                timeout=STATUS_TIMEOUT_S,
            )
            return dict(answer.json()) if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None

    def why_not_whole(self) -> str:
        """What is missing; empty if all processes run and each ingress reaches each worker."""
        since_s = time.monotonic() - self.fault_s
        if since_s < FORGOTTEN_S:
            return f"the last fault was {since_s:.1f} s ago"
        roles = self.by_role()
        for role, number in self.setup.expected.items():
            if len(roles[role]) != number:
                return f"{len(roles[role])} of {number} processes of role {role}"
            for pid in roles[role]:
                if is_stopped(pid):
                    return f"process {pid} of role {role} is stopped"
        status = self.status()
        if status is None:
            return "/v1/penstock/status does not answer"
        reach = [each["num_workers"] for each in status["ingresses"]]
        wanted = [self.setup.num_workers] * self.setup.num_ingress
        if len(status["workers"]) != self.setup.num_workers or reach != wanted:
            return f"{len(status['workers'])} workers; ingresses reach {reach}, not {wanted}"
        return ""

    def await_whole(self, within_s: float) -> float:
        """Wait; returns the seconds waited. Raises TimeoutError with what is missing."""
        began_s = time.monotonic()
        while why := self.why_not_whole():
            if time.monotonic() - began_s > within_s:
                raise TimeoutError(f"not whole after {within_s:g} s: {why}\n{self.log[-2000:]}")
            if not is_running(self.pid):
                raise RuntimeError(f"penstock serve has ended:\n{self.log[-2000:]}")
            time.sleep(POLL_S)
        return time.monotonic() - began_s

    def held_blocks(self, within_s: float = 15.0) -> int:
        """KV blocks that requests hold on all workers: the figure after `within_s`, or 0 before."""
        until_s, held = time.monotonic() + within_s, -1
        while held and time.monotonic() < until_s:
            time.sleep(1.0)
            if (status := self.status()) is not None:
                held = sum(each["num_live_blocks"] for each in status["workers"])
        return held


def write_keys(folder: Path, keys: Sequence[str]) -> tuple[str, ...]:
    """A file of API keys in `folder`; the flags of `penstock serve` that name it."""
    path = folder / "keys"
    path.write_text("".join(f"{key}\n" for key in keys))
    path.chmod(0o600)
    return ("--api-keys-file", str(path))


def is_stopped(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


@contextlib.contextmanager
def live_cluster(setup: ClusterSetup) -> Iterator[LiveCluster]:
    """`setup`, started on free ports, until it is whole; ended afterwards, stopped processes too.

    Raises RuntimeError with the log if it does not start.
    """
    ports = {name: free_port() for name in ("http", "grpc", "metrics")}
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="pst-", dir="/tmp", ignore_cleanup_errors=True)
            )
        )
        state_url, redis_pid = None, None
        if setup.state == "redis":
            server = stack.enter_context(redis_server(folder, "everysec"))
            state_url, redis_pid = f"redis://127.0.0.1:{server.port}/0", server.process.pid
        elif setup.state == "sqlite":
            state_url = f"sqlite://{folder}/state"
        process = _start(setup.command(ports, state_url), folder)
        stack.callback(_end, process)
        cluster = LiveCluster(setup, process.pid, ports, folder, state_url, redis_pid)
        _await_start(process, cluster)
        yield cluster


def _start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """With a token for Ray of its own: a killed cluster must not let other processes in.

    A process group of its own, so that Ctrl-C does not end it, but no new session: kernels with
    sched_autogroup_enabled share the cores out by sessions, and let one wait for up to a second.
    """
    environment = {**os.environ, "TMPDIR": str(folder), "RAY_AUTH_MODE": "token"}
    environment["XDG_STATE_HOME"] = str(folder)  # its gate begins with nothing learnt
    environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    with (folder / "serve.log").open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment, process_group=0)


def _await_start(process: subprocess.Popen[bytes], cluster: LiveCluster) -> None:
    until_s = time.monotonic() + START_S
    while "ready after" not in cluster.log:
        if process.poll() is not None or time.monotonic() > until_s:
            raise RuntimeError(f"the cluster did not start:\n{cluster.log}")
        time.sleep(0.1)
    cluster.await_whole(60.0)


def _end(process: subprocess.Popen[bytes]) -> None:
    """As an operator does; then by force what still runs."""
    left = descendants(process.pid)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    for _ in range(2):  # the second one ends the drain
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in left:
        if is_running(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
