"""Forms whose calls have a tag for each argument: of Qwen3-Coder, Seed-OSS, MiniMax-M2, GLM-4.5.

The value between the tags is bare text. The schema of the tool says which type it has: text goes
out as it comes, as a piece of a JSON string; any other value when it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.deployments.ingress.core.answers.tool_forms.form_parser import (
    MAX_HEAD_CHARS,
    FormParser,
    Reading,
    num_begun,
)
from penstock.deployments.ingress.core.answers.tool_forms.values import as_json, types_of
from penstock.deployments.ingress.core.tools import Toolset


@dataclass(frozen=True, slots=True)
class Tags:
    """How a call is written. `strips_breaks`: a line break within a value's tags is none of it."""

    wrapper: str
    wrapper_end: str
    function: str  # up to the name
    name_end: str
    function_end: str
    key: str
    key_end: str
    value: str  # between key and value; "" where key_end is all
    value_end: str
    strips_breaks: bool = False


def _of_functions(wrapper: str) -> Tags:
    return Tags(
        f"<{wrapper}>",
        f"</{wrapper}>",
        *("<function=", ">", "</function>"),
        *("<parameter=", ">", "", "</parameter>"),
        strips_breaks=True,
    )


QWEN = _of_functions("tool_call")
SEED = _of_functions("seed:tool_call")
MINIMAX = Tags(
    *("<minimax:tool_call>", "</minimax:tool_call>"),
    *('<invoke name="', '">', "</invoke>"),
    *('<parameter name="', '">', "", "</parameter>"),
)
GLM = Tags(
    *("<tool_call>", "</tool_call>", "", "", "</tool_call>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)


class TaggedParser(FormParser):
    """One answer of a form that `tags` describes."""

    def __init__(self, tags: Tags, toolset: Toolset, answer_id: str):
        super().__init__([tool.name for tool in toolset.tools], answer_id)
        self._tags = tags
        self._schemas = {tool.name: tool.parameters or {} for tool in toolset.tools}
        self._ends = tuple(dict.fromkeys((tags.key, tags.function_end, tags.wrapper_end)))

    def _read(self) -> Reading[None]:
        tags = self._tags
        # A function without its wrapper is a call, too.
        openers = tuple(text for text in (tags.wrapper, tags.function) if text)
        while (opener := (yield from self._text_until(openers))) is not None:
            name = yield from self._function(opener)
            if name not in self._names:
                self._unread(opener)
                continue
            yield from self._space()
            tag = yield from self._literal(*self._ends)
            if tag is None:
                self._unread(opener)
                continue
            self._begin(name)
            yield from self._arguments(self._schemas[name], tag)
            yield from self._space()
            yield from self._literal(tags.wrapper_end)
            self._drop()

    def _function(self, opener: str) -> Reading[str]:
        """The name of what is called; "": there is none."""
        tags = self._tags
        if opener == tags.wrapper:
            yield from self._space()
            if tags.function and (yield from self._literal(tags.function)) is None:
                return ""
        if not tags.name_end:
            return (yield from self._name())
        return (yield from self._up_to(tags.name_end, MAX_HEAD_CHARS)) or ""

    def _arguments(self, schema: Mapping[str, Any], tag: str | None) -> Reading[None]:
        """All arguments of a call; `tag` is the one before the first. What is between arguments,
        and belongs to none, is text."""
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        before = "{"
        while tag == self._tags.key:
            key = yield from self._key()
            if key is None:
                self._unread(self._tags.key)
            else:
                self._add(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
                self._drop()
                before = ", "
                if not (yield from self._value_of(types_of(properties.get(key), schema))):
                    return
            tag = yield from self._text_until(self._ends)
        self._add("{}" if before == "{" else "}")

    def _key(self) -> Reading[str | None]:
        """The name of an argument, up to its value; None: it is not written as it should be."""
        key = yield from self._up_to(self._tags.key_end, MAX_HEAD_CHARS)
        if key is None or not self._tags.value:
            return key
        yield from self._space()
        return None if (yield from self._literal(self._tags.value)) is None else key.strip()

    def _value_of(self, types: tuple[str, ...]) -> Reading[bool]:
        """A value and its closing tag. False: the answer ends within it."""
        if self._tags.strips_breaks:
            yield from self._literal("\n")
            self._drop()
        if types == ("string",):
            return (yield from self._string())
        raw = yield from self._up_to(self._tags.value_end)
        if raw is None and self._is_end:
            self._add(self._held[: self._pos])
            self._drop()
            return False
        if raw is None:
            raw = self._held[: self._pos]
        self._add(as_json(raw.removesuffix("\n") if self._tags.strips_breaks else raw, types))
        self._drop()
        return True

    def _string(self) -> Reading[bool]:
        """Text, which goes out as it comes."""
        end = self._tags.value_end
        marks = (end, f"\n{end}") if self._tags.strips_breaks else (end,)
        self._add('"')
        while True:
            at = self._held.find(end)
            if at >= 0:
                value = self._held[:at]
                self._add(_escaped(value.removesuffix("\n") if len(marks) > 1 else value) + '"')
                self._pos = at + len(end)
                self._drop()
                return True
            cut = len(self._held) - (0 if self._is_end else num_begun(self._held, marks))
            self._add(_escaped(self._held[:cut]))
            self._held = self._held[cut:]
            if self._is_end:
                return False
            yield


def _escaped(text: str) -> str:
    """`text` as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
