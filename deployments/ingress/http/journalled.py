"""Calls with a journal: streams that can be continued, and answers that are given once.

A stream, and what runs in the background, has a journal where the server has a state store. An
`Idempotency-Key` gives any call one: the same request with the same key gets the same answer, also
while the first one still runs, which then ends in favour of the second.

Each API gives an `Endpoint` for its path; what is the same for all of them is here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Protocol
from urllib.parse import parse_qs

from starlette.responses import Response

from penstock.deployments.ingress.core.call import CallContext
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.http.asgi import (
    Headers,
    Receive,
    Scope,
    Send,
    StreamingAnswer,
    header,
)
from penstock.deployments.ingress.http.middleware import context_of
from penstock.deployments.ingress.journal.call_journal import CallJournal
from penstock.deployments.ingress.journal.idempotency import Key, checked_key, fingerprint_of_json
from penstock.deployments.ingress.journal.journals import Journals
from penstock.deployments.ingress.journal.once import once, release_unused
from penstock.deployments.ingress.journal.received import Received, parse_event_id
from penstock.deployments.ingress.journal.records import Head
from penstock.deployments.ingress.journal.values import RUNNING_TTL_S
from penstock.workers.request import RequestError

RESUMABLE_HEADER = b"x-penstock-resumable"
RESUMABLE: Headers = [(RESUMABLE_HEADER, b"1")]
NOT_RESUMABLE: Headers = [(RESUMABLE_HEADER, b"0")]
REPLAYED: Headers = [(b"idempotent-replayed", b"true")]


class PreparedCall(Protocol):
    """A checked request of one API.

    `streams`: its answer is a stream. `is_background`: it goes on without a client. `before`: what
    its body only names, for the head of a journal.
    """

    @property
    def streams(self) -> bool: ...

    @property
    def is_background(self) -> bool: ...

    @property
    def before(self) -> bytes: ...

    async def answer(self, journal: CallJournal | None, headers: Headers) -> Response:
        """Raises RequestError or ServiceError."""
        ...


class Endpoint(Protocol):
    """What one API makes of a POST to its path."""

    async def prepare(
        self, content: bytes, context: CallContext, head: Head | None
    ) -> PreparedCall:
        """`head`: of the journal, where a call is continued. Raises RequestError, ServiceError."""
        ...

    async def attached(
        self, call_id: str, principal: str, after: int, headers: Headers
    ) -> Response | None:
        """The answer of a call that must not be taken over; None: this one may be."""
        ...


class JournalledCalls:
    """The calls of all APIs of one ingress."""

    def __init__(self, journals: Journals):
        self.journals = journals
        self._endpoints: dict[str, Endpoint] = {}

    def add(self, path: str, endpoint: Endpoint) -> None:
        """Serve `path`, too."""
        self._endpoints[path] = endpoint

    async def created(self, scope: Scope, content: bytes) -> Response:
        """The answer to a POST. Raises RequestError or ServiceError."""
        path, context = scope["path"], context_of(scope)
        endpoint = self._endpoints[path]
        if (key := header(scope, b"idempotency-key")) is not None:
            digest = fingerprint_of_json(path, content)
            named = Key(context.principal, path, checked_key(key), digest)
            return await self._once(scope, content, named, context)
        journal = self.journals.journal_for(context, path, content)
        call = await endpoint.prepare(content, replace(context, seed=journal.head.seed), None)
        if not (call.streams or call.is_background):
            return await call.answer(None, [])
        journal.head = replace(journal.head, before=call.before)
        if call.is_background:  # it may wait long for its first token, without a client
            journal.head = replace(journal.head, ttl_s=RUNNING_TTL_S)
        await self.journals.begin(journal)
        if journal.is_kept:
            return await call.answer(journal, RESUMABLE)
        if call.is_background:
            raise ServiceError("state_unavailable", retry_after_s=2.0)
        return await call.answer(None, NOT_RESUMABLE)

    async def _once(self, scope: Scope, content: bytes, key: Key, context: CallContext) -> Response:
        """The answer to a POST with an Idempotency-Key: a new one, or that of an earlier call."""

        async def prepare(context: CallContext, journal: CallJournal) -> PreparedCall:
            call = await self._endpoints[key.route].prepare(content, context, None)
            journal.head = replace(journal.head, before=call.before)
            return call

        new = await once(self.journals, key, context, content, prepare)
        if isinstance(new, str):
            return await self._continued(scope, new, *_after(scope, new), REPLAYED)
        journal = new.journal
        answer = await new.prepared.answer(journal, RESUMABLE)
        if new.prepared.is_background:
            return answer
        return _KeyedAnswer(answer, lambda: release_unused(self.journals, key, journal))

    async def resumed(self, scope: Scope, call_id: str, after: int = -1) -> Response:
        """The rest of a stream after the event that the client names, or after event number
        `after`. Raises as `created`."""
        received, number = _after(scope, call_id)
        return await self._continued(scope, call_id, received, max(number, after), [])

    async def _continued(
        self,
        scope: Scope,
        call_id: str,
        received: tuple[Received, ...],
        after: int,
        headers: Headers,
    ) -> Response:
        context = context_of(scope)
        head = await self.journals.head(call_id, context.principal)
        endpoint = self._endpoints.get(head.route)
        if endpoint is None:
            raise RequestError(
                f"this stream is one of {head.route}: continue it there", param="request_id"
            )
        headers = [*RESUMABLE, *headers]
        if scope["state"].get("is_head"):  # it changes nothing: the stream goes on where it is
            return StreamingAnswer(_no_events(), Counter(), headers=headers)
        attached = await endpoint.attached(call_id, context.principal, after, headers)
        if attached is not None:
            return attached
        journal = await self.journals.resume(call_id, head, received, after)
        about = replace(
            continued_context(call_id, head),
            deadline_s=context.deadline_s,
            key_id=context.key_id,
            trace=context.trace,
        )
        call = await endpoint.prepare(head.body, about, head)
        return await call.answer(journal, headers)


def continued_context(call_id: str, head: Head) -> CallContext:
    """Where a call came from, as its journal says."""
    deadline_s = head.deadline_s
    if deadline_s is not None:
        deadline_s += time.monotonic() - time.time()
    return CallContext(
        request_id=call_id,
        client_id=head.client_id,
        principal=head.principal,
        key_id=head.key_id,
        front="http",
        wants_timings=head.wants_timings,
        deadline_s=deadline_s,
        seed=head.seed,
        is_continued=True,
    )


async def _no_events() -> AsyncGenerator[bytes, None]:
    return
    yield b""  # what makes it a generator


class _KeyedAnswer(Response):
    """Releases the idempotency key if nothing came of the request."""

    def __init__(self, answer: Response, release: Callable[[], Awaitable[None]]):
        super().__init__()
        self._answer, self._release = answer, release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        finally:
            await self._release()


def _after(scope: Scope, call_id: str) -> tuple[tuple[Received, ...], int]:
    """What the client has, by the header Last-Event-ID or the query's `after`."""
    event_id = header(scope, b"last-event-id")
    if event_id is None:
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        event_id = query.get("after", [None])[0]
    if event_id is None:
        return (), -1
    named, received, number = parse_event_id(event_id)
    if named != call_id:
        raise RequestError(
            f"Last-Event-ID is of stream {named}, and this one is {call_id}", param="Last-Event-ID"
        )
    return received, number
