"""Messages of penstock.v1 to and from the core's types.

Requests: prompts, sampling parameters, structured outputs and tools. Answers: one message per
delta, made for every token, so an empty field costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import islice
from typing import Any, TypeVar

from penstock.deployments.ingress.core.call import (
    MAX_PRIORITY,
    ChatPrompt,
    TextDelta,
    TokenUsage,
    earlier_call,
)
from penstock.deployments.ingress.core.generation import Generation
from penstock.deployments.ingress.core.logprobs import DecodedLogprob
from penstock.deployments.ingress.core.prompts import MAX_MESSAGES
from penstock.deployments.ingress.core.service import MAX_BODY_BYTES
from penstock.deployments.ingress.core.tools import MAX_TOOLS, Tool, Toolset, only_one
from penstock.deployments.ingress.core.validation import MAX_BAD_WORD_STRINGS
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.workers.request import (
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    FinishReason,
    RequestError,
    SamplingParams,
)
from penstock.workers.sampling_defaults import SamplingDefaults
from penstock.workers.structured_spec import StructuredKind, StructuredSpec, choice, json_schema
from penstock.workers.text.tokenizer import Tokenizer

# Parameters that the message has under the same name and as the same type.
_SAMPLING_FIELDS = tuple(
    name
    for name, each in pb.SamplingParams.DESCRIPTOR.fields_by_name.items()
    if each.has_presence and name in {each.name for each in fields(SamplingParams)}
)
MAX_CALLS = 1024  # of tools, in one message
T = TypeVar("T")

_ROLE_FIELDS = (("tool_calls", "assistant"), ("tool_call_id", "tool"), ("reasoning", "assistant"))


def text_prompt(request: pb.GenerateRequest) -> str | tuple[int, ...]:
    """Text or token ids. Raises RequestError if there is neither."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind == "token_ids":
        return tuple(request.token_ids.ids)
    raise RequestError(
        "a prompt is required: text or token_ids", param="prompt", code="missing_parameter"
    )


def chat_prompt(request: pb.ChatRequest) -> ChatPrompt:
    """The conversation and its tools. Raises RequestError."""
    return ChatPrompt(
        tuple(
            _plain(message, f"messages[{i}]")
            for i, message in enumerate(few(request.messages, MAX_MESSAGES))
        ),
        add_generation_prompt=flag(request, "add_generation_prompt", True),
        tools=_toolset(request),
    )


def sampling(
    message: pb.SamplingParams, defaults: SamplingDefaults, toolset: Toolset | None = None
) -> SamplingParams:
    """How to sample an answer, one that must call tools included. Raises RequestError.

    `defaults`: the model's, for what the message does not set.
    """
    given = {name: getattr(message, name) for name in _SAMPLING_FIELDS if message.HasField(name)}
    shapes = (_shape(message), None if toolset is None else toolset.spec())
    given |= {
        "stop": few(message.stop, MAX_STOP_STRINGS),
        "stop_token_ids": few(message.stop_token_ids, MAX_STOP_TOKEN_IDS),
        "logit_bias": few(message.logit_bias.items(), MAX_LOGIT_BIAS),
        "allowed_token_ids": tuple(message.allowed_token_ids),
        "structured": only_one([shape for shape in shapes if shape is not None], "tool_choice"),
    }
    return defaults.params(given)


def priority(request: pb.GenerateRequest | pb.ChatRequest | pb.EmbedRequest) -> int | None:
    """Of those that wait, lower goes first; None: it names none. Raises RequestError."""
    if not 0 <= request.priority <= MAX_PRIORITY:
        raise RequestError(
            f"priority must be between 0 and {MAX_PRIORITY}, not {request.priority}",
            param="priority",
        )
    return request.priority if request.HasField("priority") else None


def bad_words(message: pb.SamplingParams) -> tuple[str, ...]:
    return few(message.bad_words, MAX_BAD_WORD_STRINGS)


def few(values: Iterable[T], most: int) -> tuple[T, ...]:
    """At most one more than are allowed, for the core to refuse.

    An empty element takes two bytes of a message, so a small one may hold millions.
    """
    return tuple(islice(values, most + 1))


