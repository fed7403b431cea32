"""A process forked from one that has loaded the model: started within a second, asked, and killed.

What runs in it is a function of a pipe. It sends one object when it serves, and then answers each
callable that it receives with what that returns, given the parts that live there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, Generic, TypeVar

Parts = TypeVar("Parts")
# The last one for random_kills, whose main module each process imports once more.
PRELOADED = [
    "benchmarks.faults.worker_process",
    "benchmarks.faults.front_processes",
    "benchmarks.faults.cluster_kills",
]


class Child(Generic[Parts]):
    """One process. `greeting`: what it sent once it served. Raises EOFError if it ends first."""

    def __init__(self, serve: Callable[..., None], *arguments: Any):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._pipe, theirs = context.Pipe()
        self._process: ForkServerProcess = context.Process(
            target=serve, args=(theirs, *arguments), daemon=True
        )
        self._process.start()
        theirs.close()
        self._lock = threading.Lock()
        self.greeting: Any = self._pipe.recv()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def ask(self, question: Callable[[Parts], Any]) -> Any:
        """What `question`, a function of a module, returns in the process. Raises EOFError."""
        with self._lock:
            self._pipe.send(question)
            return self._pipe.recv()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def join(self, within_s: float) -> bool:
        """Wait for its end; whether it came."""
        self._process.join(within_s)
        return not self._process.is_alive()

    def kill(self) -> None:
        """SIGKILL, and wait for the end. May be called again."""
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        self._process.join()
        self._pipe.close()


def answer(pipe: Connection, parts: Any) -> None:
    """Answer what comes on the pipe until its other end is gone; then end this process."""
    try:
        while True:
            pipe.send(pipe.recv()(parts))
    except (EOFError, OSError):
        os._exit(0)
