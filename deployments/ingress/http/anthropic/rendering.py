"""Anthropic's answers: whole messages, the events of a stream, and their schema."""

from __future__ import annotations

from typing import Any, Literal

import pydantic_core
from pydantic import BaseModel

from penstock.deployments.ingress.core.call import TextDelta, TokenUsage, ToolCallPiece
from penstock.workers.request import FinishReason


class MessageUsage(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextAnswer(BaseModel):
    type: Literal["text"]
    text: str


class ThinkingAnswer(BaseModel):
    """The reasoning of the model; the signature is empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseAnswer(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageBody(BaseModel):
    """An answer to a conversation."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextAnswer | ThinkingAnswer | ToolUseAnswer]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokensCount(BaseModel):
    input_tokens: int


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    """What every failure under /v1/messages looks like."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


Event = dict[str, Any]  # with its `type`

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessageRenderer:
    """Builds one answer: `add` takes its pieces, and gives the events of a stream; in the end
    `whole` has all of it."""

    def __init__(self, request_id: str, model: str, *, hides_thinking: bool = False):
        self._hides_thinking = hides_thinking
        self._head: dict[str, Any] = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []  # of each block
        self._is_begun = self._is_open = False

    def whole(self, last: TextDelta) -> dict[str, Any]:
        assert last.usage is not None, "the last piece has the usage"
        blocks = [_filled(block, "".join(t)) for block, t in zip(self._blocks, self._texts)]
        return {**self._head, "content": blocks, **_ending(last), "usage": _usage(last.usage)}

    def add(self, piece: TextDelta, usage: TokenUsage) -> list[Event]:
        """The events that tell of `piece`. `usage`: what is known of it so far."""
        events = [] if self._is_begun else self._begin(usage)
        if piece.reasoning and not self._hides_thinking:
            events += self._say("thinking", piece.reasoning)
        if piece.text:
            events += self._say("text", piece.text)
        for call in piece.tool_calls:
            if call.name is not None:
                events += self._open(_tool_use(call))
            if call.arguments:
                events += self._grow(call.arguments)
        if piece.finish_reason is not None:
            assert piece.usage is not None, "the last piece has the usage"
            events += self._close()
            ending, usage = _ending(piece), piece.usage
            events += [_event("message_delta", delta=ending, usage=_usage(usage))]
            events += [_event("message_stop")]
        return events

    def _begin(self, usage: TokenUsage) -> list[Event]:
        self._is_begun = True
        ending = {"stop_reason": None, "stop_sequence": None}
        started = {**self._head, "content": [], **ending, "usage": _usage(usage)}
        return [_event("message_start", message=started)]

    def _say(self, kind: str, text: str) -> list[Event]:
        events = []
        if not self._is_open or self._blocks[-1]["type"] != kind:
            events = self._open(_empty(kind))
        return events + self._grow(text)

    def _open(self, block: dict[str, Any]) -> list[Event]:
        events = self._close()
        self._is_open = True
        self._blocks.append(block)
        self._texts.append([])
        index = len(self._blocks) - 1
        events.append(_event("content_block_start", index=index, content_block=block))
        return events if index else [*events, _event("ping")]

    def _grow(self, text: str) -> list[Event]:
        self._texts[-1].append(text)
        kind, name = _DELTAS[self._blocks[-1]["type"]]
        return [self._delta({"type": kind, name: text})]

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        events = []
        if self._blocks[-1]["type"] == "thinking":
            events = [self._delta({"type": "signature_delta", "signature": ""})]
        return [*events, _event("content_block_stop", index=len(self._blocks) - 1)]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)


def _empty(kind: str) -> dict[str, Any]:
    if kind == "thinking":
        return {"type": kind, "thinking": "", "signature": ""}
    return {"type": kind, "text": ""}


def _tool_use(call: ToolCallPiece) -> dict[str, Any]:
    call_id = f"toolu_{(call.call_id or '').removeprefix('call_')}"
    return {"type": "tool_use", "id": call_id, "name": call.name, "input": {}}


def _filled(block: dict[str, Any], text: str) -> dict[str, Any]:
    if block["type"] != "tool_use":
        return {**block, block["type"]: text}
    # Of a call that was cut off, what there is.
    given = pydantic_core.from_json(text or "{}", allow_partial=True)
    return {**block, "input": given if isinstance(given, dict) else {}}


def _event(kind: str, **body: Any) -> Event:
    return {"type": kind, **body}


def _ending(last: TextDelta) -> dict[str, Any]:
    if last.ends_in_tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if last.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(last.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(usage: TokenUsage) -> dict[str, int]:
    """Their input_tokens leaves out what came from the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
