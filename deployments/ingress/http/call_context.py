"""What the HTTP routes of all APIs share: bodies, what headers say of a call, and its answer.

Knows nothing of any one API's shapes. Starlette only: FastAPI is for the files that hold routes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from penstock.deployments.ingress.core.service import MAX_BODY_BYTES
from penstock.deployments.ingress.http import middleware as asgi
from penstock.deployments.ingress.http.errors import error_format_of
from penstock.workers.request import RequestError

TIMEOUT_HEADER = b"x-request-timeout-ms"
TIMINGS_HEADER = b"x-penstock-timings"  # 1: have `usage.timings` in the answer
MAX_TIMEOUT_MS = 24 * 3600 * 1000
SCHEMA_REF = "#/components/schemas/{model}"


async def read_body(request: Request) -> bytes:
    """The body of a request that must have one, in JSON. Raises RequestError."""
    return await asgi.read_json_body(request.scope, request.receive, MAX_BODY_BYTES)


def about(request: Request) -> dict[str, Any]:
    """What the request itself, rather than its body, says of a Call."""
    state = request.scope["state"]
    deadline_s = None
    timeout_ms = asgi.header(request.scope, TIMEOUT_HEADER)
    if timeout_ms is not None:
        if not (timeout_ms.isascii() and timeout_ms.isdigit() and len(timeout_ms) <= 8):
            timeout_ms = "0"
        if not 1 <= int(timeout_ms) <= MAX_TIMEOUT_MS:
            raise RequestError(
                f"{TIMEOUT_HEADER.decode()} must be whole milliseconds, 1 to {MAX_TIMEOUT_MS}",
                param=TIMEOUT_HEADER.decode(),
            )
        deadline_s = time.monotonic() + int(timeout_ms) / 1000
    return {
        "request_id": state["request_id"],
        "client_id": state["client_id"],
        "principal": state["principal"],
        "deadline_s": deadline_s,
        "front": "http",
        "wants_timings": asgi.header(request.scope, TIMINGS_HEADER) == "1",
    }


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI entry of a body that the route reads itself."""
    schema = {"$ref": SCHEMA_REF.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class WhileConnected(Response):
    """An answer that is dropped, work and all, as soon as the client has gone."""

    def __init__(self, work: Callable[[asgi.Send], Awaitable[None]]):
        super().__init__()
        self._work = work

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await asgi.until_disconnect(receive, self._work(send))


def whole(body: Awaitable[dict[str, Any]]) -> WhileConnected:
    """One JSON body, once it is there."""

    async def work(send: asgi.Send) -> None:
        await asgi.send_json(send, 200, await body)

    return WhileConnected(work)


def streamed(request: Request, events: AsyncGenerator[bytes, None]) -> WhileConnected:
    """Server-sent events as they come, in the words of the path."""
    request_id = request.scope["state"]["request_id"]
    error_format = error_format_of(request.scope["path"])

    async def work(send: asgi.Send) -> None:
        await asgi.send_events(send, events, request_id, error_format)

    return WhileConnected(work)
