"""The closed catalogue of errors that a client can receive, in the terms of each front end.

Status numbers and names are plain data. The text of an exception never reaches a client, except
that of RequestError, whose messages are written for clients.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from penstock.workers.request import RequestError

log = logging.getLogger("penstock.errors")


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One error, in the terms of each front end."""

    http_status: int
    grpc_status: str  # the name of a grpc.StatusCode
    openai_type: str
    message: str  # where no more specific message is known


_BAD = "invalid_request_error"
_SERVER = "server_error"
_KEY = "authentication_error"

CATALOGUE: dict[str, CatalogueEntry] = {
    # Errors of the request.
    "invalid_value": CatalogueEntry(400, "INVALID_ARGUMENT", _BAD, "a parameter is out of range"),
    "invalid_json": CatalogueEntry(400, "INVALID_ARGUMENT", _BAD, "the body is not valid JSON"),
    "invalid_message": CatalogueEntry(
        400,
        "INVALID_ARGUMENT",
        _BAD,
        "the message is not of this method's type, or a text in it is not valid UTF-8",
    ),
    "missing_parameter": CatalogueEntry(
        400, "INVALID_ARGUMENT", _BAD, "a required parameter is missing"
    ),
    "unknown_parameter": CatalogueEntry(400, "INVALID_ARGUMENT", _BAD, "unknown parameter"),
    "unsupported_parameter": CatalogueEntry(
        400, "INVALID_ARGUMENT", _BAD, "a parameter is not supported by this server"
    ),
    "context_length_exceeded": CatalogueEntry(
        400, "INVALID_ARGUMENT", _BAD, "prompt and answer exceed the context length of the model"
    ),
    "quota_too_small": CatalogueEntry(
        400,
        "INVALID_ARGUMENT",
        _BAD,
        "this request may need more tokens than the whole quota of its tenant; lower max_tokens",
    ),
    "chat_template_missing": CatalogueEntry(
        400, "FAILED_PRECONDITION", _BAD, "this model has no chat template"
    ),
    "chat_template_error": CatalogueEntry(
        400, "INVALID_ARGUMENT", _BAD, "the chat template of this model refused the messages"
    ),
    "invalid_api_key": CatalogueEntry(
        401, "UNAUTHENTICATED", _KEY, "send a valid key: 'Authorization: Bearer <key>'"
    ),
    "api_key_expired": CatalogueEntry(
        401, "UNAUTHENTICATED", _KEY, "the API key has expired; ask for a new one"
    ),
    "api_key_revoked": CatalogueEntry(
        401, "UNAUTHENTICATED", _KEY, "the API key was revoked; ask for a new one"
    ),
    "api_key_not_yet_valid": CatalogueEntry(
        401, "UNAUTHENTICATED", _KEY, "the API key is not valid yet"
    ),
    "permission_denied": CatalogueEntry(
        403, "PERMISSION_DENIED", "permission_error", "the API key has no role that permits this"
    ),
    "model_not_found": CatalogueEntry(
        404, "NOT_FOUND", _BAD, "this server does not serve that model"
    ),
    "not_found": CatalogueEntry(404, "NOT_FOUND", _BAD, "no such path"),
    "method_not_allowed": CatalogueEntry(
        405, "UNIMPLEMENTED", _BAD, "method not allowed on this path"
    ),
    "request_too_large": CatalogueEntry(
        413, "RESOURCE_EXHAUSTED", _BAD, "the body exceeds the size limit of this server"
    ),
    "host_not_allowed": CatalogueEntry(
        421,
        "PERMISSION_DENIED",
        _BAD,
        "a server without API keys answers to its own names only; see the setting allowed_hosts",
    ),
    "head_too_large": CatalogueEntry(
        431, "INVALID_ARGUMENT", _BAD, "the headers exceed 100 fields or 16 KiB"
    ),
    "url_too_long": CatalogueEntry(414, "INVALID_ARGUMENT", _BAD, "the URL exceeds 8 KiB"),
    "request_timeout": CatalogueEntry(
        408, "DEADLINE_EXCEEDED", _BAD, "the request arrived too slowly; send it without pauses"
    ),
    "invalid_http": CatalogueEntry(
        400, "INVALID_ARGUMENT", _BAD, "this is not valid HTTP/1.1, or not served here"
    ),
    "unsupported_media_type": CatalogueEntry(
        415,
        "INVALID_ARGUMENT",
        _BAD,
        "send the body uncompressed, with 'Content-Type: application/json'",
    ),
    # Errors of the server: it cannot serve the request, now or at all.
    "overloaded": CatalogueEntry(
        503, "RESOURCE_EXHAUSTED", _SERVER, "too many requests are waiting; try again shortly"
    ),
    "over_share": CatalogueEntry(
        429,
        "RESOURCE_EXHAUSTED",
        "rate_limit_error",
        "this caller exceeds its share of the waiting requests; try again shortly",
    ),
    "rate_limit_exceeded": CatalogueEntry(
        429,
        "RESOURCE_EXHAUSTED",
        "rate_limit_error",
        "this key's tenant has used its quota; try again later",
    ),
    "no_worker": CatalogueEntry(
        503, "UNAVAILABLE", _SERVER, "no worker is ready to serve this model; try again shortly"
    ),
    "worker_lost": CatalogueEntry(
        503, "UNAVAILABLE", _SERVER, "the worker that served this request was lost; send it again"
    ),
    "expert_store_unavailable": CatalogueEntry(
        503,
        "UNAVAILABLE",
        _SERVER,
        "the store of this model's experts does not answer; try again shortly",
    ),
    "request_killed_workers": CatalogueEntry(
        500,
        "ABORTED",
        _SERVER,
        "three workers ended while they computed this request; it is not tried again",
    ),
    "resume_mismatch": CatalogueEntry(
        409,
        "ABORTED",
        _BAD,
        "the tokens that you have are not those that this stream continues with: send the request "
        "again",
    ),
    "model_changed": CatalogueEntry(
        409,
        "ABORTED",
        _BAD,
        "the model that began this answer is not served any more (its weights or number formats "
        "were changed), and another one would go on with another text: send the request again, "
        "with another Idempotency-Key if it had one",
    ),
    "resumed_elsewhere": CatalogueEntry(
        409, "ABORTED", _BAD, "another connection has continued this stream"
    ),
    "no_journal": CatalogueEntry(
        501,
        "UNIMPLEMENTED",
        _SERVER,
        "this server keeps no journals, so that a stream ends with its connection; start it with "
        "the setting state_url",
    ),
    "idempotency_key_reused": CatalogueEntry(
        422, "INVALID_ARGUMENT", _BAD, "this Idempotency-Key was sent with another request"
    ),
    "state_unavailable": CatalogueEntry(
        503, "UNAVAILABLE", _SERVER, "the state store does not work now; try again shortly"
    ),
    "deadline_exceeded": CatalogueEntry(
        504,
        "DEADLINE_EXCEEDED",
        "timeout_error",
        "the deadline of this request has passed, or it has waited too long for a worker",
    ),
    "cancelled": CatalogueEntry(
        409, "CANCELLED", _BAD, "this request was cancelled before its answer was there"
    ),
    "client_too_slow": CatalogueEntry(
        408,
        "RESOURCE_EXHAUSTED",
        _BAD,
        "the answer was read too slowly, and more of it waited than this server keeps",
    ),
    "numerical_error": CatalogueEntry(
        500, "DATA_LOSS", _SERVER, "the model produced no usable numbers for this request"
    ),
    "not_configured": CatalogueEntry(
        404,
        "UNIMPLEMENTED",
        _BAD,
        "this server keeps no files: start it with the setting data_dir (--data-dir FOLDER)",
    ),
    "internal_error": CatalogueEntry(
        500, "INTERNAL", _SERVER, "something went wrong in the server; the log has the details"
    ),
}


