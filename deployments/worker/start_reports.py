"""Tells the registry, and the log, how far a worker that starts has got with its model."""

from __future__ import annotations

import contextlib
import logging
import os
import threading

import ray

from penstock.deployments.supervision.registry import RegistryClient
from penstock.deployments.supervision.view import StartingWorker
from penstock.workers.progress import Progress, ProgressLines

log = logging.getLogger("penstock.worker")

SEND_S = 0.5


class StartReports:
    """A `Report` whose newest state a thread sends every `SEND_S`, until `close`.

    What loads never waits for the registry, and one that cannot be reached ends no start.
    """

    def __init__(self, registry: RegistryClient, node: str):
        self._registry, self._node = registry, node
        self._newest: Progress | None = None
        self._log = ProgressLines(log.info)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send_forever, daemon=True)
        self._thread.start()

    def __call__(self, progress: Progress) -> None:
        self._newest = progress
        self._log(progress)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(timeout=SEND_S)
        if (last := self._state()) is not None:
            self._send("worker_start_ended", last)

    def _send_forever(self) -> None:
        while not self._ended.wait(SEND_S):
            if (state := self._state()) is not None:
                self._send("worker_starts", state)

    def _state(self) -> StartingWorker | None:
        newest = self._newest
        return None if newest is None else StartingWorker(self._node, os.getpid(), newest)

    def _send(self, method: str, state: StartingWorker) -> None:
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError, ValueError):
            self._registry.call_now(method, state)
