"""OpenAI's answer bodies as models, and the parts of OpenAPI operations that all routes share.

The models document the answers and tests validate against them; rendering.py builds the answers
themselves, as plain dictionaries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from penstock.deployments.ingress.core.call import ServedModel
from penstock.deployments.ingress.http.openai.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
)
from penstock.workers.stats import WorkerInfo

SCHEMA_REF = "#/components/schemas/{model}"


class _AnswerPart(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(_AnswerPart):
    cached_tokens: int


class TimingsBody(_AnswerPart):
    """Seconds of each phase; of several answers, the longest. Only where the request asked."""

    queue_s: float | None
    prefill_s: float | None
    first_token_s: float | None
    decode_s: float | None
    total_s: float | None


class CompletionTokensDetails(_AnswerPart):
    reasoning_tokens: int
    accepted_prediction_tokens: int | None = None  # drafts that are part of the answer
    rejected_prediction_tokens: int | None = None  # drafts that are not, and are not counted


class UsageBody(_AnswerPart):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    timings: TimingsBody | None = None
    evicted_tokens: int | None = None  # put out of sight for good by a sink window
    moe_mode: str | None = None  # how exact the experts were, if not exact, or if asked for
    neurons: int | None = None  # sparse: of the experts that tokens of the answer had
    skipped_neurons: int | None = None  # of those, the ones left out


Finish = Literal["stop", "length", "abort", "tool_calls"]


class FunctionCall(_AnswerPart):
    name: str | None = None
    arguments: str


class ToolCallBody(_AnswerPart):
    """In a stream the first piece has id and name; the arguments of all pieces are joined."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class AssistantMessage(_AnswerPart):
    """`reasoning` is the newer name of `reasoning_content`: clients read the one or the other."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None
    tool_calls: list[ToolCallBody] | None = None


class ChatChoice(_AnswerPart):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(_AnswerPart):
    """An answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(_AnswerPart):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallBody] | None = None


class ChatChunkChoice(_AnswerPart):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(_AnswerPart):
    """One event of a streamed answer to a conversation."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionChoice(_AnswerPart):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(_AnswerPart):
    """Continuations of prompts; in a stream, one event of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | None = None


class ModelBody(_AnswerPart):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None = None  # of an adapter: the model whose adapter it is
    max_model_len: int
    tool_call_parser: str  # form of its tool calls; plain: described in the system message; unknown
    sampling_defaults: dict[str, float]  # the model's own, for requests that do not state them
    weights: str | None = None  # number format of its linear layers; null: no worker is there yet
    weight_bytes: int | None = None


class ModelList(_AnswerPart):
    object: Literal["list"]
    data: list[ModelBody]


class ErrorDetail(_AnswerPart):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(_AnswerPart):
    """What every failure looks like; `code` is from a closed list."""

    error: ErrorDetail


def model_body(
    model: ServedModel, infos: Iterable[WorkerInfo] = (), name: str | None = None
) -> dict[str, Any]:
    """`infos`: of the workers that are alive. `name`: one of the model's; None: its first."""
    serving = next((info for info in infos if info.model == model.model and info.weights), None)
    return {
        "id": name or model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "penstock",
        "parent": model.parent or None,
        "max_model_len": model.max_model_len,
        "tool_call_parser": model.tool_call_parser,
        "sampling_defaults": dict(model.sampling_defaults.values),
        "weights": None if serving is None else serving.weights,
        "weight_bytes": None if serving is None else serving.weight_bytes,
    }


def request_schema(body: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI entry of a body that the route reads itself."""
    schema = {"$ref": SCHEMA_REF.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI entries of the errors that a route returns; 403 comes wherever 401 does."""
    named = sorted({*statuses, 403} if 401 in statuses else statuses)
    return {status: {"model": ErrorBody} for status in named}
