"""How an answer goes out over ASGI: JSON bodies, server-sent events, errors, and disconnects.

One class sends the answers of all APIs (`StreamingAnswer`). Only Starlette here, no FastAPI.
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
from penstock.deployments.ingress.http.body import Receive, Scope
from penstock.deployments.ingress.http.errors import ErrorFormat, error_format_of, json_bytes

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

DEFAULT_RETRY_AFTER_S = b"1"
_NO_BUFFER: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class StreamingAnswer(Response):
    """Sends an answer while it is made, and cancels the work when the client disconnects.

    `body`: an async generator of server-sent events, or an awaitable of one JSON body.
    `num_errors_returned` counts a failure in mid-stream by its code.
    """

    def __init__(
        self,
        body: AsyncGenerator[bytes, None] | Awaitable[Any],
        num_errors_returned: Counter[str],
    ):
        super().__init__()
        self._body = body
        self._num_errors_returned = num_errors_returned

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self._body
        if isinstance(body, AsyncGenerator):
            work = self._send_events(send, body, scope)
        else:
            work = _send_whole(send, body)
        await _until_disconnect(receive, work)

    async def _send_events(
        self, send: Send, events: AsyncGenerator[bytes, None], scope: Scope
    ) -> None:
        """Server-sent events, each flushed at once, and at the end the API's last one (as [DONE]).

        Before the first event a failure becomes an error response, which EdgeMiddleware sends;
        after it, an event that holds the error and ends the stream.
        """
        has_started = False
        error_format = error_format_of(scope["path"])
        async with aclosing(events):
            try:
                async for event in events:
                    if not has_started:
                        has_started = True
                        await _send_start(
                            send, 200, b"text/event-stream; charset=utf-8", _NO_BUFFER
                        )
                    await _send_chunk(send, event)
            except Exception as error:
                if not has_started:
                    raise
                request_id = scope["state"]["request_id"]
                failure = describe(error, request_id, self._num_errors_returned)
                await _send_chunk(send, error_format.failure_frame(failure, request_id))
            else:
                if error_format.last_event:
                    await _send_chunk(send, error_format.last_event)
            await send({"type": "http.response.body", "body": b""})


async def _send_whole(send: Send, body: Awaitable[Any]) -> None:
    await send_json(send, 200, await body)


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
    if error.entry.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    status, body = error_format.status(error), error_format.failure(error, request_id)
    await send_json(send, status, body, headers)