class ServiceError(Exception):
    """A valid request that the service could not serve. `code` is that of the catalogue.

    `message`, for the client, replaces the catalogue's where it is more specific.
    """

    def __init__(self, code: str, message: str = "", *, retry_after_s: float | None = None):
        self.code = code if code in CATALOGUE else "internal_error"
        self.message = message
        self.retry_after_s = retry_after_s
        super().__init__(self.code)


def server_stops(stream: str | None, *, has_state_store: bool) -> ServiceError:
    """For an answer that ends since its server does: whether it can be continued, and how.

    `stream`: the id under which it is kept; None: it is not.
    """
    remedy = (
        "it cannot be continued, since no state store is configured (the setting state_url): send "
        "the request again"
    )
    if stream is not None:
        remedy = (
            f"continue it on any ingress: GET /v1/penstock/streams/{stream} with the last event's "
            "id in the header Last-Event-ID, or ResumeGenerate or ResumeChat over gRPC"
        )
    elif has_state_store:
        remedy = "answers of this kind cannot be continued: send the request again"
    return ServiceError("worker_lost", f"this server stops before the answer ended; {remedy}")


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error as a client receives it: a code of the catalogue, and the field at fault if any."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None  # when to try again, if known

    @property
    def entry(self) -> CatalogueEntry:
        return CATALOGUE[self.code]

    def openai_body(self) -> dict[str, dict[str, str | None]]:
        """The error body of OpenAI's API."""
        return {
            "error": {
                "message": self.message,
                "type": self.entry.openai_type,
                "param": self.param,
                "code": self.code,
            }
        }


def describe(error: Exception, request_id: str, num_errors_returned: Counter[str]) -> ApiError:
    """What the client receives for `error`, counted by its code in `num_errors_returned`.

    An unexpected exception is logged here; its client receives only the request's id.
    """
    failure = _describe(error, request_id)
    num_errors_returned[failure.code] += 1
    return failure


def _describe(error: Exception, request_id: str) -> ApiError:
    if isinstance(error, RequestError) and error.code in CATALOGUE:
        return ApiError(error.code, error.message, error.param)
    if isinstance(error, ServiceError) and error.code != "internal_error":
        message = error.message or CATALOGUE[error.code].message
        return ApiError(error.code, message, retry_after_s=error.retry_after_s)
    if not isinstance(error, ServiceError):
        log.error("request %s failed unexpectedly", request_id, exc_info=error)
    message = CATALOGUE["internal_error"].message
    return ApiError("internal_error", f"{message} (request {request_id})")
