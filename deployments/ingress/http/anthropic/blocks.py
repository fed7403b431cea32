"""The content of Anthropic's messages: blocks, and the turns they make for chat templates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from penstock.deployments.ingress.http.body import Strict, validated_at
from penstock.deployments.ingress.http.ignored_fields import IgnoredFields
from penstock.workers.request import RequestError

_IGNORED = frozenset(("cache_control", "citations", "caller"))
_BETWEEN_TURNS = "\n\n"
# What tools of their server leave in a conversation, beside web_search_tool_result and the like.
_OF_SERVER_TOOLS = frozenset(("server_tool_use", "tool_reference", "mcp_tool_use", "search_result"))
_PICTURES = frozenset(("image", "document"))


class TextBlock(Strict):
    type: Literal["text"]
    text: str


class ToolUseBlock(Strict):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Strict):
    """What came of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = Field(None, description="whether the call failed; the model reads it")


class ThinkingBlock(Strict):
    """The assistant's reasoning."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="ignored")


class RedactedThinkingBlock(Strict):
    """Ignored."""

    type: Literal["redacted_thinking"]
    data: str


UserBlock = TextBlock | ToolResultBlock
AssistantBlock = TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock
_OF_ROLE: dict[str, dict[str, type[Strict]]] = {
    "system": {"text": TextBlock},
    "result": {"text": TextBlock},  # the content of a tool_result
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {
        "text": TextBlock,
        "tool_use": ToolUseBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
    },
}


class UserTurn(Strict):
    role: Literal["user"]
    content: str | list[UserBlock]


class AssistantTurn(Strict):
    role: Literal["assistant"]
    content: str | list[AssistantBlock]


class SystemTurn(Strict):
    """Instructions within the conversation."""

    role: Literal["system"]
    content: str | list[TextBlock]


Turn = UserTurn | AssistantTurn | SystemTurn
_TURNS: dict[str, type[Strict]] = {
    "user": UserTurn,
    "assistant": AssistantTurn,
    "system": SystemTurn,
}


def known_turn(index: int, turn: Any, left_out: IgnoredFields) -> Any:
    """The turn without what is ignored. Raises RequestError naming what is wrong."""
    path = f"messages[{index}]"
    if not isinstance(turn, dict):
        return turn
    role = turn.get("role")
    if not isinstance(role, str) or role not in _TURNS:
        raise RequestError(f"{path}.role must be one of {', '.join(_TURNS)}", param=f"{path}.role")
    if isinstance(content := turn.get("content"), list):
        turn = {**turn, "content": known_blocks(content, f"{path}.content", role, left_out)}
    return validated_at(path, _TURNS[role], turn, left_out)


def known_blocks(blocks: Sequence[Any], path: str, role: str, left_out: IgnoredFields) -> list[Any]:
    """The blocks of a message of `role`. Raises RequestError for kinds that it may not have."""
    known = (_known(block, f"{path}[{i}]", role, left_out) for i, block in enumerate(blocks))
    return [block for block in known if block is not None]


def _known(block: Any, path: str, role: str, left_out: IgnoredFields) -> Any:
    """None: the block is left out."""
    if not isinstance(block, dict):
        return {} if block is None else block
    kind, kinds = block.get("type"), _OF_ROLE[role]
    if isinstance(kind, str) and kind not in kinds:
        if left_out.ignores_unknown and role == "result" and kind in _PICTURES:
            left_out.add(f"{path}.{kind}")
            return TextBlock(type="text", text=f"[{kind} left out: this model reads text only]")
        if left_out.ignores_unknown and (kind in _OF_SERVER_TOOLS or kind.endswith("_tool_result")):
            left_out.add(f"{path}.{kind}")
            return None
        raise RequestError(
            f"{path}: this server takes blocks of type {', '.join(map(repr, kinds))} here",
            param=path,
            code="unsupported_parameter",
        )
    kept = {name: value for name, value in block.items() if name not in _IGNORED}
    if kind == "tool_result" and isinstance(content := kept.get("content"), list):
        kept["content"] = known_blocks(content, f"{path}.content", "result", left_out)
    model = kinds[kind] if isinstance(kind, str) else TextBlock
    return validated_at(path, model, kept, left_out)


def messages_of(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Messages for a template. Their API takes several turns of one role for one; many templates
    refuse them. Results of calls are messages of their own."""
    messages: list[dict[str, Any]] = []
    for role, run in itertools.groupby(turns, key=lambda turn: turn.role):
        contents = [turn.content for turn in run]
        messages += [_answer(contents)] if role == "assistant" else _told(contents)
    return messages


def without_system_turns(turns: Sequence[Turn]) -> tuple[list[str], list[Turn]]:
    """The texts of system turns at the begin, and the conversation after them.

    Many templates take system messages at the begin only: later ones become words of the user, in
    marks that say what they are.
    """
    num_first = next(
        (i for i, turn in enumerate(turns) if not isinstance(turn, SystemTurn)), len(turns)
    )
    first = [text_of(turn.content) for turn in turns[:num_first]]
    return first, [
        UserTurn(role="user", content=f"<system>\n{text_of(turn.content)}\n</system>")
        if isinstance(turn, SystemTurn)
        else turn
        for turn in turns[num_first:]
    ]


def text_of(content: str | Sequence[Any]) -> str:
    if isinstance(content, str):
        return content
    return "".join(block.text for block in content if isinstance(block, TextBlock))


def _answer(contents: Sequence[str | Sequence[Any]]) -> dict[str, Any]:
    blocks = [block for content in contents if not isinstance(content, str) for block in content]
    texts = [text for content in contents if (text := text_of(content))]
    calls = [
        {"id": b.id, "type": "function", "function": {"name": b.name, "arguments": b.input}}
        for b in blocks
        if isinstance(b, ToolUseBlock)
    ]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    rest = {"tool_calls": calls, "reasoning_content": _BETWEEN_TURNS.join(thoughts)}
    message = {"role": "assistant", "content": _BETWEEN_TURNS.join(texts)}
    return message | {name: value for name, value in rest.items() if value}


def _told(contents: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """What the user said, and what came of calls, in order."""
    texts: list[str] = []
    for content in contents:
        text = content if isinstance(content, str) else ""
        for block in () if isinstance(content, str) else content:
            if isinstance(block, TextBlock):
                text += block.text
                continue
            texts += [text] if text else []
            if texts:
                yield {"role": "user", "content": _BETWEEN_TURNS.join(texts)}
                texts, text = [], ""
            result = text_of(block.content or "")
            if block.is_error:
                result = f"Error: {result}"
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
        has_results = not isinstance(content, str) and any(
            isinstance(block, ToolResultBlock) for block in content
        )
        if text or not has_results:
            texts.append(text)
    if texts:
        yield {"role": "user", "content": _BETWEEN_TURNS.join(texts)}
