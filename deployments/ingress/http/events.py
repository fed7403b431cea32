"""JSON, server-sent events, and errors in the format of each API."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from penstock.deployments.ingress.core.errors import ApiError

ANTHROPIC_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def json_bytes(body: Any) -> bytes:
    """JSON in UTF-8, without spaces. By orjson, because it is called for every token."""
    try:
        return orjson.dumps(body)
    except TypeError:  # a number beyond 64 bits in a request, which the error repeats
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def server_sent(
    body: dict[str, Any], event: str | None = None, event_id: str | None = None
) -> bytes:
    """One server-sent event. `event` None: of no type, as OpenAI's older streams."""
    data = json_bytes(body)
    name = b"" if event is None else b"event: %b\n" % event.encode()
    if event_id is not None:
        return b"%bid: %b\ndata: %b\n\n" % (name, event_id.encode(), data)
    return b"%bdata: %b\n\n" % (name, data)


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How one API renders errors. `failure` takes the error and the id of the request."""

    status: Callable[[ApiError], int]
    failure: Callable[[ApiError, str], dict[str, Any]]
    failure_event: str | None = None  # event type of a failure in mid-stream
    last_event: bytes = b""
    id_headers: tuple[bytes, ...] = (b"x-request-id",)

    def failure_frame(self, error: ApiError, request_id: str) -> bytes:
        """A failure after the stream has begun."""
        return server_sent(self.failure(error, request_id), self.failure_event)


def _anthropic_status(error: ApiError) -> int:
    """The HTTP status: Anthropic's API has 529 for 503."""
    status = error.entry.http_status
    return 529 if status == 503 else status


def _anthropic_failure(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(_anthropic_status(error), "invalid_request_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": request_id,
    }


def _openai_failure(error: ApiError, _: str) -> dict[str, Any]:
    return error.openai_body()


def _openai_status(error: ApiError) -> int:
    return error.entry.http_status


OPENAI = ErrorFormat(_openai_status, _openai_failure, last_event=b"data: [DONE]\n\n")
RESPONSES = ErrorFormat(_openai_status, _openai_failure, failure_event="error")
ANTHROPIC = ErrorFormat(
    _anthropic_status,
    _anthropic_failure,
    failure_event="error",
    id_headers=(b"x-request-id", b"request-id"),
)


def error_format_of(path: str) -> ErrorFormat:
    """The error format of the API that `path` belongs to."""
    for root, error_format in ((ANTHROPIC_PATH, ANTHROPIC), (RESPONSES_PATH, RESPONSES)):
        if path == root or path.startswith(f"{root}/"):
            return error_format
    return OPENAI