def flag(message: Any, name: str, default: bool) -> bool:
    """A field that may be absent."""
    return bool(getattr(message, name)) if message.HasField(name) else default


def _shape(message: pb.SamplingParams) -> StructuredSpec | None:
    name = message.WhichOneof("structured")
    if name is None or (name == "json_object" and not message.json_object):
        return None
    if name == "choice":
        return choice(list(message.choice.values), param=name)
    text = "" if name == "json_object" else getattr(message, name)
    return StructuredSpec(StructuredKind(name), text, param=name)


def _toolset(request: pb.ChatRequest) -> Toolset | None:
    """The tools that the model may call; None: it gets none."""
    wanted = request.tool_choice
    only = wanted.function if wanted.WhichOneof("choice") == "function" else None
    must_call = only is not None or wanted.mode == pb.TOOL_CHOICE_MODE_REQUIRED
    if not request.tools:
        if must_call:
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return None
    if wanted.mode not in pb.ToolChoiceMode.values():
        raise RequestError("tool_choice.mode: there is no such mode", param="tool_choice.mode")
    found = Toolset(
        tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(few(request.tools, MAX_TOOLS))),
        must_call=must_call,
        only=only,
        is_parallel=flag(request, "parallel_tool_calls", True),
    )
    try:
        found.check()
    except RequestError as refusal:  # it has OpenAI's names, in which tools lie one level deeper
        param = (refusal.param or "tools").replace("].function.", "].")
        message = refusal.message.replace("].function.", "].")
        raise RequestError(message, param=param, code=refusal.code) from None
    return None if wanted.mode == pb.TOOL_CHOICE_MODE_NONE else found


def _tool(tool: pb.Tool, where: str) -> Tool:
    parameters = None
    if tool.parameters:
        param = f"{where}.parameters"
        # Before it is read: what is too long or too deep never is.
        if (problem := json_schema(tool.parameters, param=param).problem()) is not None:
            raise RequestError(f"{param} {problem}", param=param)
        parameters = json.loads(tool.parameters)
    return Tool(tool.name, tool.description or None, parameters, is_strict=tool.strict)


