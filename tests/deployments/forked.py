"""Processes of a test, forked from one that has loaded the model: each starts within half a second.

A server as a process of its own costs six seconds of imports at each start, and tests that kill
servers start them again and again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

PRELOADED = [
    "tests.deployments.batch.processes.engine_server",
    "tests.deployments.ingress.journal.server",
    "tests.deployments.loaded_model",
]


class Forked:
    """`target(*arguments)` in a process of its own. `target` is a function of a module."""

    def __init__(self, target: Callable[..., None], *arguments: Any):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._process: ForkServerProcess = context.Process(
            target=target, args=arguments, daemon=True
        )
        self._process.start()

    @property
    def has_ended(self) -> bool:
        return not self._process.is_alive()

    def send(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end. May be called again."""
        self._process.kill()
        self._process.join()
