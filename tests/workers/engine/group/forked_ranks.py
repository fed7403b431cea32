"""Ranks forked from one process that has imported what they need: each starts at once.

A rank costs two seconds of imports, and the tests that compare ids start more than a hundred. Those
of how a rank starts and ends start it as it is in earnest.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig  # noqa: F401  (with all that it brings: model_config.py waits)

from penstock.workers.engine.group import follower, process

MOST_BYTES = 1 << 20  # of a message: the arguments, the numbers of descriptors, the environment
APART = 1000  # above all numbers that a descriptor has here


@contextlib.contextmanager
def forked_ranks(prepared: str = "") -> Iterator[None]:
    """What this process starts in the meantime as a rank is forked. `prepared`: MODULE:FUNCTION,
    called in the rank before it begins."""
    with pytest.MonkeyPatch.context() as patch:
        instead = SimpleNamespace(
            Popen=functools.partial(ForkedProcess, prepared=prepared), PIPE=subprocess.PIPE
        )
        patch.setattr(process, "subprocess", instead)
        yield


class ForkedProcess:
    """What RankProcess uses of `subprocess.Popen`."""

    def __init__(self, command: list[str], *, pass_fds: tuple[int, ...], stdin: int, prepared: str):
        assert tuple(command[:-2]) == process.FOLLOWER and stdin == subprocess.PIPE
        theirs, mine = os.pipe()
        self.stdin = os.fdopen(mine, "wb")
        self._ended, is_running = os.pipe()  # which the rank alone holds
        message = {"connection": command[-1], "numbers": pass_fds, "environment": dict(os.environ)}
        message["prepared"] = prepared
        server = fork_server()
        socket.send_fds(server, [json.dumps(message).encode()], [theirs, is_running, *pass_fds])
        self._pid = int(server.recv(20))
        os.close(theirs)
        os.close(is_running)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> str:
        select.select([self._ended], [], [])
        os.close(self._ended)
        return "unknown"


@functools.cache
def fork_server() -> socket.socket:
    """Ends with this process."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    subprocess.Popen(
        [sys.executable, "-m", __name__, str(theirs.fileno())],
        cwd=Path(__file__).parents[4], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
    )  # fmt: skip
    theirs.close()
    return mine


def serve(control: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while (found := socket.recv_fds(control, MOST_BYTES, 16))[0]:
        message, received = json.loads(found[0]), found[1]
        pid = os.fork()
        if not pid:
            control.close()
            become_rank(message, received)
        for descriptor in received:
            os.close(descriptor)
        control.send(str(pid).encode())


def become_rank(message: dict[str, Any], received: list[int]) -> None:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(message["environment"])
        stdin, _, *passed = [fcntl.fcntl(each, fcntl.F_DUPFD, APART) for each in received]
        for each in received:
            os.close(each)
        for here, number in zip([stdin, *passed], [0, *message["numbers"]], strict=True):
            os.dup2(here, number)
            os.close(here)
        if message["prepared"]:
            module, function = message["prepared"].split(":")
            getattr(importlib.import_module(module), function)()
        sys.argv = [sys.argv[0], str(os.getppid()), message["connection"]]
        follower.main()
        os._exit(0)
    finally:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
