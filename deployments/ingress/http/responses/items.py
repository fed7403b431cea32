"""The items of OpenAI's Responses API as messages for chat templates, and messages as items."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from penstock.deployments.ingress.core.call import earlier_call
from penstock.deployments.ingress.http.body import Strict, validated_at
from penstock.deployments.ingress.http.ignored_fields import IgnoredFields
from penstock.deployments.ingress.http.responses.tools import arguments_of, name_in
from penstock.workers.request import RequestError

Message = Mapping[str, Any]

_IGNORED = frozenset(("id", "status", "phase"))
_IGNORED_IN_PARTS = frozenset(("annotations", "logprobs"))


class InputPart(Strict):
    type: Literal["input_text", "output_text"]
    text: str


class InputItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]


class FunctionCallItem(Strict):
    """A call that an earlier answer made, sent back."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = Field(None, description="of the function")
    arguments: str = Field(description="JSON")


class FunctionOutputItem(Strict):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputPart]


class ReasoningPart(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Strict):
    """The reasoning before an answer, sent back."""

    type: Literal["reasoning"]
    summary: list[ReasoningPart] = Field(default_factory=list, description="ignored")
    content: list[ReasoningPart] | None = None
    encrypted_content: str | None = Field(None, description="ignored")


Item = InputItem | FunctionCallItem | FunctionOutputItem | ReasoningItem
_KINDS: dict[str, type[Strict]] = {
    "message": InputItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "reasoning": ReasoningItem,
}
_PARTS = ("input_text", "output_text")
# What tools of their server leave in a conversation; with their outputs, calls of fixed tools.
_OF_HOSTED_TOOLS = frozenset(
    (
        *("web_search_call", "file_search_call", "image_generation_call", "computer_call"),
        *("code_interpreter_call", "mcp_call", "mcp_list_tools", "mcp_approval_request"),
        *("mcp_approval_response", "computer_call_output", "tool_search_call"),
        *("tool_search_output", "local_shell_call", "local_shell_call_output", "shell_call"),
        *("shell_call_output", "apply_patch_call", "apply_patch_call_output"),
    )
)


def known_items(items: Sequence[Any], left_out: IgnoredFields) -> list[Any]:
    """The items, without what is ignored. Raises RequestError for what is not served."""
    known = []
    calls_left_out: set[str] = set()
    for i, item in enumerate(items):
        kind = item.get("type") if isinstance(item, dict) else None
        call_id = str(item.get("call_id")) if isinstance(item, dict) else ""
        if left_out.ignores_unknown and isinstance(kind, str) and kind in _OF_HOSTED_TOOLS:
            left_out.add(f"input.{kind}")
            calls_left_out.add(call_id)
        elif kind == "function_call_output" and call_id in calls_left_out:
            left_out.add(f"input.{kind}")  # as some clients answer a call of a fixed tool
        else:
            known.append(_known_item(f"input[{i}]", item, left_out))
    return known


def _known_item(path: str, item: Any, left_out: IgnoredFields) -> Any:
    """The item of its kind, without what is ignored. Raises RequestError, also for other kinds."""
    if not isinstance(item, dict):
        return item
    item = _as_function(path, item)
    _refuse_kinds(path, item, tuple(_KINDS), "items")
    kind = item.get("type", "message")
    kept = {name: value for name, value in item.items() if name not in _IGNORED}
    for name in ("content", "output"):
        if kind != "reasoning" and isinstance(parts := kept.get(name), list):
            kept[name] = [
                _known_part(f"{path}.{name}[{i}]", each, left_out) for i, each in enumerate(parts)
            ]
    left_out.add(f"{path}.encrypted_content", kept.get("encrypted_content"))
    model = _KINDS[kind] if isinstance(kind, str) else InputItem
    return validated_at(path, model, kept, left_out)


