"""What the fork server does with a request for a process: it forks, or leaves it to Ray's command.

A fork is as the program would be that Ray's command starts, or it is not made: variables that are
read once, when a library is loaded, must be the same here. What the new process is to be comes over
a socket from fork_launcher.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import runpy
import select
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.deployments.supervision.ray_workarounds import one_event_loop

JOB = "RAY_JOB_ID"  # a process without a job serves any
# Variables that glibc reads when a program starts, and what `mallopt` calls them (malloc.h).
MALLOPT = {"MALLOC_ARENA_MAX": -8, "MALLOC_TOP_PAD_": -2, "MALLOC_TRIM_THRESHOLD_": -1}
REQUEST_S = 5.0  # for a request to arrive
NO_REQUEST = (OSError, ValueError, TypeError, LookupError)
CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
DONE = b"1"
_OVER = object()


def serve(
    listener: socket.socket,
    own: Collection[str] = (),
    not_for: Collection[str] = (),
    meanwhile: Iterable[None] = (),
) -> dict[str, Any] | None:
    """Answer requests until standard input ends: None. In a new process: the request for it.

    `own`: variables that this process has set; it forks for those alone that ask for them.
    `not_for`: variables of the requests that it leaves to another process. `meanwhile`: work to be
    done once there was a request, in steps: between them it answers.
    """
    steps = iter(meanwhile)
    patience_s: float | None = None  # for a request; None: until one comes
    with selectors.DefaultSelector() as events:
        events.register(listener, selectors.EVENT_READ)
        events.register(sys.stdin, selectors.EVENT_READ)
        while True:
            ready = events.select(patience_s)
            if not ready and next(steps, _OVER) is _OVER:
                patience_s = None
            for key, _ in ready:
                if key.fileobj is sys.stdin:
                    return None
                connection, _ = listener.accept()
                with connection, contextlib.suppress(*NO_REQUEST):
                    if (request := answer(connection, own, not_for)) is not None:
                        return request
                patience_s = 0.0


def answer(
    connection: socket.socket, own: Collection[str], not_for: Collection[str]
) -> dict[str, Any] | None:
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
        variables = set(request["variables"])
        is_for_this = is_forkable(request["env"], variables.union(own))
        is_for_this &= not variables or variables != set(not_for)
        if not is_for_this or has_left(connection):
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
