"""The journals of one ingress: begin one, continue one, and write them in the background.

A journal may lag behind the client: what it lacks is generated again, with the same ids, because
the head has the seed (the ids of an answer are a function of prompt, parameters and seed). So no
token waits for the store; only the head is written before the first token leaves.

Who continues a call takes it over: the ingress that ran it finds at its next append that a newer
one has it, and ends its own part.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock.deployments.ingress.core.call import CallContext
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.journal.background import BackgroundCalls
from penstock.deployments.ingress.journal.batches import SharedBatches
from penstock.deployments.ingress.journal.call_journal import CallJournal
from penstock.deployments.ingress.journal.follow import FollowedCall
from penstock.deployments.ingress.journal.idempotency import TTL_S as KEY_TTL_S
from penstock.deployments.ingress.journal.idempotency import IdempotencyKeys
from penstock.deployments.ingress.journal.received import Received
from penstock.deployments.ingress.journal.records import (
    Head,
    UnreadableError,
    head_bytes,
    head_from,
    kept_from,
    record_bytes,
)
from penstock.deployments.ingress.journal.values import ResponseValues
from penstock.deployments.state.store import (
    Conflict,
    Fenced,
    StateDown,
    StateError,
    StateFull,
    Store,
)
from penstock.workers.request import Delta, RequestError

log = logging.getLogger("penstock.journal")

FLUSH_S = 0.25
TTL_S = 600.0  # after the last record
BEGIN_BUDGET_S = 1.0  # longest that the first token waits for the store
DOWN_BUDGET_S = 0.25  # the same, while the store takes nothing
RESUME_BUDGET_S = 2.0
FLUSH_BUDGET_S = 1.0
MAX_UNSENT_BYTES = 8 << 20  # of all journals; while the store is down, journals above it end
MAX_IN_FLIGHT = 64  # appends at a time
_CALL_ID = re.compile(r"[0-9a-f]{1,64}")


@dataclass(slots=True)
class JournalCounts:
    """For metrics. `incomplete`: journals that the store could not take whole."""

    begun: int = 0
    resumed: int = 0
    incomplete: int = 0


class Journals:
    """Made on the event loop, on which it writes; `close` writes the rest, and closes the store."""

    def __init__(
        self,
        store: Store,
        owner: str,
        *,
        flush_s: float = FLUSH_S,
        ttl_s: float = TTL_S,
    ):
        """`owner`: names this ingress. `ttl_s`: from a call's last token to its journal's end."""
        self.counts = JournalCounts()
        self.keys = IdempotencyKeys(store)
        self.store = self._store = store
        self.responses = ResponseValues(store)
        self.background = BackgroundCalls(store)
        self.batches = SharedBatches(store, owner)
        self._owner = owner
        self._flush_s = flush_s
        self._ttl_s = ttl_s
        self._seeds = random.SystemRandom()
        self._changed: set[CallJournal] = set()
        self._written: list[CallJournal] = []  # by the flush that runs
        self._flushing = asyncio.Lock()  # two appends of one journal would count twice
        self._num_unsent_bytes = 0
        self._is_complaining = False
        self._writing = asyncio.ensure_future(self._write())

    def journal_for(
        self, context: CallContext, route: str, body: bytes, *, has_key: bool = False
    ) -> CallJournal:
        """The journal of a new call, with its seed; see `begin`. `has_key`: of idempotency."""
        deadline_s = context.deadline_s
        if deadline_s is not None:  # of this process's clock: another ingress has its own
            deadline_s += time.time() - time.monotonic()
        head = Head(
            route,
            body,
            self._seeds.getrandbits(63),
            int(time.time()),
            KEY_TTL_S if has_key else self._ttl_s,
            context.principal,
            context.client_id,
            context.wants_timings,
            key_id=context.key_id,
            deadline_s=deadline_s,
        )
        return CallJournal(context.request_id, head, self._record)

    async def begin(self, journal: CallJournal) -> None:
        """Write its head. If the store cannot take it, `is_kept` stays False."""
        try:
            journal.next_index = await self._store.append(
                stream_name(journal.call_id),
                0,
                [head_bytes(journal.head)],
                ttl_s=journal.head.ttl_s,
                budget_s=DOWN_BUDGET_S if self._is_complaining else BEGIN_BUDGET_S,
            )
        except (StateError, ValueError) as error:  # ValueError: the body is too large for it
            self._complain(error)
        else:
            self._is_complaining = False
            journal.is_kept = True
            self.counts.begun += 1

    async def head(self, call_id: str, principal: str | None) -> Head:
        """Of a call of this principal; None: of anyone. Raises RequestError not_found, or
        ServiceError state_unavailable or resume_mismatch."""
        if not _CALL_ID.fullmatch(call_id):
            raise _not_found(call_id)
        try:
            found = await self._store.read(stream_name(call_id), limit=1, budget_s=RESUME_BUDGET_S)
            head = head_from(found.records[0]) if found.records else None
        except (StateDown, StateFull) as error:
            raise self._unavailable(error) from None
        except UnreadableError as error:
            raise _unreadable(error) from None
        if head is None or principal not in (None, head.principal):
            raise _not_found(call_id)
        return head

    async def resume(
        self, call_id: str, head: Head, received: tuple[Received, ...] = (), after: int = -1
    ) -> CallJournal:
        """Take a call over. Raises ServiceError."""
        await self._write_own(call_id)
        try:
            fence = await self._store.put(
                f"owner/{call_id}",
                self._owner.encode(),
                ttl_s=head.ttl_s,
                budget_s=RESUME_BUDGET_S,
            )
            await self._store.append(
                stream_name(call_id), 0, (), fence=fence, ttl_s=head.ttl_s, budget_s=RESUME_BUDGET_S
            )
            records = await self._read(call_id)  # no earlier owner can append any more
            kept = await asyncio.to_thread(kept_from, records[1:])
        except (StateDown, StateFull) as error:
            raise self._unavailable(error) from None
        except Fenced:
            raise ServiceError("resumed_elsewhere") from None
        except UnreadableError as error:
            raise _unreadable(error) from None
        journal = CallJournal(
            call_id,
            head,
            self._record,
            kept=kept,
            next_index=len(records),
            fence=fence,
            received=received,
            after=after,
        )
        journal.is_kept = True
        self.counts.resumed += 1
        return journal

    def followed(self, call_id: str, outcome: Callable[[], Awaitable[str | None]]) -> FollowedCall:
        """The tokens of a call that another ingress generates; see FollowedCall."""
        return FollowedCall(self._store, stream_name(call_id), outcome)

    async def forget(self, call_id: str) -> None:
        """Remove a journal. Never fails: it expires, too."""
        for name in (stream_name(call_id), f"owner/{call_id}"):
            with contextlib.suppress(StateError):
                await self._store.delete(name, budget_s=RESUME_BUDGET_S)

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(self._flush_s)
            await self.flush()

    async def flush(self) -> None:
        """Write what was recorded so far."""
        async with self._flushing:
            self._written, self._changed = list(self._changed), set()
            for begin in range(0, len(self._written), MAX_IN_FLIGHT):
                some = self._written[begin : begin + MAX_IN_FLIGHT]
                failures = await asyncio.gather(*map(self._append, some), return_exceptions=True)
                for journal, failure in zip(some, failures):
                    if isinstance(failure, Exception):  # a fault of ours ends no other journals
                        log.error("the journal of %s failed", journal.call_id, exc_info=failure)
                        self._drop(journal)
            self._written = []

    async def _write_own(self, call_id: str) -> None:
        """Write what this ingress has recorded of a call and the store has not taken yet.

        Else it would be generated a second time: the same tokens, but with another time of the end
        and other counts of cached tokens. Raises ServiceError state_unavailable.
        """
        own = [each for each in {*self._changed, *self._written} if each.call_id == call_id]
        until_s = time.monotonic() + RESUME_BUDGET_S
        while own:
            await self.flush()
            own = [each for each in own if each.unsent]  # the others were written, or ended
            if own and time.monotonic() >= until_s:
                raise ServiceError("state_unavailable", retry_after_s=2.0)
            if own:
                await asyncio.sleep(self._flush_s)

    async def close(self) -> None:
        await self.background.hand_over()
        await self.background.close()
        await self.batches.close()
        self._writing.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)
        await self.flush()
        await self._store.close()

    async def _read(self, call_id: str) -> list[bytes]:
        records: list[bytes] = []
        while True:
            found = await self._store.read(
                stream_name(call_id), len(records), budget_s=RESUME_BUDGET_S
            )
            if not found.records:
                return records
            records += found.records

    def _record(self, journal: CallJournal, delta: Delta) -> None:
        if journal.is_kept:
            journal.pending.append(delta)
            self._changed.add(journal)

    async def _append(self, journal: CallJournal) -> None:
        if journal.pending:
            record = record_bytes(journal.pending, journal.ended_s)
            journal.pending.clear()
            journal.unsent.append(record)
            self._num_unsent_bytes += len(record)
        num = len(journal.unsent)
        try:
            await self._store.append(
                stream_name(journal.call_id),
                journal.next_index,
                journal.unsent[:num],
                fence=journal.fence,
                ttl_s=journal.head.ttl_s,
                budget_s=FLUSH_BUDGET_S,
            )
        except Fenced:
            self._drop(journal)
            journal.end("resumed_elsewhere")
        except (Conflict, StateFull, ValueError) as error:  # it cannot be completed
            self._complain(error)
            self.counts.incomplete += 1
            self._drop(journal)
        except StateDown as error:  # the same records may be sent again
            self._complain(error)
            if self._num_unsent_bytes > MAX_UNSENT_BYTES:
                self.counts.incomplete += 1
                self._drop(journal)
            else:
                self._changed.add(journal)
        except asyncio.CancelledError:
            self._changed.add(journal)
            raise
        else:
            self._is_complaining = False
            journal.next_index += num
            self._sent(journal, num)

    def _drop(self, journal: CallJournal) -> None:
        """Record no more of it; what it lacks is generated again."""
        journal.is_kept = False
        journal.pending.clear()
        self._sent(journal, len(journal.unsent))

    def _sent(self, journal: CallJournal, num: int) -> None:
        self._num_unsent_bytes -= sum(map(len, journal.unsent[:num]))
        del journal.unsent[:num]

    def _unavailable(self, error: Exception) -> ServiceError:
        self._complain(error)
        return ServiceError("state_unavailable", retry_after_s=2.0)

    def _complain(self, error: Exception) -> None:
        """Once, until the store takes something again."""
        if not self._is_complaining:
            self._is_complaining = True
            log.warning("streams cannot be continued elsewhere for now: state store: %s", error)


def stream_name(call_id: str) -> str:
    """The stream of the state store that the journal of a call is in."""
    return f"call/{call_id}"


def _unreadable(error: Exception) -> ServiceError:
    return ServiceError("resume_mismatch", f"the journal is unreadable: {error}")


def _not_found(call_id: str) -> RequestError:
    return RequestError(
        f"there is no stream {call_id[:64]!a} to continue (any more): send the request again",
        param="request_id",
        code="not_found",
    )
