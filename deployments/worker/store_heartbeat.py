"""The worker's heartbeat to the expert store: it reports cache statistics, and follows the store
when the store restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from ray.exceptions import RayError

from penstock.deployments.experts.client import MAX_HINTS, ExpertStoreClient, log
from penstock.workers.errors import LoadError
from penstock.workers.stats import ExpertStats
from penstock.workers.worker import Worker


class StoreHeartbeat:
    """Once a second, sends the store this worker's cache statistics, and switches to the store's
    new epoch when there is one. Nothing waits for it, and it never raises, whatever happens to the
    store."""

    def __init__(self, client: ExpertStoreClient, worker: Worker, epoch: int, machine: int = 0):
        """`epoch`: of the expert file that the worker started with. `machine`: of the worker's
        group, on which the store is; 0 is the worker's own, whose statistics it has."""
        self._epoch = epoch
        self._machine = machine
        self._client = client
        self._worker = worker
        self._was_there = True
        self._under_way: asyncio.Task[None] | None = None

    def warm(self) -> None:
        """Load the experts that other workers used most; those of this worker's own machine."""
        if self._machine:
            return
        with contextlib.suppress(RayError, TimeoutError):
            self._worker.warm_experts(self._client.call_now("hints"))

    def begin_heartbeat(self, worker: int, stats: ExpertStats) -> None:
        """Send a heartbeat, unless one is still under way; returns at once. On an event loop."""
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.ensure_future(self._heartbeat(worker, stats))

    async def _heartbeat(self, worker: int, stats: ExpertStats) -> None:
        try:
            hot = [] if self._machine else self._worker.hottest_experts(MAX_HINTS)
            if self._machine:
                stats = replace(stats, num_corrupted=0)
            epoch = await self._client.heartbeat(worker, stats, hot)
            if epoch != self._epoch:
                await asyncio.to_thread(self._change_over)
            if not self._was_there:
                log.info("the expert store is back")
            self._was_there = True
        except (RayError, TimeoutError, ValueError, LoadError) as error:
            if self._was_there:
                log.warning(
                    "the expert store does not answer (%s); serving from what is mapped or cached",
                    type(error).__name__,
                )
            self._was_there = False

    def _change_over(self) -> None:
        manifest = self._client.manifest()
        self._worker.use_experts(manifest, self._machine)
        self._epoch = manifest.epoch
        log.info("experts are now loaded from epoch %d of the store", manifest.epoch)
