"""Liveness registry: workers and ingresses send heartbeats every second; every process may read it.

`Registry` is a plain class; `RegistryClient` reaches the one Ray actor of it. It is not on the path
of a request, and nothing in it needs saving: after a crash the heartbeats of the next second
restore it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError

from penstock.deployments.supervision.actors import CALL_TIMEOUT_S, HEAD, named_actor
from penstock.deployments.supervision.view import (
    EXPIRY_S,
    ClusterView,
    IngressInfo,
    NodeInfo,
    ScaleReport,
    StartingWorker,
    short_node,
)
from penstock.workers.stats import AdapterChange, EngineStats, WorkerInfo

START_EXPIRY_S = 10.0  # the same for a worker that starts: loading may hold up its other threads
MAX_FAILURES = 10
MAX_CHANGES = 50
NODES_S = 2.0  # the nodes are listed at most this often
START_TIMEOUT_S = 60.0  # for the registry's process to start, on a busy machine
MAX_LEFT = 1024  # ended epochs, whose late heartbeats are ignored


class Registry:
    """The table itself. `clock` gives monotonic seconds, `nodes` the living nodes."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        nodes: Callable[[], tuple[NodeInfo, ...]] = tuple,
    ):
        self._clock = clock
        self._find_nodes = nodes
        self._nodes: tuple[NodeInfo, ...] = ()
        self._nodes_s = float("-inf")  # when they were listed
        self._workers: dict[int, tuple[float, WorkerInfo, EngineStats]] = {}  # by epoch
        self._left: deque[int] = deque(maxlen=MAX_LEFT)  # epochs
        self._starting: dict[tuple[str, int], tuple[float, StartingWorker]] = {}  # by node and pid
        self._ingresses: dict[str, tuple[float, IngressInfo]] = {}
        self._failures: list[str] = []
        self._num_failures = 0
        self._failures_of: Counter[str] = Counter()  # by deployment
        self._is_draining = False
        self._scaling: dict[str, ScaleReport] = {}  # by deployment
        self._scale_changes: deque[ScaleReport] = deque(maxlen=MAX_CHANGES)
        self._generation, self._digest = 0, ""  # of the newest deployment
        self._adapters: dict[str, dict[str, AdapterChange]] = {}  # by model and name
        self._adapter_number = 0  # of the newest change

    def worker_beat(self, info: WorkerInfo, stats: EngineStats) -> tuple[AdapterChange, ...]:
        """Heartbeat of a worker, also while it drains; late ones of ended epochs are ignored.

        Returns the changes of its adapters that it has not made yet.
        """
        self._starting.pop((info.node, info.pid), None)
        if info.epoch not in self._left:
            self._workers[info.epoch] = (self._clock(), info, stats)
        changes = self._adapters.get(info.model, {}).values()
        return tuple(each for each in changes if each.number > info.adapter_change)

    def change_adapter(self, model: str, name: str, folder: str | None) -> int:
        """Have all workers of `model` load an adapter, or with `folder` None drop it, also those
        that start later. Returns the number of the change."""
        # By the clock of the day, so that they grow on after a restart of this process.
        number = max(self._adapter_number + 1, time.time_ns() // 1_000_000)
        self._adapter_number = number
        changes = self._adapters.setdefault(model, {})
        changes.pop(name, None)
        changes[name] = AdapterChange(number, name, folder)
        return number

    def adapter_changes(self, model: str) -> tuple[AdapterChange, ...]:
        """The newest change of each adapter of `model`, in their order."""
        return tuple(self._adapters.get(model, {}).values())

    def worker_starts(self, worker: StartingWorker) -> None:
        """Heartbeat of a worker that fetches or loads the model."""
        self._starting[worker.node, worker.pid] = self._clock(), worker

    def worker_start_ended(self, worker: StartingWorker) -> None:
        """It has started, or failed to."""
        self._starting.pop((worker.node, worker.pid), None)

    def ingress_beat(self, info: IngressInfo) -> ClusterView:
        """Heartbeat of an ingress; returns the view."""
        if info.generation > self._generation:  # this registry has restarted since
            self._generation, self._digest = info.generation, info.digest
        self._ingresses[info.ingress_id] = (self._clock(), info)
        return self.view()

    def ingress_left(self, ingress_id: str) -> None:
        self._ingresses.pop(ingress_id, None)

    def worker_left(self, epoch: int) -> None:
        """A worker has ended; later heartbeats of its epoch are ignored."""
        self._left.append(epoch)
        self._workers.pop(epoch, None)

    def failed(self, message: str, deployment: str = "") -> None:
        """Record why a replica of `deployment` could not start, for the operator."""
        self._num_failures += 1
        self._failures_of[deployment] += 1
        self._failures = [*self._failures, message][-MAX_FAILURES:]

    def begin(self, digest: str = "") -> int:
        """A new deployment starts: clear the failures of earlier ones. Returns its generation.

        `digest`: of its settings. The settings of the newest deployment keep its generation,
        because Serve may build the same deployment several times; other settings get the next
        generation, also if an earlier deployment had them. The drain of a cluster that stops
        continues.
        """
        self._failures, self._num_failures = [], 0
        self._failures_of.clear()
        if digest and digest != self._digest:
            self._generation, self._digest = self._generation + 1, digest
        return self._generation

    def drain(self) -> None:
        """Have every ingress finish its requests and accept no new ones."""
        self._is_draining = True

    def scaled(self, reports: Sequence[ScaleReport]) -> ClusterView:
        """Record decisions of the autoscaler, for operators; returns the view."""
        for report in reports:
            before = self._scaling.get(report.deployment)
            if before is not None and before.number != report.number:
                self._scale_changes.append(report)
            self._scaling[report.deployment] = report
        return self.view()

    def view(self) -> ClusterView:
        oldest_s = self._clock() - EXPIRY_S
        self._workers = {k: v for k, v in self._workers.items() if v[0] >= oldest_s}
        self._ingresses = {k: v for k, v in self._ingresses.items() if v[0] >= oldest_s}
        start_s = self._clock() - START_EXPIRY_S
        self._starting = {k: v for k, v in self._starting.items() if v[0] >= start_s}
        return ClusterView(
            workers=tuple((info, stats) for _, info, stats in self._workers.values()),
            ingresses=tuple(info for _, info in self._ingresses.values()),
            failures=tuple(self._failures),
            num_failures=self._num_failures,
            failures_of=tuple(self._failures_of.items()),
            is_draining=self._is_draining,
            pid=os.getpid(),
            scaling=tuple(self._scaling.values()),
            scale_changes=tuple(self._scale_changes),
            nodes=self._living_nodes(),
            starting=tuple(worker for _, worker in self._starting.values()),
        )

    def _living_nodes(self) -> tuple[NodeInfo, ...]:
        now = self._clock()
        if now - self._nodes_s >= NODES_S:
            self._nodes, self._nodes_s = self._find_nodes(), now
        return self._nodes


def living_nodes() -> tuple[NodeInfo, ...]:
    """The nodes of the cluster that this process is in, head first."""
    found = [
        NodeInfo(
            short_node(node["NodeID"]),
            node["Resources"].get("CPU", 0),
            node["Resources"].get("GPU", 0),
            is_head=HEAD in node["Resources"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return tuple(sorted(found, key=lambda each: (not each.is_head, each.node)))


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

    async def worker_beat(self, info: WorkerInfo, stats: EngineStats) -> tuple[AdapterChange, ...]:
        changes: tuple[AdapterChange, ...] = await self._call("worker_beat", info, stats)
        return changes

    async def adapter_changes(self, model: str) -> tuple[AdapterChange, ...]:
        changes: tuple[AdapterChange, ...] = await self._call("adapter_changes", model)
        return changes

    async def change_adapter(self, model: str, name: str, folder: str | None) -> int:
        number: int = await self._call("change_adapter", model, name, folder)
        return number

    async def ingress_beat(self, info: IngressInfo) -> ClusterView:
        view: ClusterView = await self._call("ingress_beat", info)
        return view

    async def view(self) -> ClusterView:
        view: ClusterView = await self._call("view")
        return view

    async def ingress_left(self, ingress_id: str) -> None:
        await self._call("ingress_left", ingress_id)

    async def worker_left(self, epoch: int) -> None:
        await self._call("worker_left", epoch)

    def call_now(self, method: str, *args: Any) -> Any:
        """Any method of Registry, for callers without an event loop."""
        return ray.get(getattr(self._actor(), method).remote(*args), timeout=CALL_TIMEOUT_S)

    def call_when_up(self, method: str, *args: Any) -> Any:
        """The same, for a caller that may have to wait for the start of the registry's process."""
        return ray.get(getattr(self._actor(), method).remote(*args), timeout=START_TIMEOUT_S)

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
            self._handle = named_actor(
                Registry, self._name, time.monotonic, living_nodes, is_on_head=True
            )
        return self._handle
