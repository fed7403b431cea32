"""ASGI for all APIs: headers, JSON bodies, server-sent events, failures, and disconnects.

One class sends the answers (`StreamingAnswer`); `ErrorFormat` renders errors in the format of each
API. Imports Starlette, and no FastAPI.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from penstock.deployments.ingress.core.errors import ApiError, describe
from penstock.deployments.ingress.core.service import MAX_BODY_BYTES
from penstock.deployments.ingress.http.events import ErrorFormat, error_format_of, json_bytes
from penstock.workers.request import RequestError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

DEFAULT_RETRY_AFTER_S = b"1"
# A stream without events for this time gets a comment, which clients ignore: a request may wait
# long for memory or for a worker that starts, and proxies close silent connections (60 s by
# default).
KEEP_ALIVE_S = 10.0
COMMENT = b": waiting\n\n"
# Between events with ids: after an id, OpenAI's Python client takes an empty line for an event.
COMMENT_AFTER_ID = b": waiting\n"
_NO_BUFFER: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
# Clients of OpenAI's API repeat what has another 5xx status, or 409.
_NEVER_REPEATED = (
    *("request_killed_workers", "resume_mismatch", "model_changed", "resumed_elsewhere"),
    *("no_journal", "cancelled"),
)


class ClientGone(Exception):
    """The client wants nothing more: it disconnected before its request was complete, or it asked
    with HEAD and has the headers. There is nothing left to send."""


def only_head(scope: Scope, send: Send) -> tuple[Scope, Send]:
    """A HEAD request as the GET that the app answers, and what sends of that answer the status and
    the headers alone. The first part of a longer body raises ClientGone, which ends its work."""
    has_ended = False

    async def send_head(message: MutableMapping[str, Any]) -> None:
        nonlocal has_ended
        if message["type"] != "http.response.body":
            await send(message)
            return
        if not has_ended:
            has_ended = True
            await send({"type": "http.response.body", "body": b""})
        if message.get("more_body"):
            raise ClientGone

    state = {**scope.get("state", {}), "is_head": True}
    return {**scope, "method": "GET", "state": state}, send_head


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that lower-case name."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


class StreamingAnswer(Response):
    """Sends an answer while it is generated, and cancels the work when the client disconnects.

    `body`: an async generator of server-sent events, or an awaitable of one JSON body.
    `num_errors_returned` counts a failure in mid-stream by its code.
    """

    def __init__(
        self,
        body: AsyncGenerator[bytes, None] | Awaitable[Any],
        num_errors_returned: Counter[str],
        *,
        headers: Headers | None = None,
        has_event_ids: bool = False,
        error_format: ErrorFormat | None = None,
    ):
        """`error_format`: of failures in mid-stream; None: that of the path that was called."""
        super().__init__()
        self._extra = headers or []
        self._comment = COMMENT_AFTER_ID if has_event_ids else COMMENT
        self._body = body
        self._num_errors_returned = num_errors_returned
        self._error_format = error_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self._body
        if isinstance(body, AsyncGenerator):
            work = self._send_events(send, body, scope)
        else:
            work = _send_whole(send, body, self._extra)
        await _until_disconnect(receive, work)

    async def _send_events(
        self, send: Send, events: AsyncGenerator[bytes, None], scope: Scope
    ) -> None:
        """Server-sent events, each flushed at once, and at the end the API's last one (as [DONE]).

        A failure before the first event or comment becomes an error response, which EdgeMiddleware
        sends; a later one becomes an event with the error, which ends the stream.
        """
        stream = _EventStream(send, self._extra, self._comment)
        error_format = self._error_format or error_format_of(scope["path"])
        async with aclosing(events):
            try:
                await stream.send_all(events)
            except ClientGone:
                raise
            except Exception as error:
                if not stream.has_started:
                    raise
                request_id = scope["state"]["request_id"]
                failure = describe(error, request_id, self._num_errors_returned)
                if (trace := scope["state"].get("trace")) is not None:
                    trace.fail(failure.code)
                await _send_chunk(send, error_format.failure_frame(failure, request_id))
            else:
                if error_format.last_event:
                    await _send_chunk(send, error_format.last_event)
            await send({"type": "http.response.body", "body": b""})


class _EventStream:
    """One response of server-sent events; sends a comment after KEEP_ALIVE_S without an event."""

    def __init__(self, send: Send, headers: Headers, comment: bytes):
        self.has_started = False
        self._send = send
        self._headers = [*_NO_BUFFER, *headers]
        self._comment_bytes = comment
        self._is_quiet = True  # since the timer was set
        self._lock = asyncio.Lock()  # an event and a comment may be sent at the same time
        self._comment: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._on_time)

    async def send_all(self, events: AsyncGenerator[bytes, None]) -> None:
        """Send each event at once; when this returns or raises, no comment follows."""
        try:
            async for event in events:
                await self._send_next(event)
            if not self.has_started:  # the client has had all of it before
                await self._send_next(b"")
        finally:
            self._timer.cancel()
            if self._comment is not None:
                await asyncio.gather(self._comment, return_exceptions=True)

    async def _send_next(self, content: bytes) -> None:
        """The first one begins the response."""
        self._is_quiet = False
        async with self._lock:
            if not self.has_started:
                self.has_started = True
                kind = b"text/event-stream; charset=utf-8"
                await _send_start(self._send, 200, kind, self._headers)
            await _send_chunk(self._send, content)

    def _on_time(self) -> None:
        if self._is_quiet and (self._comment is None or self._comment.done()):
            self._comment = asyncio.ensure_future(self._send_next(self._comment_bytes))
        self._is_quiet = True
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._on_time)


async def _send_whole(send: Send, body: Awaitable[Any], headers: Headers) -> None:
    await send_json(send, 200, await body, headers)


async def _until_disconnect(receive: Receive, work: Awaitable[None]) -> None:
    """Run `work`, but cancel it when the client disconnects. The body must have been read."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if not working.cancelled():
        working.result()


