"""What stands between uvicorn and the routes, in plain ASGI: ids, keys, bodies, streams.

No framework here: what decides who comes in and what goes out reads the raw scope, not objects
that are built from headers. Knows nothing of OpenAI's shapes but for errors.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    MutableMapping,
)
from contextlib import aclosing
from typing import Any

from penstock.deployments.ingress.core.call import new_request_id
from penstock.deployments.ingress.core.errors import ApiError, describe
from penstock.deployments.ingress.core.validation import is_client_id
from penstock.deployments.ingress.http import static as console_files
from penstock.deployments.ingress.http.errors import (
    OPENAI,
    ErrorFormat,
    error_format_of,
    json_bytes,
)
from penstock.deployments.security.api_keys import ApiKeys
from penstock.workers.request import RequestError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Answerer = Callable[[Scope, Receive], Awaitable[App]]  # reads a request; what it gives sends
Headers = list[tuple[bytes, bytes]]

PUBLIC_PATHS = frozenset(("/health", "/live", "/ready", *console_files.FILES))
CLIENT_ID_HEADERS = (b"x-client-request-id", b"x-request-id")
RETRY_AFTER_S = b"1"


class ClientGone(Exception):
    """The client left before it had said what it wants: nobody is there to be answered."""


class EdgeMiddleware:
    """The outermost app: names each request, checks its key, and answers for whatever fails inside.

    Sets `request_id`, `client_id` and `principal` in the scope's state, and echoes the ids. Default
    is to deny: a path is open only if it is one of PUBLIC_PATHS, to the letter.

    A POST to one of `short_ways` goes straight there, past `app`, whose routing, dependencies and
    layers around each chunk cost as much as all that is ours of a short request.
    """

    def __init__(self, app: App, keys: ApiKeys, short_ways: Mapping[str, Answerer] | None = None):
        self._app = app
        self._keys = keys
        self._short_ways = short_ways or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
            return
        request_id = new_request_id()
        ids = (header(scope, name) for name in CLIENT_ID_HEADERS)
        client_id = next((each for each in ids if each and is_client_id(each)), None)
        error_format = error_format_of(scope["path"])
        named: Headers = [(name, request_id.encode()) for name in error_format.id_headers]
        if client_id is not None:
            named.append((b"x-client-request-id", client_id.encode()))

        started = False

        async def send_named(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message.get("headers", ()), *named]}
            await send(message)

        principal = self._keys.principal(_offered_key(scope))
        if principal is None and scope["path"] not in PUBLIC_PATHS:
            refusal = RequestError(
                "this server wants a key: 'Authorization: Bearer <key>'", code="invalid_api_key"
            )
            await send_error(send_named, describe(refusal, request_id), request_id, error_format)
            return
        scope.setdefault("state", {}).update(
            request_id=request_id, client_id=client_id, principal=principal or ""
        )
        short_way = self._short_ways.get(scope["path"]) if scope["method"] == "POST" else None
        try:
            if short_way is None:
                await self._app(scope, receive, send_named)
            else:
                answer = await short_way(scope, receive)
                await answer(scope, receive, send_named)
        except ClientGone:
            return
        except Exception as error:
            failure = describe(error, request_id)
            if not started:
                named += scope["state"].get("error_headers", ())
                await send_error(send_named, failure, request_id, error_format)


def _offered_key(scope: Scope) -> str | None:
    """What `authorization` says; without it, a key as Anthropic's clients send it."""
    authorization, key = header(scope, b"authorization"), header(scope, b"x-api-key")
    return f"Bearer {key}" if authorization is None and key is not None else authorization


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that lower-case name."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


async def read_json_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body, counted while it comes. Raises RequestError, or ClientGone."""
    content_type = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
    # Browsers send other types across origins without asking first; this one they may not.
    if content_type != "application/json" or header(scope, b"content-encoding") is not None:
        raise RequestError(
            "send the body uncompressed, with 'Content-Type: application/json'",
            code="unsupported_media_type",
        )
    too_large = RequestError(
        f"the body is larger than the {max_bytes} bytes that this server takes",
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
        chunks.append(chunk)
        if not message.get("more_body"):
            return b"".join(chunks)


async def until_disconnect(receive: Receive, work: Awaitable[None]) -> None:
    """Run `work`, but cancel it as soon as the client has gone. The body must have been read."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if not working.cancelled():
        working.result()


async def send_events(
    send: Send,
    events: AsyncGenerator[bytes, None],
    request_id: str,
    error_format: ErrorFormat = OPENAI,
) -> None:
    """Server-sent events, each flushed at once, and at the end the API's last one (such as [DONE]).

    A failure before the first event is an ordinary error answer; after it, an event that holds the
    error, and nothing behind it.
    """
    started = False
    async with aclosing(events):
        try:
            async for event in events:
                if not started:
                    started = True
                    await send_start(send, 200, b"text/event-stream; charset=utf-8", _NO_BUFFER)
                await send_chunk(send, event)
        except Exception as error:
            failure = describe(error, request_id)
            if not started:
                await send_error(send, failure, request_id, error_format)
                return
            await send_chunk(send, error_format.failure_frame(failure, request_id))
        else:
            if error_format.last_event:
                await send_chunk(send, error_format.last_event)
        await send({"type": "http.response.body", "body": b""})


_NO_BUFFER: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


async def send_start(
    send: Send, status: int, content_type: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    all_headers = [(b"content-type", content_type), *headers]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})


async def send_chunk(send: Send, content: bytes) -> None:
    await send({"type": "http.response.body", "body": content, "more_body": True})


async def send_json(
    send: Send, status: int, body: Any, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    content = json_bytes(body)
    length = (b"content-length", str(len(content)).encode())
    await send_start(send, status, b"application/json", [length, *headers])
    await send({"type": "http.response.body", "body": content})


async def send_error(
    send: Send, error: ApiError, request_id: str, error_format: ErrorFormat
) -> None:
    headers: Headers = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
    elif error.entry.http_status in (429, 503):
        headers.append((b"retry-after", RETRY_AFTER_S))
    if error.entry.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send_json(
        send, error_format.status(error), error_format.failure(error, request_id), headers
    )
