"""Arguments and results of the Python client, and their conversion to and from protobuf."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Required, TypedDict

from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.workers.request import FinishReason

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

Prompt = str | Sequence[int]
Message = Mapping[str, Any]  # role, content; also tool_calls, tool_call_id, reasoning


class Sampling(TypedDict, total=False):
    """How to sample and when to stop; a missing key takes the server's default."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    logprobs: int
    prompt_logprobs: int
    include_stop_str_in_output: bool
    # The shape of the whole answer; one of these at most.
    json_schema: str | Mapping[str, Any]
    json_object: bool
    regex: str
    choice: Sequence[str]
    grammar: str
    # "full" or "sink_window"; with the latter an answer may go on without end.
    context_policy: str
    sinks: int
    window: int
    roll: int
    moe_mode: str  # "exact", or what the server is configured for
    n: int  # answers, side by side
    truncate_prompt_tokens: int
    return_timings: bool
    priority: int  # 0 to 100; of those that wait, lower goes first
    echo: bool  # not for a conversation
    # For a conversation only. `tool_choice` is "auto", "none", "required" or a tool's name; its
    # answer's `tool_calls` go back in a message of the assistant, the result in one of role "tool"
    # with `tool_call_id`.
    tools: Sequence[Tool]
    tool_choice: str
    parallel_tool_calls: bool


class Tool(TypedDict, total=False):
    """A function that the model may call. `parameters`: a JSON schema, as text or as a mapping."""

    name: Required[str]
    description: str
    parameters: str | Mapping[str, Any]
    strict: bool


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, or a piece of one: the first one has id and name.

    `index` tells the calls of an answer apart; `arguments` is JSON, in pieces to be joined.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of each phase, of several answers the longest. None: it did not come."""

    queue_s: float | None = None
    prefill_s: float | None = None
    first_token_s: float | None = None
    decode_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and how likely it was; `top` has the likeliest tokens there, best first.

    `logprob` is None for the first token of a prompt; `token` may be a part of a character.
    """

    token_id: int
    token: bytes
    logprob: float | None
    rank: int = 0
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer. `cached_tokens` of the prompt came from the prefix cache; a sink window
    has put `evicted_tokens` out of sight for good; `reasoning_tokens` are part of the completion.
    `moe_mode` says how exact the experts were if they were not, or if it was asked for; sparse ones
    left out `skipped_neurons` of `neurons`.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timings: Timings | None = None  # where asked for
    evicted_tokens: int = 0
    reasoning_tokens: int = 0
    moe_mode: str = ""
    neurons: int = 0
    skipped_neurons: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer; the last one has finish_reason and usage, the first one request_id.

    `reasoning` is a conversation's, and comes before all text of its choice. `choice` tells which
    of several answers it belongs to; usage comes with the last piece of all.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    request_id: str = ""
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; with `n`, the first one, and `others` are the rest. `usage` is of all.

    An answer that called tools ends with STOP, and has its calls in `tool_calls`. What the model
    reasoned before it is in `reasoning`, not in `text`; completions have it in their text.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    request_id: str
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    others: tuple[Answer, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """A served model. `max_model_len`: most tokens of prompt and answer together."""

    name: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool


_NOT_SAMPLING = (
    *("n", "truncate_prompt_tokens", "echo", "return_timings", "priority"),
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
