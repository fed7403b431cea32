"""Tools that a model may call: their checks, the grammar of calls, and how a prompt shows them.

Independent of any one API's bodies; answers/tool_forms reads the calls of an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.workers.request import RequestError
from penstock.workers.structured_spec import (
    MAX_SPEC_BYTES,
    StructuredKind,
    StructuredSpec,
    json_in_grammar,
    json_schema,
)

MAX_TOOLS = 128
MAX_SCHEMA_CHARS = 256 << 10  # of the arguments of all tools together, to look through at once
OPEN, CLOSE = "<tool_call>", "</tool_call>"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Tool:
    """A function that the caller would run. `parameters`: a JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False

    def as_json(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters or {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Toolset:
    """The tools of one conversation.

    With `must_call` the answer is one or more calls and nothing else; `only` is the one tool that
    they may be of. Unless `is_parallel` there is one call at most.
    """

    tools: tuple[Tool, ...]
    must_call: bool = False
    only: str | None = None
    is_parallel: bool = True

    def check(self, *, within: str = "function.", schema: str = "parameters") -> None:
        """Raise RequestError naming the tool at fault, as one API calls its fields.

        `within`: where in a tool they are; `schema`: which of them is that of the arguments.
        """
        if not 1 <= len(self.tools) <= MAX_TOOLS:
            raise RequestError(f"tools has 1 to {MAX_TOOLS} entries", param="tools")
        names = [tool.name for tool in self.tools]
        params = [f"tools[{i}].{within}{schema}" for i in range(len(self.tools))]
        shapes = [
            json_schema(tool.as_json()["function"]["parameters"], param=param)
            for tool, param in zip(self.tools, params)
        ]
        # One that is too long by itself is refused by its own name, and not looked through.
        lengths = (len(shape.text) for shape in shapes)
        if sum(each for each in lengths if each <= MAX_SPEC_BYTES) > MAX_SCHEMA_CHARS:
            raise RequestError(
                f"tools: their schemas have together at most {MAX_SCHEMA_CHARS} characters",
                param="tools",
            )
        for i, tool in enumerate(self.tools):
            if _NAME.fullmatch(tool.name) is None:
                raise RequestError(
                    f"tools[{i}].{within}name has 1 to 64 of A-Z a-z 0-9 _ -",
                    param=f"tools[{i}].{within}name",
                )
            if names.index(tool.name) != i:
                raise RequestError(
                    f"tools[{i}]: there is another one of that name", param=f"tools[{i}]"
                )
            if (problem := shapes[i].problem()) is not None:
                raise RequestError(f"{params[i]} {problem}", param=params[i])
            try:
                (tool.description or "").encode()
            except UnicodeEncodeError:
                raise RequestError(
                    f"tools[{i}].{within}description holds half a surrogate pair",
                    param=f"tools[{i}].{within}description",
                ) from None
        if self.only is not None and self.only not in names:
            raise RequestError("tool_choice names none of the tools", param="tool_choice")

    def spec(self) -> StructuredSpec | None:
        """The grammar of an answer that must call a tool, in the form of Hermes; None: the answer
        is free."""
        if not self.must_call:
            return None
        return call_grammar(
            self,
            f'"{OPEN}\\n" call "\\n{CLOSE}"',
            f'"\\n{OPEN}\\n" call "\\n{CLOSE}"',
            lambda tool: [json.dumps(f'{{"name": "{tool.name}", "arguments": '), None, '"}"'],
        )

    @property
    def num_chars(self) -> int:
        """Characters that the tools add to the prompt, roughly."""
        return sum(len(json.dumps(tool.as_json())) for tool in self.tools)


def call_grammar(
    toolset: Toolset,
    first: str,
    more: str | None,
    parts: Callable[[Tool], list[str | None]],
    end: str = "",
) -> StructuredSpec:
    """The grammar of an answer that is calls and nothing else.

    `first`: the rule of the first call, in which `call` stands for name and arguments; `more`: of
    each further one; None: there is one call. `end`: what follows them all. `parts`: of the call of
    a tool, in order; None: its arguments.
    """
    tools = [tool for tool in toolset.tools if toolset.only in (None, tool.name)]
    is_single = toolset.only is not None or not toolset.is_parallel or more is None
    rule = " ".join([first, *([] if is_single else [f"({more})*"]), *([end] if end else [])])
    lines = [f"start: {rule}", "call: " + " | ".join(f"call{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        schema = tool.as_json()["function"]["parameters"]
        schema["x-guidance"] = {"lenient": not tool.is_strict, "whitespace_flexible": False}
        schema["x-guidance"] |= {"item_separator": ", ", "key_separator": ": "}
        body = " ".join(f"arguments{i}" if part is None else part for part in parts(tool))
        lines += [f"call{i}: {body}", f"arguments{i}: %json {json_in_grammar(schema)}"]
    return StructuredSpec(StructuredKind.GRAMMAR, "\n".join(lines), param="tools")


def toolset_of(
    tools: tuple[Tool, ...],
    *,
    mode: str | None,
    only: str | None,
    is_parallel: bool,
    within: str = "function.",
    schema: str = "parameters",
) -> Toolset | None:
    """The tools that the model may call; None: it gets none. Raises RequestError.

    `mode`: auto, none or required; None: auto, or, with `only`, required. For the words see
    `Toolset.check`.
    """
    must_call = only is not None or mode == "required"
    if not tools:
        if must_call:
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return None
    found = Toolset(tools, must_call=must_call, only=only, is_parallel=is_parallel)
    found.check(within=within, schema=schema)
    return None if mode == "none" else found


def as_plain_messages(
    messages: Sequence[Mapping[str, Any]], toolset: Toolset | None
) -> list[Mapping[str, Any]]:
    """A conversation for a template that knows neither tools nor tool messages.

    The tools are described in the first system message, calls are written into the text in the
    form that they are read back from, and results come as a user's words.
    """
    plain = [_as_plain(message) for message in messages]
    if toolset is None:
        return plain
    first = plain[0] if plain and plain[0]["role"] == "system" else None
    before = "" if first is None else f"{first['content']}\n\n"
    system = {"role": "system", "content": before + describe(toolset)}
    return [system, *(plain if first is None else plain[1:])]


def describe(toolset: Toolset) -> str:
    """The tools as prompt text, in the words that Hermes and Qwen models were trained with."""
    shown = "\n".join(json.dumps(tool.as_json(), ensure_ascii=False) for tool in toolset.tools)
    if toolset.only is not None:
        duty = f"You must call the function {toolset.only}."
    else:
        duty = "You must call a function." if toolset.must_call else "You may call functions."
    return (
        f"# Tools\n\n{duty} Their signatures are within <tools></tools>:\n"
        f"<tools>\n{shown}\n</tools>\n\n"
        f"For each call give a JSON object with name and arguments within {OPEN}{CLOSE}:\n"
        f'{OPEN}\n{{"name": <function-name>, "arguments": <arguments-object>}}\n{CLOSE}'
    )


def _as_plain(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
        }
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message["content"].rstrip("\n")] if message["content"] else []
    for call in calls:
        body = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        texts.append(f"{OPEN}\n{json.dumps(body, ensure_ascii=False)}\n{CLOSE}")
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(texts)}


def only_one(given: list[StructuredSpec], param: str) -> StructuredSpec | None:
    """The one that is there. Raises RequestError if there are several."""
    if len(given) > 1:
        names = " and ".join(each.param for each in given[:2])
        raise RequestError(f"{names} exclude each other; send one", param=param)
    return given[0] if given else None
