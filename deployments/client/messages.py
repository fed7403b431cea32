"""The Python client's arguments as protobuf messages, and messages as its results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.deployments.client.types import (
    Answer,
    FinishReason,
    Message,
    Model,
    Piece,
    Sampling,
    Timings,
    TokenLogprob,
    Tool,
    ToolCall,
    Usage,
)
from penstock.protos.penstock.v1 import inference_pb2 as pb

_FINISH = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_ABORT: FinishReason.ABORT,
    pb.FINISH_REASON_TOOL_CALLS: FinishReason.STOP,
}
_MODES = {
    "auto": pb.TOOL_CHOICE_MODE_AUTO,
    "none": pb.TOOL_CHOICE_MODE_NONE,
    "required": pb.TOOL_CHOICE_MODE_REQUIRED,
}
_NOT_SAMPLING = (
    *("n", "truncate_prompt_tokens", "echo", "return_timings", "priority", "cache_salt"),
    *("tools", "tool_choice", "parallel_tool_calls"),
)


def sampling_fields(given: Sampling) -> dict[str, Any]:
    """`given` as fields of a request message."""
    fields: dict[str, Any] = dict(given)
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    if "choice" in fields:
        fields["choice"] = pb.Choices(values=fields["choice"])
    if "json_schema" in fields:
        fields["json_schema"] = _json_text(fields["json_schema"])
    if "tools" in fields:
        fields["tools"] = [_tool_message(tool) for tool in fields["tools"]]
    if "tool_choice" in fields:
        mode = _MODES.get(fields["tool_choice"])
        chosen = {"function": fields["tool_choice"]} if mode is None else {"mode": mode}
        fields["tool_choice"] = pb.ToolChoice(**chosen)
    others = {name: fields.pop(name) for name in _NOT_SAMPLING if name in fields}
    return {"sampling": pb.SamplingParams(**fields), **others}


def message_of(message: Message) -> pb.Message:
    """One turn; calls of tools may be ToolCalls, as an answer has them."""
    fields = dict(message)
    fields["tool_calls"] = [
        pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
        for call in message.get("tool_calls", ())
    ]
    return pb.Message(**fields)


def _tool_message(tool: Tool) -> pb.Tool:
    fields: dict[str, Any] = dict(tool)
    return pb.Tool(**{**fields, "parameters": _json_text(fields.get("parameters", ""))})


def _json_text(value: str | Mapping[str, Any]) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def piece_of(message: pb.GenerateResponse | pb.ChatResponse) -> Piece:
    usage = None
    if message.HasField("usage"):
        used = message.usage
        timings = _timings_of(used.timings) if used.HasField("timings") else None
        usage = Usage(
            used.prompt_tokens,
            used.completion_tokens,
            used.cached_tokens,
            timings,
            used.evicted_tokens,
            used.reasoning_tokens,
            used.moe_mode,
            used.neurons,
            used.skipped_neurons,
            used.draft_tokens,
            used.accepted_draft_tokens,
        )
    chat = message if isinstance(message, pb.ChatResponse) else None
    return Piece(
        text=message.text,
        token_ids=tuple(message.token_ids),
        finish_reason=_FINISH.get(message.finish_reason),
        usage=usage,
        request_id=message.request_id,
        choice=message.choice,
        logprobs=tuple(map(_logprob_of, message.logprobs)),
        prompt_logprobs=tuple(map(_logprob_of, message.prompt_logprobs)),
        tool_calls=() if chat is None else _calls_of(chat),
        reasoning="" if chat is None else chat.reasoning,
    )


def answer_of(pieces: Sequence[Piece]) -> Answer:
    usage = pieces[-1].usage
    assert usage is not None, "the last piece has the usage"
    request_id = pieces[0].request_id
    by_choice: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_choice.setdefault(piece.choice, []).append(piece)
    first, *others = (_choice(by_choice[i], usage, request_id) for i in sorted(by_choice))
    return replace(first, others=tuple(others))


def _choice(pieces: Sequence[Piece], usage: Usage, request_id: str) -> Answer:
    reason = pieces[-1].finish_reason
    assert reason is not None, "the last piece of each choice has the finish reason"
    return Answer(
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        finish_reason=reason,
        usage=usage,
        request_id=request_id,
        logprobs=tuple(each for piece in pieces for each in piece.logprobs),
        prompt_logprobs=pieces[0].prompt_logprobs,
        tool_calls=_joined(call for piece in pieces for call in piece.tool_calls),
        reasoning="".join(piece.reasoning for piece in pieces),
    )


def _calls_of(message: pb.ChatResponse) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(call.index, call.id, call.name, call.arguments) for call in message.tool_calls
    )


def _joined(pieces: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """Whole calls."""
    calls: dict[int, ToolCall] = {}
    for piece in pieces:
        call = calls.setdefault(piece.index, replace(piece, arguments=""))
        calls[piece.index] = replace(call, arguments=call.arguments + piece.arguments)
    return tuple(calls.values())


def _timings_of(message: pb.Timings) -> Timings:
    return Timings(**{field.name: value for field, value in message.ListFields()})


def _logprob_of(message: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        message.token_id,
        message.token,
        message.logprob if message.HasField("logprob") else None,
        message.rank,
        tuple(TokenLogprob(each.token_id, each.token, each.logprob) for each in message.top),
    )


def models_of(response: pb.ListModelsResponse) -> list[Model]:
    return [
        Model(model.name, model.max_model_len, model.vocab_size, model.has_chat_template)
        for model in response.models
    ]