def _plain(message: pb.Message, where: str) -> dict[str, Any]:
    """A message as templates take it."""
    for name, role in _ROLE_FIELDS:
        if getattr(message, name) and message.role != role:
            raise RequestError(f"{where}.{name} is for role {role!r}", param=f"{where}.{name}")
    if len(message.tool_calls) > MAX_CALLS:
        raise RequestError(
            f"{where}.tool_calls has at most {MAX_CALLS} entries", param=f"{where}.tool_calls"
        )
    rest = {"name": message.name, "tool_call_id": message.tool_call_id}
    rest["reasoning_content"] = message.reasoning
    calls = [_called(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    given = {name: value for name, value in (*rest.items(), ("tool_calls", calls)) if value}
    return {"role": message.role, "content": message.content, **given}


def _called(call: pb.ToolCall, where: str) -> dict[str, Any]:
    """A call that an earlier answer made: to templates, its arguments are data."""
    if not call.name:
        raise RequestError(
            f"{where}.name is required", param=f"{where}.name", code="missing_parameter"
        )
    return earlier_call(call.id, call.name, call.arguments, f"{where}.arguments")


MAX_ANSWER_BYTES = 4 * MAX_BODY_BYTES  # of one message
# At most, beside its spelling: a token in a list of scores, and one in a list of ids.
SCORE_BYTES, ID_BYTES = 40, 5
AnswerT = TypeVar("AnswerT", pb.GenerateResponse, pb.ChatResponse)

_FINISH = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
_PHASES = [field.name for field in pb.Timings.DESCRIPTOR.fields]


def answer_message(kind: type[AnswerT], choice: int, piece: TextDelta) -> AnswerT:
    """All of `piece` but its usage, which is that of the whole call."""
    answer = kind(text=piece.text, token_ids=piece.token_ids, choice=choice)
    if piece.logprobs:
        answer.logprobs.extend(map(_logprob, piece.logprobs))
    if piece.prompt_logprobs:
        answer.prompt_logprobs.extend(map(_logprob, piece.prompt_logprobs))
    if piece.reasoning:
        assert isinstance(answer, pb.ChatResponse), "only conversations have it apart"
        answer.reasoning = piece.reasoning
    if piece.tool_calls:
        assert isinstance(answer, pb.ChatResponse), "only conversations have tools"
        for call in piece.tool_calls:
            answer.tool_calls.add(
                index=call.index,
                id=call.call_id or "",
                name=call.name or "",
                arguments=call.arguments,
            )
    if piece.finish_reason is not None:
        ends_in_calls = piece.ends_in_tool_calls
        reason = pb.FINISH_REASON_TOOL_CALLS if ends_in_calls else _FINISH[piece.finish_reason]
        answer.finish_reason = reason
    return answer


def bare_end(piece: TextDelta) -> TextDelta:
    """The end that `piece` is, without what it adds to the answer."""
    return replace(
        piece,
        text="",
        token_ids=[],
        logprobs=[],
        prompt_logprobs=None,
        reasoning="",
        tool_calls=[],
    )


def check_sendable(
    request: pb.GenerateRequest | pb.ChatRequest, generation: Generation, tokenizer: Tokenizer
) -> None:
    """Raise RequestError if the first message of an answer, which has all about the prompt, may be
    longer than MAX_ANSWER_BYTES: else it would fail after all the work."""
    size = most_prompt_bytes(request, generation, tokenizer)
    if size > MAX_ANSWER_BYTES:
        name = "prompt_logprobs" if generation.call.params.prompt_logprobs is not None else "echo"
        raise RequestError(
            f"{name}: what is returned of this prompt may take {size} bytes, and a gRPC message "
            f"{MAX_ANSWER_BYTES}: ask for fewer alternatives, send the prompt in parts, or use the "
            "HTTP API",
            param=name,
        )


def most_prompt_bytes(
    request: pb.GenerateRequest | pb.ChatRequest, generation: Generation, tokenizer: Tokenizer
) -> int:
    """Most bytes of an answer's first message that are about the prompt."""
    params, options = generation.call.params, generation.call.options
    ids, num_scores = generation.request.prompt_ids, generation.num_prompt_scores
    num_lists = (params.prompt_logprobs is not None) + (
        options.echo and params.logprobs is not None
    )
    num_others = max(0, num_scores - len(ids))  # tokens that are named beside the prompt's own
    size = num_lists * (num_scores * SCORE_BYTES + num_others * tokenizer.max_token_bytes)
    if request.return_prompt_token_ids:
        size += len(ids) * ID_BYTES
    if num_spelt := num_lists + options.echo:
        size += num_spelt * sum(len(tokenizer.token_bytes(token_id)) for token_id in ids)
    return size


def usage_message(usages: Sequence[TokenUsage]) -> pb.Usage:
    """What all answers of a call used."""
    total = TokenUsage.total(usages)
    message = pb.Usage(
        prompt_tokens=total.prompt_tokens,
        completion_tokens=total.completion_tokens,
        cached_tokens=total.cached_tokens,
        evicted_tokens=total.evicted_tokens,
        reasoning_tokens=total.reasoning_tokens,
        moe_mode=total.moe_mode,
        neurons=total.neurons,
        skipped_neurons=total.skipped_neurons,
        draft_tokens=total.draft_tokens,
        accepted_draft_tokens=total.accepted_draft_tokens,
    )
    timings = [usage.timings for usage in usages if usage.timings is not None]
    if timings:
        message.timings.SetInParent()
    for name in _PHASES:
        known = [seconds for each in timings if (seconds := getattr(each, name)) is not None]
        if known:
            setattr(message.timings, name, round(max(known), 6))
    return message


def _logprob(score: DecodedLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=score.token_id,
        logprob=score.logprob,
        token=score.token_bytes,
        rank=score.rank,
        top=[
            pb.TopLogprob(token_id=each.token_id, logprob=each.logprob, token=each.token_bytes)
            for each in score.top
        ],
    )
