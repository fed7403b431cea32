"""Errors in the format of each API, as a body and as an event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.deployments.ingress.core.errors import ApiError
from penstock.deployments.ingress.http.events import server_sent

ANTHROPIC_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}


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
