"""Calls with a journal: streams that can be continued, and answers that are given once.

A stream has a journal where the server has a state store. An `Idempotency-Key` gives any call one:
the same request with the same key gets the same answer, also while the first one still runs, which
then ends in favour of the second.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from urllib.parse import parse_qs

from starlette.responses import Response

from penstock.deployments.ingress.core.call import CallContext
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.http.asgi import (
    Headers,
    Receive,
    Scope,
    Send,
    StreamingAnswer,
    header,
)
from penstock.deployments.ingress.http.middleware import context_of
from penstock.deployments.ingress.http.openai.answers import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    RESUMABLE_HEADER,
    answer,
    prepared,
)
from penstock.deployments.ingress.journal.call_journal import CallJournal
from penstock.deployments.ingress.journal.idempotency import checked_key, fingerprint
from penstock.deployments.ingress.journal.journals import Journals
from penstock.deployments.ingress.journal.received import Received, parse_event_id
from penstock.workers.request import RequestError

_RESUMABLE: Headers = [(RESUMABLE_HEADER, b"1")]
NOT_RESUMABLE: Headers = [(RESUMABLE_HEADER, b"0")]
_REPLAYED: Headers = [(b"idempotent-replayed", b"true")]


class _KeyedAnswer(Response):
    """Releases the idempotency key if the answer ends before its first token."""

    def __init__(
        self, answer: StreamingAnswer, journal: CallJournal, release: Callable[[], Awaitable[None]]
    ):
        super().__init__()
        self._answer, self._journal, self._release = answer, journal, release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        finally:
            if not self._journal.has_tokens:
                await self._release()


async def created(core: RequestCore, journals: Journals, scope: Scope, content: bytes) -> Response:
    """The answer to a POST. Raises RequestError or ServiceError."""
    path, context = scope["path"], context_of(scope)
    key = header(scope, b"idempotency-key")
    if key is not None:
        return await _once(core, journals, scope, content, checked_key(key))
    journal = journals.journal_for(context, path, content)
    request = await prepared(core, path, content, replace(context, seed=journal.head.seed))
    if not request.body.stream:
        return answer(core, request)
    await journals.begin(journal)
    if not journal.is_kept:
        return answer(core, request, headers=NOT_RESUMABLE)
    return answer(core, request, journal, _RESUMABLE)


async def _once(
    core: RequestCore, journals: Journals, scope: Scope, content: bytes, key: str
) -> Response:
    """The answer to a POST with an Idempotency-Key: a new one, or that of an earlier request."""
    path, context = scope["path"], context_of(scope)
    digest = fingerprint(path, content)
    keys, principal = journals.keys, context.principal
    known = await keys.find(principal, path, key, digest)
    if known is None:
        journal = journals.journal_for(context, path, content, key)
        request = await prepared(core, path, content, replace(context, seed=journal.head.seed))
        await journals.begin(journal)
        if not journal.is_kept:
            raise ServiceError("state_unavailable", retry_after_s=2.0)
        known = await keys.claim(principal, path, key, digest, journal.call_id)
        if known is None:
            new = answer(core, request, journal, _RESUMABLE)
            return _KeyedAnswer(new, journal, lambda: keys.release(principal, path, key))
    return await _continued(core, journals, scope, known, _after(scope, known), _REPLAYED)


async def resumed(
    core: RequestCore, journals: Journals | None, scope: Scope, call_id: str
) -> StreamingAnswer:
    """The rest of a stream, after the event that the client names. Raises as `created`."""
    if journals is None:
        raise ServiceError("no_journal")
    return await _continued(core, journals, scope, call_id, _after(scope, call_id), [])


async def _continued(
    core: RequestCore,
    journals: Journals,
    scope: Scope,
    call_id: str,
    received: tuple[Received, ...],
    headers: Headers,
) -> StreamingAnswer:
    context = context_of(scope)
    journal = await journals.resume(call_id, context.principal, received)
    head = journal.head
    if head.route not in (CHAT_PATH, COMPLETIONS_PATH):
        raise RequestError(
            f"this stream is one of {head.route}: continue it there", param="request_id"
        )
    context = CallContext(
        request_id=call_id,
        client_id=head.client_id,
        principal=head.principal,
        deadline_s=context.deadline_s,
        front="http",
        wants_timings=head.wants_timings,
        seed=head.seed,
    )
    request = await prepared(core, head.route, head.body, context)
    return answer(core, request, journal, [*_RESUMABLE, *headers])


def _after(scope: Scope, call_id: str) -> tuple[Received, ...]:
    """What the client has, by the header Last-Event-ID or the query's `after`."""
    event_id = header(scope, b"last-event-id")
    if event_id is None:
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        event_id = query.get("after", [None])[0]
    if event_id is None:
        return ()
    named, received = parse_event_id(event_id)
    if named != call_id:
        raise RequestError(
            f"Last-Event-ID is of stream {named}, and this one is {call_id}", param="Last-Event-ID"
        )
    return received
