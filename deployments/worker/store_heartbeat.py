"""The worker's heartbeat to the expert store: it reports cache statistics, and follows the store
when the store restarts.
"""

from __future__ import annotations

import asyncio
import contextlib

from ray.exceptions import RayError

from penstock.deployments.experts.client import MAX_HINTS, ExpertStoreClient, log
from penstock.workers.errors import LoadError
from penstock.workers.stats import ExpertStats
from penstock.workers.worker import Worker


class StoreHeartbeat:
    """Once a second, sends the store this worker's cache statistics, and switches to the store's
    new epoch when there is one. `heartbeat` never raises, whatever happens to the store."""

    def __init__(self, client: ExpertStoreClient, worker: Worker, epoch: int):
        """`epoch`: of the expert file that the worker started with."""
        self._epoch = epoch
        self._client = client
        self._worker = worker
        self._was_there = True
        self._beat: asyncio.Future[None] | None = None  # the last one

    def warm(self) -> None:
        """Load the experts that other workers used most."""
        with contextlib.suppress(RayError, TimeoutError):
            self._worker.warm_experts(self._client.call_now("hints"))

    def beat(self, worker: int, stats: ExpertStats) -> None:
        """Send a heartbeat beside the caller, unless the last one still waits for the store."""
        if self._beat is None or self._beat.done():
            self._beat = asyncio.ensure_future(self.heartbeat(worker, stats))

    async def heartbeat(self, worker: int, stats: ExpertStats) -> None:
        try:
            hot = self._worker.hottest_experts(MAX_HINTS)
            epoch = await self._client.heartbeat(worker, stats, hot)
            if epoch != self._epoch:
                await asyncio.to_thread(self._change_over)
            if not self._was_there:
                log.info("the expert store is back")
            self._was_there = True
        except (RayError, TimeoutError, ValueError, LoadError) as error:
            if self._was_there:
                log.warning(
                    "the expert store does not answer (%s); serving from the mapped file",
                    type(error).__name__,
                )
            self._was_there = False

    def _change_over(self) -> None:
        manifest = self._client.manifest()
        self._worker.use_experts(manifest)
        self._epoch = manifest.epoch
        log.info("experts are now loaded from epoch %d of the store", manifest.epoch)
