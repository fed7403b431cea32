"""Reports of a batch to the server that it uses, for the server's status and console to show it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from penstock.deployments.batch.lease import Owner
from penstock.deployments.batch.runner import Progress
from penstock.deployments.batch.server_target import ServerTarget

log = logging.getLogger("penstock.batch")

REPORT_S = 5.0
LAST_S = 2.0  # longest that the end of a run waits for its last report


@asynccontextmanager
async def reported(
    server: ServerTarget, owner: Owner, name: str, progress: Progress
) -> AsyncIterator[None]:
    """Report the progress until the body ends, and then how it ended.

    A report that fails costs the batch nothing; a server without the route gets no more of them.
    """
    reports = _Reports(server, owner, name, progress)
    task = asyncio.create_task(reports.send_often())
    state = "failed"
    try:
        yield
        state = "finished"
    except asyncio.CancelledError:
        state = "interrupted"
        raise
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                await reports.send(state)


class _Reports:
    def __init__(self, server: ServerTarget, owner: Owner, name: str, progress: Progress):
        self._server, self._progress = server, progress
        self._fixed = {"id": f"{owner.token}-{owner.fence}", "name": name[:200]}
        self._fixed["host"] = owner.host[:200]
        self._number = 0
        self._is_wanted = True

    async def send_often(self) -> None:
        while self._is_wanted:
            await self.send("running")
            await asyncio.sleep(REPORT_S)

    async def send(self, state: str) -> None:
        if not self._is_wanted:
            return
        self._number += 1
        progress = self._progress
        body: dict[str, Any] = {
            **self._fixed,
            "number": self._number,
            "state": state,
            "num_lines": progress.num_lines,
            "num_completed": progress.num_completed,
            "num_failed": progress.num_failed,
            "num_in_flight": progress.num_in_flight if state == "running" else 0,
            "cause": progress.cause[:200] if state == "running" else "",
        }
        if (status := await self._server.report(body)) in (404, 405):
            log.debug("the server takes no reports of batches: %d", status)
            self._is_wanted = False
