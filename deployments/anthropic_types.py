"""Anthropic's Messages API: its requests as Calls, its answers and its stream events.

Knows nothing of HTTP, and makes no decision that the request core makes for all front ends.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field

from penstock.deployments.bodies import Strict, json_object, known_only, validated
from penstock.deployments.calls import ChatPrompt, TextDelta, Usage
from penstock.deployments.dialects import server_sent
from penstock.workers.request import FinishReason, RequestError, SamplingParams

IGNORED = frozenset(("metadata", "service_tier", "inference_geo", "cache_control"))
_NO_THINKING = (None, {"type": "disabled"})
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tools", "mcp_servers"), (None, [])),
    "tool_choice": (None, {"type": "none"}, {"type": "auto"}),
    "thinking": _NO_THINKING,
    **dict.fromkeys(("container", "context_management", "diagnostics"), (None,)),
    **dict.fromkeys(("output_config", "output_format"), (None, {})),
    "speed": (None, "standard"),
}
IGNORED_IN_BLOCKS = frozenset(("cache_control", "citations"))


class TextBlock(Strict):
    type: Literal["text"]
    text: str

    @classmethod
    def known(cls, block: Any, path: str) -> Any:
        """`block` without what may be ignored. Raises RequestError for kinds but text."""
        if not isinstance(block, dict):
            return block
        if isinstance(kind := block.get("type"), str) and kind != "text":
            raise RequestError(
                f"{path}: this server takes blocks of type 'text' only",
                param=path,
                code="unsupported_parameter",
            )
        return {name: value for name, value in block.items() if name not in IGNORED_IN_BLOCKS}


class Turn(Strict):
    role: Literal["user", "assistant"]
    content: str | list[TextBlock]


class CountTokensRequest(Strict):
    """A conversation whose tokens are to be counted."""

    model: str
    messages: list[Turn]
    system: str | list[TextBlock] | None = None

    def prompt(self) -> ChatPrompt:
        turns: list[dict[str, str]] = []
        for role, run in itertools.groupby(self.messages, key=lambda turn: turn.role):
            # Their API takes several turns of one role for one; many templates refuse them.
            turns.append({"role": role, "content": "\n\n".join(_text(t.content) for t in run)})
        ends_with_answer = bool(turns) and turns[-1]["role"] == "assistant"
        if self.system:
            turns.insert(0, {"role": "system", "content": _text(self.system)})
        return ChatPrompt(tuple(turns), add_generation_prompt=not ends_with_answer)


class MessagesRequest(CountTokensRequest):
    """A conversation to answer."""

    max_tokens: int = Field(description="most tokens of the answer")
    temperature: float | None = Field(None, description="0 is greedy; [0, 100]; default 1")
    top_p: float | None = Field(None, description="(0, 1]; default 1")
    top_k: int | None = Field(None, description="0 or -1: off, as by default")
    stop_sequences: list[str] | None = Field(None, description="up to 16 of up to 256 chars")
    stream: bool | None = Field(None, description="send server-sent events; default false")

    def prompt(self) -> ChatPrompt:
        """Raises RequestError for an answer to go on with: templates can only open a new one."""
        prompt = super().prompt()
        if not prompt.add_generation_prompt:
            raise RequestError(
                "messages: the last message must be the user's; to go on with an answer of the "
                "assistant is not supported by this server",
                param="messages",
                code="unsupported_parameter",
            )
        return prompt

    def params(self) -> SamplingParams:
        given = {
            name: value
            for name in ("temperature", "top_p")
            if (value := getattr(self, name)) is not None
        }
        return SamplingParams(
            top_k=0 if self.top_k in (None, -1) else self.top_k,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
            **given,
        )


RequestT = TypeVar("RequestT", bound=CountTokensRequest)


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """The request in a JSON body. Raises RequestError naming the first parameter that is wrong."""
    values = known_only(json_object(body), kind.model_fields, UNSUPPORTED, IGNORED)
    if isinstance(system := values.get("system"), list):
        values["system"] = _known_blocks(system, "system")
    if isinstance(messages := values.get("messages"), list):
        values["messages"] = [_known_turn(i, turn) for i, turn in enumerate(messages)]
    return validated(kind, values)


def _known_turn(index: int, turn: Any) -> Any:
    if isinstance(turn, dict) and isinstance(content := turn.get("content"), list):
        return {**turn, "content": _known_blocks(content, f"messages[{index}].content")}
    return turn


def _known_blocks(blocks: list[Any], path: str) -> list[Any]:
    return [TextBlock.known(block, f"{path}[{i}]") for i, block in enumerate(blocks)]


def _text(content: str | list[TextBlock]) -> str:
    if isinstance(content, str):
        return content
    return "".join(block.text for block in content)


# Answers


class _Answer(BaseModel):
    pass


class MessageUsage(_Answer):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageBody(_Answer):
    """An answer to a conversation."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokensCount(_Answer):
    input_tokens: int


class AnthropicErrorDetail(_Answer):
    type: str
    message: str


class AnthropicError(_Answer):
    """What every failure under /v1/messages looks like."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


class MessageShape:
    """Builds one answer, whole or as the events of a stream."""

    def __init__(self, request_id: str, model: str):
        self._head: dict[str, Any] = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    def whole(self, text: str, last: TextDelta) -> dict[str, Any]:
        assert last.usage is not None, "the last piece has the usage"
        content = [{"type": "text", "text": text}] if text else []
        return {**self._head, "content": content, **_ending(last), "usage": _usage(last.usage)}

    def opening(self, usage: Usage) -> str:
        """The events before the first text. `usage`: what is known then."""
        started = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }
        block = {"type": "text", "text": ""}
        return (
            _event("message_start", message=started)
            + _event("content_block_start", index=0, content_block=block)
            + _event("ping")
        )

    def text(self, text: str) -> str:
        delta = {"type": "text_delta", "text": text}
        return _event("content_block_delta", index=0, delta=delta)

    def closing(self, last: TextDelta) -> str:
        assert last.usage is not None, "the last piece has the usage"
        return (
            _event("content_block_stop", index=0)
            + _event("message_delta", delta=_ending(last), usage=_usage(last.usage))
            + _event("message_stop")
        )


def _event(kind: str, **body: Any) -> str:
    return server_sent({"type": kind, **body}, kind)


def _ending(last: TextDelta) -> dict[str, Any]:
    if last.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(last.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, int]:
    """Their input_tokens leaves out what came from the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
