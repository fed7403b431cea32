"""Makes the worker processes of a server's own Ray by fork, from one that has imported everything.

Ray starts a Python program for each actor. A server has five, and their imports (Ray, Serve) are
most of the CPU time of a start. Here one process imports it all, once, and forks: the raylet runs
fork_launcher.py in place of Ray's command, which sends over a socket what the new process is to be
(arguments, environment, standard streams), and ends. Ray recognises a worker process by the
identifier among its arguments, whatever its parent.

A fork has one thread alone, so this process may have no other: it ends if an import has started
one, and Ray then starts programs as usual. It also ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import secrets
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.deployments.supervision import fork_launcher
from penstock.deployments.supervision.ray_workarounds import one_event_loop

# What the processes of actors import, without torch, whose libraries read variables that a worker
# sets before. First what needs no raylet: it is imported while that starts.
BEFORE_THE_RAYLET = (
    "penstock.deployments.supervision.preloaded",
    "fastapi",
    "penstock.deployments.ingress.http.app",
    "penstock.deployments.ingress.grpc.server",
    "penstock.deployments.ingress.models",
    "penstock.deployments.gate.service",
    "jsonschema",
    "requests",
    "opentelemetry.sdk.trace",
    "opentelemetry.sdk.metrics",
)
AFTER_THE_RAYLET = (
    "ray",
    "penstock.deployments.app",
    "ray.serve._private.controller",
    "penstock.deployments.ingress.listeners",
    "penstock.deployments.gate.server",
    "penstock.deployments.supervision.registry",
)
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # numpy's library starts threads when it is loaded
# Ray's library reads variables when it is loaded, so those of a new process must be as here, but
# for the job: a process without one serves any.
RAYLET_PID = "RAY_RAYLET_PID"
JOB = "RAY_JOB_ID"
OF_A_RAYLET = {JOB: "ffffffff", "RAY_LD_PRELOAD_ON_WORKERS": "0"}
# Variables that glibc reads when a program starts, and what `mallopt` calls them (malloc.h).
MALLOPT = {"MALLOC_ARENA_MAX": -8, "MALLOC_TOP_PAD_": -2, "MALLOC_TRIM_THRESHOLD_": -1}
WAIT_S = 30.0  # of a launcher for an answer; Ray waits 60 s for a process
REQUEST_S = 5.0  # for a request to arrive
NUM_WAITING = 64
NO_REQUEST = (OSError, ValueError, TypeError, LookupError)
CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
DONE = b"1"


class ForkServer:
    """The fork server as the driver sees it: a process of its own."""

    def __init__(self) -> None:
        """Start the process. Raises OSError."""
        self._address = f"penstock-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0" + self._address)
            listener.listen(NUM_WAITING)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(listener.fileno())],
                env={**os.environ, **ONE_THREAD, **OF_A_RAYLET, **one_event_loop()},
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,  # its end is that of this process
                stderr=subprocess.DEVNULL,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def command(self, of_ray: list[str]) -> list[str]:
        """In place of Ray's command for a worker process: Python, SETUP_WORKER, WORKER, ..."""
        python, *rest = of_ray
        return [python, "-I", "-S", fork_launcher.__file__, self._address, f"{WAIT_S:g}", *rest]

    def keep_to(self, cores: Collection[int]) -> None:
        """Have it run on these cores only. What it makes has those of its launcher."""
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(self.pid, cores)

    def serve(self, raylet: int) -> None:
        """Have it make the processes of the raylet with that number."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self._process.stdin.write(b"%d\n" % raylet)
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
    _import(BEFORE_THE_RAYLET)
    raylet = sys.stdin.readline().strip()
    if not raylet:
        return
    os.environ[RAYLET_PID] = raylet
    with seeded_in_forks():
        _import(AFTER_THE_RAYLET)
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("an import has started a thread")
    if random_id() == random_id():
        sys.exit("an import has seeded Ray's generator of identifiers, which forks would share")
    # A collection writes to each object that it looks at: the pages would not stay shared.
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        request = serve(listener)
    if request is not None:
        become(request)


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


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Answer requests until standard input ends: None. In a new process: the request for it."""
    with selectors.DefaultSelector() as events:
        events.register(listener, selectors.EVENT_READ)
        events.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.fileobj is sys.stdin:
                    return None
                connection, _ = listener.accept()
                with connection, contextlib.suppress(*NO_REQUEST):
                    if (request := answer(connection)) is not None:
                        return request


def answer(connection: socket.socket) -> dict[str, Any] | None:
    """Make the process that is asked for: None. In that process: the request.

    Without an answer the launcher runs Ray's command. Raises one of NO_REQUEST for what is not a
    whole request, and OSError if no process can be made.
    """
    connection.settimeout(REQUEST_S)
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    if CREDENTIALS.unpack(peer)[1] != os.getuid():
        return None
    data, streams, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    try:
        while part := connection.recv(1 << 16):
            data += part
        request: dict[str, Any] = json.loads(data)
        if not is_forkable(request["env"], request["variables"]) or has_left(connection):
            return None
        if os.fork():
            connection.send(DONE)
            return None
        try:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
        except OSError:
            os._exit(1)
        return request
    finally:
        for stream in streams:
            os.close(stream)


def has_left(connection: socket.socket) -> bool:
    """Whether the launcher has closed its end: it runs Ray's command by now."""
    events = select.poll()
    events.register(connection, 0)
    return any(happened & select.POLLHUP for _, happened in events.poll(0))


def is_forkable(environment: Mapping[str, str], variables: Collection[str]) -> bool:
    """Whether a fork can have this environment. `variables`: those that Ray was asked to set.

    Not if Ray has read others, or any library may have that is loaded here.
    """
    loop = one_event_loop()
    own = {name: value for name, value in os.environ.items() if name not in loop}
    fixed = {name for name in {*own, *environment} if name.startswith("RAY_")}
    fixed |= set(variables)
    same = own | {name: value for name, value in loop.items() if name in environment}
    return all(same.get(name) == environment.get(name) for name in fixed - {JOB} - MALLOPT.keys())


def become(request: Mapping[str, Any]) -> None:
    """Be the process that was asked for, to its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked_signals"])
    if request["leads_group"]:
        os.setpgid(0, 0)
    # Only what differs, which is little: some sandboxes refuse these calls.
    if os.sched_getaffinity(0) != set(request["cores"]):
        os.sched_setaffinity(0, request["cores"])
    if list(resource.getrlimit(resource.RLIMIT_NOFILE)) != request["open_files"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, tuple(request["open_files"]))
    if os.getpriority(os.PRIO_PROCESS, 0) != request["nice"]:
        os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(request["oom_score"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    _set_allocator(request["env"])
    gc.enable()
    sys.argv = request["argv"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


def _set_allocator(environment: Mapping[str, str]) -> None:
    """What glibc would have done at the start of a program. Other C libraries have no such call."""
    with contextlib.suppress(AttributeError, ValueError):
        mallopt = ctypes.CDLL(None).mallopt
        for name, option in MALLOPT.items():
            if name in environment:
                mallopt(option, int(environment[name]))


if __name__ == "__main__":
    main()
