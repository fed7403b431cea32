"""Makes the worker processes of a server's own Ray by fork, from one that has imported everything.

Ray starts a Python program for each actor. A server has five, and their imports (Ray, Serve) are
most of the CPU time of a start. Here one process imports it all, once, and forks: the raylet runs
fork_launcher.py in place of Ray's command, which sends over a socket what the new process is to be
(arguments, environment, standard streams), and ends. Ray recognises a worker process by the
identifier among its arguments, whatever its parent. fork_requests.py answers the launchers.

torch is not among the imports: its libraries read variables that only workers have. So a second
process, forked from the first, sets the workers' variables, imports what a worker computes with,
and forks the workers alone, each of which would else import it for itself.

A fork has one thread alone, so these processes may have no other: each ends if an import has
started one, and Ray then starts programs as usual. They also end with the process that started
them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from penstock.deployments.supervision import fork_launcher
from penstock.deployments.supervision.fork_requests import JOB, become, serve
from penstock.deployments.supervision.processes import end_with
from penstock.deployments.supervision.ray_workarounds import one_event_loop

# What the processes of actors import, but for torch. First what needs no raylet: it is imported
# while that starts.
BEFORE_THE_RAYLET = (
    "penstock.deployments.supervision.preloaded",
    "fastapi",
    "jsonschema",
    "requests",
    "opentelemetry.sdk.trace",
    "opentelemetry.sdk.metrics",
    "penstock.deployments.gate.service",
    "aiohttp",
)
# What Serve's controller and the workers need.
AFTER_THE_RAYLET = (
    "ray",
    "ray.serve._private.controller",
    "penstock.deployments.app",
    "penstock.deployments.supervision.registry",
)
# The ingress and the gate need this, too. A start waits for the controller, so that is forked
# before, and what else is asked for meanwhile between two of these, which take some 0.2 s each.
AFTER_THE_FIRST = (
    "penstock.deployments.ingress.core.service",
    "penstock.deployments.ingress.http.openai.routes",
    "penstock.deployments.ingress.http.app",
    "penstock.deployments.ingress.listeners",
    "penstock.deployments.gate.server",
)
OF_WORKERS = ("penstock.workers.adapters.changes", "penstock.workers.engine.load")
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # numpy's library starts threads when it is loaded
# Ray's library reads variables when it is loaded, so those of a new process must be as here.
RAYLET_PID = "RAY_RAYLET_PID"
OF_A_RAYLET = {JOB: "ffffffff", "RAY_LD_PRELOAD_ON_WORKERS": "0"}
WAIT_S = 30.0  # of a launcher for an answer; Ray waits 60 s for a process
NUM_WAITING = 64


class ForkServer:
    """The fork server as the driver sees it: a process of its own."""

    def __init__(self) -> None:
        """Start the process. Raises OSError."""
        self.of_workers: Mapping[str, str] = {}  # variables of the workers that it can make
        self._addresses = [f"penstock-{secrets.token_hex(16)}" for _ in range(2)]
        with contextlib.ExitStack() as opened:
            files = []
            for address in self._addresses:
                listener = opened.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind("\0" + address)
                listener.listen(NUM_WAITING)
                files.append(listener.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, *map(str, files)],
                env={**os.environ, **ONE_THREAD, **OF_A_RAYLET, **one_event_loop()},
                pass_fds=files,
                stdin=subprocess.PIPE,  # its end is that of this process
                stderr=subprocess.DEVNULL,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def command(self, of_ray: list[str]) -> list[str]:
        """In place of Ray's command for a worker process: Python, SETUP_WORKER, WORKER, ..."""
        python, *rest = of_ray
        asked = ",".join(self._addresses)
        return [python, "-I", "-S", fork_launcher.__file__, asked, f"{WAIT_S:g}", *rest]

    def keep_to(self, cores: Collection[int]) -> None:
        """Have it run on these cores only. What it makes has those of its launcher."""
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(self.pid, cores)

    def serve(self, raylet: int, of_workers: Mapping[str, str]) -> None:
        """Have it make the processes of the raylet with that number.

        `of_workers`: variables of the workers, for which a second process imports torch; {}: there
        is no such process, and they import it themselves.
        """
        self.of_workers = of_workers
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self._process.stdin.write(json.dumps([raylet, dict(of_workers)]).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End it. What it has made goes on."""
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # a terminal sends it to all
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what is forked
    gc.disable()
    file, of_second = map(int, sys.argv[1:])
    _import(BEFORE_THE_RAYLET)
    told = sys.stdin.readline()
    if not told:
        return
    raylet, variables = json.loads(told)
    os.environ[RAYLET_PID] = str(raylet)
    _import_shared(AFTER_THE_RAYLET)
    first = os.getpid()
    if variables and not os.fork():
        end_with(first)
        file, of_second = of_second, file
        os.environ.update(variables)
        _import_shared(OF_WORKERS)
        of_others = {}
    else:
        variables, of_others = {}, variables
    os.close(of_second)
    rest = () if variables else AFTER_THE_FIRST
    with socket.socket(fileno=file) as listener:
        request = serve(listener, variables, of_others, _import_in_steps(rest))
    if request is not None:
        become(request)


def _import_in_steps(modules: Iterable[str]) -> Iterator[None]:
    """Import one module for each value that is asked for."""
    for name in modules:
        _import_shared([name])
        yield


def _import_shared(modules: Iterable[str]) -> None:
    """Import what forks will share; end this process if forks of it would differ from programs."""
    with seeded_in_forks():
        _import(modules)
    check_forks()
    # A collection writes to each object that it looks at: the pages would not stay shared.
    gc.freeze()


def check_forks() -> None:
    """End this process if forks of it would differ from programs."""
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("an import has started a thread")
    if random_id() == random_id():
        sys.exit("an import has seeded Ray's generator of identifiers, which forks would share")


@contextlib.contextmanager
def seeded_in_forks() -> Iterator[None]:
    """Meanwhile `@ray.remote` leaves Ray's generator of identifiers alone.

    The generator is seeded when it is first used: processes forked after that would all draw the
    same ones, of objects and tasks. The decorator draws one for each class.
    """
    from ray import actor

    ids = actor.ActorClassID
    actor.ActorClassID = _ClassIds
    try:
        yield
    finally:
        actor.ActorClassID = ids


class _ClassIds:
    """In place of Ray's ActorClassID."""

    @staticmethod
    def from_random() -> Any:
        from ray import ActorClassID

        return ActorClassID(os.urandom(ActorClassID.size()))


def random_id() -> bytes:
    """An identifier that Ray draws in a fork of this process."""
    from ray import UniqueID

    receiver, sender = os.pipe()
    if not os.fork():
        os.write(sender, UniqueID.from_random().binary())
        os._exit(0)
    os.close(sender)
    with open(receiver, "rb") as file:
        return file.read()


def _import(modules: Iterable[str]) -> None:
    for name in modules:
        importlib.import_module(name)


if __name__ == "__main__":
    main()
