"""Bodies of the Files and Batches APIs: pydantic models, and functions that render them."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.deployments.batch.batch_store import BatchSpec, BatchState, BatchStatus
from penstock.deployments.batch.file_store import StoredFile
from penstock.deployments.batch.lines import ENDPOINTS
from penstock.deployments.ingress.http.batches.upload import MAX_TTL_S, MIN_TTL_S
from penstock.deployments.ingress.http.body import (
    Strict,
    drop_ignored_fields,
    json_object,
    validated,
)
from penstock.deployments.ingress.http.responses.requests import check_metadata
from penstock.workers.request import RequestError

MAX_WINDOW_S = 7 * 86400
_WINDOW = re.compile(r"([1-9][0-9]{0,4})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86400}


class OutputExpiry(Strict):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_TTL_S, le=MAX_TTL_S)


class CreateBatchRequest(Strict):
    """The file to run, and the endpoint to run it against."""

    input_file_id: str = Field(description="a file that was uploaded with purpose batch")
    endpoint: str = Field(description="the path that each line names")
    completion_window: str = Field(description="24h; or minutes, hours, days up to 7d, as 90m")
    metadata: dict[str, str] | None = Field(None, description="returned with the batch")
    output_expires_after: OutputExpiry | None = Field(None, description="default: 30 days")

    @property
    def window_s(self) -> int:
        """Raises RequestError."""
        match = _WINDOW.fullmatch(self.completion_window)
        seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
        if not 60 <= seconds <= MAX_WINDOW_S:
            raise RequestError(
                "completion_window must be a time from 1m to 7d, as 24h", param="completion_window"
            )
        return seconds


def parse_create(body: bytes) -> CreateBatchRequest:
    """Raises RequestError naming the first field that is wrong."""
    fields = CreateBatchRequest.model_fields
    request = validated(CreateBatchRequest, drop_ignored_fields(json_object(body), fields, {}, ()))
    if request.endpoint not in ENDPOINTS:
        raise RequestError(f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint")
    check_metadata(request.metadata or {})
    return request


class _AnswerPart(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FileBody(_AnswerPart):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(_AnswerPart):
    object: Literal["list"]
    data: list[FileBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(_AnswerPart):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchErrorBody(_AnswerPart):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(_AnswerPart):
    object: Literal["list"]
    data: list[BatchErrorBody]


class RequestCounts(_AnswerPart):
    total: int
    completed: int
    failed: int


class BatchBody(_AnswerPart):
    """A batch; times are seconds of Unix time, null for a status that it has not had."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    waits_for: str | None = Field(description="why requests are sent again now: an error code")
    usage: dict[str, Any] | None
    metadata: dict[str, str] | None


class BatchList(_AnswerPart):
    object: Literal["list"]
    data: list[BatchBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


def file_body(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def batch_body(spec: BatchSpec, state: BatchState) -> dict[str, Any]:
    is_final = state.status.is_final
    errors = {"object": "list", "data": state.errors} if state.errors else None
    times = {
        f"{status.value}_at": state.times.get(status.value)
        for status in BatchStatus
        if status is not BatchStatus.VALIDATING
    }
    return {
        "id": spec.id,
        "object": "batch",
        "endpoint": spec.endpoint,
        "model": state.model,
        "errors": errors,
        "input_file_id": spec.input_file_id,
        "completion_window": spec.completion_window,
        "status": state.status.value,
        "output_file_id": state.output_file_id if is_final else None,
        "error_file_id": state.error_file_id if is_final else None,
        "created_at": spec.created_at,
        "expires_at": spec.expires_at,
        **times,
        "request_counts": {
            "total": state.num_lines,
            "completed": state.num_completed,
            "failed": state.num_failed,
        },
        "waits_for": state.cause or None,
        "usage": _usage_body(state),
        "metadata": spec.metadata,
    }


def _usage_body(state: BatchState) -> dict[str, Any] | None:
    tokens = state.tokens
    if not tokens:
        return None
    return {
        "input_tokens": tokens["prompt"],
        "input_tokens_details": {"cached_tokens": tokens["cached"]},
        "output_tokens": tokens["completion"],
        "output_tokens_details": {"reasoning_tokens": tokens["reasoning"]},
        "total_tokens": tokens["prompt"] + tokens["completion"],
    }
