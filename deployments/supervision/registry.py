"""Liveness registry: workers and ingresses send heartbeats every second; anyone may read the view.

`Registry` is a plain class; `RegistryClient` reaches the one Ray actor of it. It is not on the path
of a request, and nothing in it needs saving: after a crash the heartbeats of the next second
restore it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError

from penstock.deployments.supervision.actors import CALL_TIMEOUT_S, named_actor
from penstock.workers.stats import EngineStats, WorkerInfo

EXPIRY_S = 3.0  # without a heartbeat: gone
MAX_FAILURES = 10


@dataclass(frozen=True, slots=True)
class IngressInfo:
    """Where one ingress replica listens, and how many workers it is connected with."""

    ingress_id: str
    pid: int
    http_address: str
    grpc_address: str
    num_workers: int
    metrics_address: str = ""  # none if metrics are off


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All live processes, by their last heartbeats."""

    workers: tuple[tuple[WorkerInfo, EngineStats], ...] = ()
    ingresses: tuple[IngressInfo, ...] = ()
    failures: tuple[str, ...] = ()  # messages of the last replicas that could not start
    num_failures: int = 0  # all of them
    is_draining: bool = False  # the cluster is about to stop: take no new requests
    pid: int = 0  # of the registry itself


class Registry:
    """The table itself. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._workers: dict[int, tuple[float, WorkerInfo, EngineStats]] = {}  # by epoch
        self._ingresses: dict[str, tuple[float, IngressInfo]] = {}
        self._failures: list[str] = []
        self._num_failures = 0
        self._is_draining = False

    def worker_beat(self, info: WorkerInfo, stats: EngineStats) -> None:
        self._workers[info.epoch] = (self._clock(), info, stats)

    def ingress_beat(self, info: IngressInfo) -> ClusterView:
        """Heartbeat of an ingress; returns the view."""
        self._ingresses[info.ingress_id] = (self._clock(), info)
        return self.view()

    def ingress_left(self, ingress_id: str) -> None:
        self._ingresses.pop(ingress_id, None)

    def worker_left(self, epoch: int) -> None:
        self._workers.pop(epoch, None)

    def failed(self, message: str) -> None:
        """Record why a replica could not start, for the operator."""
        self._num_failures += 1
        self._failures = [*self._failures, message][-MAX_FAILURES:]

    def begin(self) -> None:
        """A new deployment starts: forget the failures of earlier ones."""
        self._failures, self._num_failures = [], 0
        self._is_draining = False

    def drain(self) -> None:
        """Have every ingress finish what it has and take nothing new."""
        self._is_draining = True

    def view(self) -> ClusterView:
        oldest_s = self._clock() - EXPIRY_S
        self._workers = {k: v for k, v in self._workers.items() if v[0] >= oldest_s}
        self._ingresses = {k: v for k, v in self._ingresses.items() if v[0] >= oldest_s}
        return ClusterView(
            workers=tuple((info, stats) for _, info, stats in self._workers.values()),
            ingresses=tuple(info for _, info in self._ingresses.values()),
            failures=tuple(self._failures),
            num_failures=self._num_failures,
            is_draining=self._is_draining,
            pid=os.getpid(),
        )


class RegistryClient:
    """One cluster's registry, from any process of it.

    A named, detached actor (actors.py): worker, ingress and command line all need it, and none of
    them is certain to outlive the others. (Serve's own deployment actors are visible to the
    replicas of one deployment only.) Calls raise Ray's errors or TimeoutError while it is
    unavailable; callers continue with the last view.
    """

    def __init__(self, app_name: str):
        self._name = f"{app_name}-registry"
        self._handle: Any = None

    async def worker_beat(self, info: WorkerInfo, stats: EngineStats) -> None:
        await self._call("worker_beat", info, stats)

    async def ingress_beat(self, info: IngressInfo) -> ClusterView:
        view: ClusterView = await self._call("ingress_beat", info)
        return view

    async def ingress_left(self, ingress_id: str) -> None:
        await self._call("ingress_left", ingress_id)

    def call_now(self, method: str, *args: Any) -> Any:
        """Any method of Registry, for callers without an event loop."""
        return ray.get(getattr(self._actor(), method).remote(*args), timeout=CALL_TIMEOUT_S)

    async def _call(self, method: str, *args: Any) -> Any:
        # Looking up a name waits for Ray's control plane, which may be away: never on the loop.
        actor = self._handle or await asyncio.to_thread(self._actor)
        try:
            return await asyncio.wait_for(getattr(actor, method).remote(*args), CALL_TIMEOUT_S)
        except ActorDiedError:
            self._handle = None
            raise

    def _actor(self) -> Any:
        if self._handle is None:
            self._handle = named_actor(Registry, self._name)
        return self._handle
