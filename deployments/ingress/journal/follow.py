"""`FollowedCall`: the tokens of a call that another ingress generates, as its journal grows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.core.backend import TokenBackend
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.journal.call_journal import by_token
from penstock.deployments.ingress.journal.records import Kept, kept_from
from penstock.deployments.state.store import StateDown, StateError, Store
from penstock.workers.request import Delta, FinishReason

WAIT_S = 1.0  # for records, before the outcome is looked up
BUDGET_S = 2.0
MAX_DOWN = 30  # tries in a row that a store which does not answer gets
RETRY_S = 1.0


class FollowedCall:
    """A Recorder of the request core that makes no token itself."""

    generates = False

    def __init__(self, store: Store, stream: str, outcome: Callable[[], Awaitable[str | None]]):
        """`stream`: its name in the store.

        `outcome`: how the call ended, "cancelled" or another word; None: it has not. It raises
        ServiceError.
        """
        self._store, self._stream, self._outcome = store, stream, outcome
        self._ended_s: int | None = None

    def end_s(self) -> int:
        """When the answer ended, in seconds of Unix time, as far as the journal says."""
        return int(time.time()) if self._ended_s is None else self._ended_s

    async def generate(
        self, admission: AdmissionRequest, backend: TokenBackend
    ) -> AsyncGenerator[Delta, None]:
        """One delta for each token. Raises ServiceError worker_lost if the call has ended and its
        journal has not, and state_unavailable."""
        name, next_index = admission.request_id, 1
        while True:
            outcome = None
            records = await self._read(next_index)
            if not records and (outcome := await self._outcome()) is not None:
                records = await self._read(next_index)  # what came in between
            next_index += len(records)
            kept = kept_from(records).get(name, Kept())
            self._ended_s = kept.ended_s or self._ended_s
            for delta in kept.deltas:
                delta.is_replayed = True
                for part in by_token(delta):
                    yield part
                if delta.finish_reason is not None:
                    return
            if outcome is not None and not records:
                if outcome != "cancelled":
                    raise ServiceError("worker_lost")
                yield Delta(name, [], FinishReason.ABORT)
                return

    async def _read(self, start: int) -> tuple[bytes, ...]:
        num_down = 0
        while True:
            try:
                found = await self._store.read(
                    self._stream, start, wait_s=WAIT_S, budget_s=BUDGET_S
                )
                return found.records
            except StateDown:
                num_down += 1
                if num_down > MAX_DOWN:
                    raise ServiceError("state_unavailable", retry_after_s=2.0) from None
                await asyncio.sleep(RETRY_S)
            except StateError:
                raise ServiceError("state_unavailable", retry_after_s=2.0) from None
