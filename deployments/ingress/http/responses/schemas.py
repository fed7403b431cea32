"""The schemas of what /v1/responses answers, for the OpenAPI document. draft.py has the values."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class ResponseBody(BaseModel):
    """A response: its request's fields, its status and its output."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    background: bool
    completed_at: int | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class Deleted(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(BaseModel):
    """What the model would read."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class InputItems(BaseModel):
    """What led to a response, as items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