def messages_of(items: Sequence[Item], before: Iterable[Message] = ()) -> list[Message]:
    """Items as messages: what the assistant thought, said and called in a row is one of them.

    `before`: the conversation that they go on from. Raises RequestError for arguments of a call
    that are no JSON, and for an output of a call that is not there.
    """
    messages: list[Message] = []
    called = {call["id"] for message in before for call in message.get("tool_calls") or ()}
    turn: dict[str, Any] | None = None  # of the assistant, which goes on
    for i, item in enumerate(items):
        if isinstance(item, FunctionCallItem):
            called.add(item.call_id)
        elif isinstance(item, FunctionOutputItem) and item.call_id not in called:
            shown = ascii(item.call_id[:100])[1:-1]
            raise RequestError(  # begins as OpenAI's message does
                f"No tool call found for function call output with call_id {shown}: the call comes "
                "before its output, in input or in the response of previous_response_id",
                param="input",
            )
        is_own = isinstance(item, FunctionCallItem | ReasoningItem)
        if not is_own and not (isinstance(item, InputItem) and item.role == "assistant"):
            turn = None
            messages.append(_told(item))
            continue
        # A message, or reasoning, after a call begins the next turn.
        if turn is None or not _goes_on(turn, item):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        if isinstance(item, InputItem):
            turn["content"] = _text(item.content)
        elif isinstance(item, FunctionCallItem):
            turn.setdefault("tool_calls", []).append(_call(item, f"input[{i}].arguments"))
        elif isinstance(item, ReasoningItem) and item.content:
            turn["reasoning_content"] = "".join(part.text for part in item.content)
    return messages


def items_of(messages: Iterable[Message], response_id: str) -> list[dict[str, Any]]:
    """Messages as items, each with an id of its own."""
    items: list[dict[str, Any]] = []

    def add(prefix: str, **fields: Any) -> None:
        items.append(
            {"id": f"{prefix}_{response_id}_{len(items)}", "status": "completed", **fields}
        )

    for message in messages:
        role, text = message["role"], message["content"]
        if role == "tool":
            call_id = message["tool_call_id"]
            add("fco", type="function_call_output", call_id=call_id, output=text)
            continue
        if thought := message.get("reasoning_content"):
            parts = [{"type": "reasoning_text", "text": thought}]
            add("rs", type="reasoning", summary=[], content=parts)
        calls = message.get("tool_calls") or ()
        if text or not calls:
            part: dict[str, Any] = {"type": "input_text", "text": text}
            if role == "assistant":
                part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
            add("msg", type="message", role=role, content=[part])
        for call in calls:
            called = call["function"]
            arguments = json.dumps(called["arguments"], ensure_ascii=False)
            named = {"call_id": call["id"], "name": called["name"], "arguments": arguments}
            add("fc", type="function_call", **named)
    return items


def _goes_on(turn: Mapping[str, Any], item: Item) -> bool:
    if isinstance(item, FunctionCallItem):
        return True
    begun = turn["content"] or "tool_calls" in turn
    return not (begun or (isinstance(item, ReasoningItem) and "reasoning_content" in turn))


def _told(item: Item) -> Message:
    """What is not the assistant's own."""
    if isinstance(item, FunctionOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
    assert isinstance(item, InputItem)
    return {"role": item.role, "content": _text(item.content)}


def _call(item: FunctionCallItem, path: str) -> dict[str, Any]:
    return earlier_call(item.call_id, name_in(item.namespace, item.name), item.arguments, path)


def _text(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _as_function(path: str, item: dict[str, Any]) -> dict[str, Any]:
    """A call of a custom tool as one of the function that stands for it. Raises RequestError."""
    kind = item.get("type")
    if kind == "custom_tool_call_output":
        return {**item, "type": "function_call_output"}
    if kind != "custom_tool_call":
        return item
    text = item.get("input")
    if not isinstance(text, str):
        raise RequestError(f"{path}.input must be a string", param=f"{path}.input")
    rest = {name: value for name, value in item.items() if name != "input"}
    return {**rest, "type": "function_call", "arguments": arguments_of(text)}


def _known_part(path: str, part: Any, left_out: IgnoredFields) -> Any:
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "output_text", "text": part["refusal"]}
    if left_out.ignores_unknown and ".output[" in path and kind in ("input_image", "input_file"):
        left_out.add(f"{path}.{kind}")
        noun = kind.removeprefix("input_")
        text = f"[{noun} left out: this model reads text only]"
        return {"type": "input_text", "text": text}
    _refuse_kinds(path, part, _PARTS, "parts")
    return {name: value for name, value in part.items() if name not in _IGNORED_IN_PARTS}


def _refuse_kinds(path: str, thing: dict[str, Any], known: tuple[str, ...], noun: str) -> None:
    kind = thing.get("type", known[0])
    if isinstance(kind, str) and kind not in known:
        raise RequestError(
            f"{path}: this server takes {noun} of type {', '.join(map(repr, known))} only",
            param=path,
            code="unsupported_parameter",
        )
