"""What the proxy changes in the bodies of coding agents, so that a small model can answer them.

Their prompts are long, and their own: texts are left out before the server sees them. No small
model calls a tool of theirs by itself, so the first request asks for one call with fixed arguments.
The server answers in its own form, the agent reads it, runs the tool and sends the result.
"""

from __future__ import annotations

import json
from typing import Any

MAX_CHARS = 60  # of a text
MAX_DESCRIPTION_CHARS = 8  # of what describes a tool or an argument
MAX_TOOLS_OF_A_KIND = 2


def shortened(value: Any, longest: int = MAX_CHARS) -> Any:
    """The value with words in place of its long texts, which say how long these were."""
    if isinstance(value, dict):
        return {
            name: shortened(part, MAX_DESCRIPTION_CHARS if name == "description" else longest)
            for name, part in value.items()
        }
    if isinstance(value, list):
        return [shortened(part, longest) for part in value]
    if isinstance(value, str) and len(value) > longest:
        return f"{len(value)} characters"
    return value


def fewer_tools(body: Any, kept_name: str) -> Any:
    """The body with one tool, and of each further kind of tool the first MAX_TOOLS_OF_A_KIND."""
    tools: list[dict[str, Any]] = []
    for tool in body.get("tools", ()):
        same = [each for each in tools if each.get("type") == tool.get("type")]
        if tool.get("name") == kept_name or len(same) < MAX_TOOLS_OF_A_KIND:
            few = {"tools": tool["tools"][:1]} if "tools" in tool else {}  # of a namespace
            tools.append(tool | few)
    return body | {"tools": tools} if tools else body


class ForcedCall:
    """Asks for one call of a tool in the first request that has it; cuts all requests."""

    def __init__(self, tool: str, arguments: dict[str, Any]):
        self._tool = tool
        self._arguments = arguments
        self._is_done = False

    def __call__(self, body: Any) -> Any:
        """The body for the server."""
        body = fewer_tools(shortened(body), self._tool)
        for tool in body.get("tools", ()):
            schema = "parameters" if "parameters" in tool else "input_schema"
            if not self._is_done and tool.get("name") == self._tool and schema in tool:
                self._is_done = True
                return self._forced(body, tool, schema)
        return body

    def _forced(self, body: dict[str, Any], tool: dict[str, Any], schema: str) -> dict[str, Any]:
        only = {name: {"enum": [value]} for name, value in self._arguments.items()}
        fixed = {"type": "object", "properties": only, "required": list(only)}
        changed = tool | {schema: fixed | {"additionalProperties": False}}
        kind = "tool" if schema == "input_schema" else "function"
        choice = {"type": kind, "name": self._tool}
        # A model that thinks cannot be forced, in the messages API.
        kept = {name: part for name, part in body.items() if name != "thinking"}
        return kept | {"tools": [changed], "tool_choice": choice}


def forced_call(text: str) -> ForcedCall:
    """Of `NAME {"argument": "value"}`, as the command line gives it."""
    name, _, arguments = text.partition(" ")
    return ForcedCall(name, json.loads(arguments or "{}"))
