"""The tools of the Responses API as functions: functions, custom tools, and namespaces of both.

A model calls functions only. What else a client may give is one for it, under a name that is the
model's alone: a custom tool, which takes free text, is a function with one string, and a function
of a namespace bears the name of both. Calls go back as the tool that the client gave.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import pydantic_core
from pydantic import Field

from penstock.deployments.ingress.core.tools import MAX_TOOLS, Tool
from penstock.deployments.ingress.http.body import Strict, validated_at
from penstock.deployments.ingress.http.ignored_fields import IgnoredFields
from penstock.workers.request import RequestError

_IGNORED = frozenset(("cache_control", "defer_loading", "allowed_callers"))
_TEXT = "input"  # the argument that holds the text of a custom tool


class FunctionTool(Strict):
    """A function that the caller would run."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of the arguments")
    strict: bool | None = Field(None, description="refuse keywords that cannot be enforced")


class CustomTool(Strict):
    """A tool that takes text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: dict[str, Any] | None = Field(
        None, description="of the text: a grammar is told to the model, and not enforced"
    )


class NamespaceTool(Strict):
    """Functions of one origin, such as an MCP server."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[FunctionTool]


ResponseTool = FunctionTool | CustomTool | NamespaceTool
_KINDS: dict[str, type[Strict]] = {
    "function": FunctionTool,
    "custom": CustomTool,
    "namespace": NamespaceTool,
}


@dataclass(frozen=True, slots=True)
class Origin:
    """The tool of the client that a function of the model stands for."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    def call(self, call_id: str, arguments: str) -> dict[str, Any]:
        """The fields of a call's item beside its id, type and status."""
        if self.is_custom:
            return {"call_id": call_id, "name": self.name, "input": text_of(arguments)}
        place = {} if self.namespace is None else {"namespace": self.namespace}
        return {"call_id": call_id, "name": self.name, **place, "arguments": arguments}


def name_in(namespace: str | None, name: str) -> str:
    """What the model calls a function of a namespace; None: of none."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def functions_of(tools: Iterable[ResponseTool]) -> tuple[tuple[Tool, ...], dict[str, Origin]]:
    """The functions that the model may call, and by name what each of them stands for.

    Raises RequestError for more than there may be.
    """
    functions: list[Tool] = []
    origins: dict[str, Origin] = {}
    for each in tools:
        if isinstance(each, CustomTool):
            functions.append(_function_for_text(each))
            origins[each.name] = Origin(each.name, is_custom=True)
            continue
        namespace = each.name if isinstance(each, NamespaceTool) else None
        for tool in each.tools if isinstance(each, NamespaceTool) else (each,):
            name = name_in(namespace, tool.name)
            strict = bool(tool.strict)
            functions.append(Tool(name, tool.description, tool.parameters, is_strict=strict))
            origins[name] = Origin(tool.name, namespace)
    if len(functions) > MAX_TOOLS:
        raise RequestError(f"tools takes at most {MAX_TOOLS} functions", param="tools")
    return tuple(functions), origins


def _function_for_text(tool: CustomTool) -> Tool:
    told = [tool.description] if tool.description else []
    form = tool.format or {}
    if form.get("type") == "grammar" and isinstance(form.get("definition"), str):
        told.append(f"The text follows this grammar ({form.get('syntax')}):\n{form['definition']}")
    parameters = {
        "type": "object",
        "properties": {_TEXT: {"type": "string", "description": "the text that the tool takes"}},
        "required": [_TEXT],
        "additionalProperties": False,
    }
    return Tool(tool.name, "\n\n".join(told) or None, parameters, is_strict=False)


def arguments_of(text: str) -> str:
    """The arguments of the function for a custom tool, as JSON."""
    return json.dumps({_TEXT: text}, ensure_ascii=False)


def text_of(arguments: str) -> str:
    """The text in arguments, of which the end may be missing."""
    try:
        given = pydantic_core.from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = given.get(_TEXT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else ""


def known_tools(tools: list[Any], left_out: IgnoredFields) -> list[Any]:
    """Those that a client runs. Raises RequestError for others, unless `left_out` takes them."""
    known = []
    for i, tool in enumerate(tools):
        path, kind = f"tools[{i}]", tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in _KINDS:
            message = f"{path}: this server takes tools of type {', '.join(map(repr, _KINDS))} only"
            left_out.drop(f"tools.{kind}", message, param=path)
        elif isinstance(kind, str):
            known.append(_known_tool(path, kind, tool, left_out))
        else:
            known.append(validated_at(path, FunctionTool, tool) if isinstance(tool, dict) else tool)
    return known


def _known_tool(path: str, kind: str, tool: dict[str, Any], left_out: IgnoredFields) -> Any:
    kept = {name: value for name, value in tool.items() if name not in _IGNORED}
    if kind == "namespace" and isinstance(inner := kept.get("tools"), list):
        if len(inner) > MAX_TOOLS:
            raise RequestError(f"{path}.tools takes at most {MAX_TOOLS} tools", param=path)
        kept["tools"] = [
            validated_at(f"{path}.tools[{k}]", FunctionTool, _without_ignored(each), left_out)
            for k, each in enumerate(inner)
            if not _is_hosted(f"{path}.tools[{k}]", each, left_out)
        ]
    form = kept.get("format")
    if kind == "custom" and isinstance(form, dict) and form.get("type") != "text":
        left_out.add("tools.custom.format")
    return validated_at(path, _KINDS[kind], kept, left_out)


def _without_ignored(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        return {}
    return {name: value for name, value in tool.items() if name not in _IGNORED}


def _is_hosted(path: str, tool: Any, left_out: IgnoredFields) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or kind == "function":
        return False
    message = f"{path}: a namespace holds tools of type 'function' only"
    left_out.drop(f"tools.namespace.{kind}", message, param=path)
    return True
