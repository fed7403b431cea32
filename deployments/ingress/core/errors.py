"""The closed catalogue of what a client may be told when something goes wrong.

Knows nothing of HTTP or gRPC libraries: status numbers and names are plain data. The text of an
exception never reaches a client, but for RequestError, whose messages are written for clients.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from penstock.workers.request import RequestError

log = logging.getLogger("penstock.errors")


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One thing that can go wrong, in the words of each front end."""

    http_status: int
    grpc_status: str  # the name of a grpc.StatusCode
    openai_type: str
    message: str  # when nothing more precise is known


_BAD = "invalid_request_error"
_SERVER = "server_error"

CATALOGUE: dict[str, CatalogueEntry] = {
    # The caller can mend these.
    "invalid_value": CatalogueEntry(400, "INVALID_ARGUMENT", _BAD, "a parameter is out of range"),
    "invalid_json": CatalogueEntry(400, "INVALID_ARGUMENT", _BAD, "the body is not valid JSON"),
    "invalid_message": CatalogueEntry(
        400,
        "INVALID_ARGUMENT",
        _BAD,
        "the message is not what this method takes, or a text in it is not UTF-8",
    ),
    "missing_parameter": CatalogueEntry(
        400, "INVALID_ARGUMENT", _BAD, "a required parameter is missing"
    ),
    "unknown_parameter": CatalogueEntry(
        400, "INVALID_ARGUMENT", _BAD, "a parameter is not known here"
    ),
    "unsupported_parameter": CatalogueEntry(
        400, "INVALID_ARGUMENT", _BAD, "a parameter is not supported by this server"
    ),
    "context_length_exceeded": CatalogueEntry(
        400, "INVALID_ARGUMENT", _BAD, "prompt and answer do not fit the context of the model"
    ),
    "chat_template_missing": CatalogueEntry(
        400, "FAILED_PRECONDITION", _BAD, "this model has no chat template"
    ),
    "chat_template_error": CatalogueEntry(
        400, "INVALID_ARGUMENT", _BAD, "the chat template of this model refused the messages"
    ),
    "invalid_api_key": CatalogueEntry(
        401,
        "UNAUTHENTICATED",
        "authentication_error",
        "send a valid key: 'Authorization: Bearer <key>'",
    ),
    "model_not_found": CatalogueEntry(404, "NOT_FOUND", _BAD, "no such model is served here"),
    "not_found": CatalogueEntry(404, "NOT_FOUND", _BAD, "there is nothing at this path"),
    "method_not_allowed": CatalogueEntry(
        405, "UNIMPLEMENTED", _BAD, "this path does not take this method"
    ),
    "request_too_large": CatalogueEntry(
        413, "RESOURCE_EXHAUSTED", _BAD, "the body is larger than this server takes"
    ),
    "unsupported_media_type": CatalogueEntry(
        415,
        "INVALID_ARGUMENT",
        _BAD,
        "send the body uncompressed, with 'Content-Type: application/json'",
    ),
    # The server cannot, now or at all.
    "overloaded": CatalogueEntry(
        503, "RESOURCE_EXHAUSTED", _SERVER, "too many requests are waiting; try again shortly"
    ),
    "over_share": CatalogueEntry(
        429,
        "RESOURCE_EXHAUSTED",
        "rate_limit_error",
        "this caller has more than its share of the requests that wait; try again shortly",
    ),
    "no_worker": CatalogueEntry(
        503, "UNAVAILABLE", _SERVER, "no worker is ready to serve this model; try again shortly"
    ),
    "worker_lost": CatalogueEntry(
        503, "UNAVAILABLE", _SERVER, "the worker that served this request was lost; send it again"
    ),
    "deadline_exceeded": CatalogueEntry(
        504, "DEADLINE_EXCEEDED", "timeout_error", "the deadline of this request has passed"
    ),
    "numerical_error": CatalogueEntry(
        500, "DATA_LOSS", _SERVER, "the model produced no usable numbers for this request"
    ),
    "internal_error": CatalogueEntry(
        500, "INTERNAL", _SERVER, "something went wrong in the server; the log has the details"
    ),
}


# How often this process has told a client each code, for the metrics.
num_told: Counter[str] = Counter()


class ServiceError(Exception):
    """The service could not do what was asked, though the request was right. `code` says why.

    `message` is for the client, where there is more to say than the catalogue does.
    """

    def __init__(self, code: str, message: str = "", *, retry_after_s: float | None = None):
        self.code = code if code in CATALOGUE else "internal_error"
        self.message = message
        self.retry_after_s = retry_after_s
        super().__init__(self.code)


@dataclass(frozen=True, slots=True)
class ApiError:
    """What a client is told: a code of the catalogue, and the field at fault if there is one."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None  # when it is worth while to come again, if that is known

    @property
    def entry(self) -> CatalogueEntry:
        return CATALOGUE[self.code]

    def openai_body(self) -> dict[str, dict[str, str | None]]:
        """The error in the shape that OpenAI's clients read."""
        return {
            "error": {
                "message": self.message,
                "type": self.entry.openai_type,
                "param": self.param,
                "code": self.code,
            }
        }


def describe(error: Exception, request_id: str) -> ApiError:
    """What a client is told about `error`. The unexpected is logged here, and told by id only."""
    told = _describe(error, request_id)
    num_told[told.code] += 1
    return told


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