async def _send_start(
    send: Send, status: int, content_type: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    all_headers = [(b"content-type", content_type), *headers]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})


async def _send_chunk(send: Send, content: bytes) -> None:
    await send({"type": "http.response.body", "body": content, "more_body": True})


async def send_json(
    send: Send, status: int, body: Any, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """A whole JSON response."""
    content = json_bytes(body)
    length = (b"content-length", str(len(content)).encode())
    await _send_start(send, status, b"application/json", [length, *headers])
    await send({"type": "http.response.body", "body": content})


async def send_error(
    send: Send, error: ApiError, request_id: str, error_format: ErrorFormat
) -> None:
    """An error response, with Retry-After where another attempt may succeed."""
    headers: Headers = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
    elif error.entry.http_status in (429, 503):
        headers.append((b"retry-after", DEFAULT_RETRY_AFTER_S))
    if error.code in _NEVER_REPEATED:
        headers.append((b"x-should-retry", b"false"))
    if error.entry.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    status, body = error_format.status(error), error_format.failure(error, request_id)
    await send_json(send, status, body, headers)


async def read_json_body(scope: Scope, receive: Receive, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The whole body, its size checked as it arrives, also against all others'.

    Raises RequestError, ServiceError overloaded, or ClientGone.
    """
    open_call = scope["state"].get("open_call")  # none for calls from within the process
    content_type = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
    # Browsers send other types across origins without a preflight request; not this one.
    encoding = header(scope, b"content-encoding") or "identity"
    if content_type != "application/json" or encoding.lower() != "identity":
        raise RequestError(
            "send the body uncompressed, with 'Content-Type: application/json'",
            code="unsupported_media_type",
        )
    too_large = RequestError(
        f"the body exceeds the {max_bytes} bytes that this server accepts",
        code="request_too_large",
    )
    declared = header(scope, b"content-length") or "0"
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    chunks, num_bytes = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise too_large
        if open_call is not None:
            open_call.add(len(chunk))
        chunks.append(chunk)
        if not message.get("more_body"):
            return b"".join(chunks)
