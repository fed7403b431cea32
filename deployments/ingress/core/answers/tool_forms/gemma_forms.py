"""The form of FunctionGemma and Gemma 4: `call:NAME{key:value,…}`, with marks around strings."""

from __future__ import annotations

import json
import re
from typing import Any

from penstock.deployments.ingress.core.answers.tool_forms.form_parser import FormParser, Reading

MAX_DEPTH = 32  # of objects and lists within each other

_CALL = re.compile(r"\s*+call:([A-Za-z0-9_.-]++)\s*+(?=\{)")
_BARE = re.compile(r"[^,{}\[\]:]*+")
_SPACE = re.compile(r"\s*+")


class GemmaParser(FormParser):
    """One answer. A call is read when it is complete."""

    opener = "<start_function_call>"
    closer = "<end_function_call>"
    quote = "<escape>"

    def _read(self) -> Reading[None]:
        while (yield from self._text_until((self.opener,))) is not None:
            block = yield from self._up_to(self.closer)
            call = self._call_in(self._held[: self._pos] if block is None else block)
            if call is None:
                self._unread(self.opener)
            else:
                self._begin(*call)

    def _call_in(self, block: str) -> tuple[str, str] | None:
        head = _CALL.match(block)
        if head is None or head[1] not in self._names:
            return None
        try:
            value, end = _Values(block, self.quote).value(head.end(), MAX_DEPTH)
        except ValueError:
            return None
        if block[end:].strip():
            return None
        return head[1], json.dumps(value, ensure_ascii=False)


class Gemma4Parser(GemmaParser):
    opener, closer, quote = "<|tool_call>", "<tool_call|>", '<|"|>'


class _Values:
    """Reads values in a text. Each method takes an index, and returns a value and where it ends.

    Raises ValueError.
    """

    def __init__(self, text: str, quote: str):
        self._text, self._quote = text, quote

    def value(self, at: int, num_left: int) -> tuple[Any, int]:
        at = self._space(at)
        if self._text.startswith(self._quote, at) or self._text.startswith('"', at):
            return self._string(at)
        if num_left == 0:
            raise ValueError("it nests too deep")
        if self._text.startswith("{", at):
            return self._object(at + 1, num_left - 1)
        if self._text.startswith("[", at):
            return self._list(at + 1, num_left - 1)
        bare, at = self._bare(at)
        try:
            return json.loads(bare, parse_constant=str), at
        except ValueError:
            return bare, at

    def _object(self, at: int, num_left: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        at = self._space(at)
        while not self._text.startswith("}", at):
            if self._text.startswith((self._quote, '"'), at):
                key, at = self._string(at)
            else:
                key, at = self._bare(at)
            found[key], at = self.value(self._after(":", self._space(at)), num_left)
            at = self._between("}", at)
        return found, at + 1

    def _list(self, at: int, num_left: int) -> tuple[list[Any], int]:
        found = []
        at = self._space(at)
        while not self._text.startswith("]", at):
            item, at = self.value(at, num_left)
            found.append(item)
            at = self._between("]", at)
        return found, at + 1

    def _between(self, end: str, at: int) -> int:
        """Past a comma, or at the end of an object or a list."""
        at = self._space(at)
        return at if self._text.startswith(end, at) else self._space(self._after(",", at))

    def _string(self, at: int) -> tuple[str, int]:
        if self._text.startswith(self._quote, at):
            begin = at + len(self._quote)
            end = self._text.index(self._quote, begin)
            return self._text[begin:end], end + len(self._quote)
        value, end = json.JSONDecoder().raw_decode(self._text, at)
        return value, end

    def _bare(self, at: int) -> tuple[str, int]:
        match = _BARE.match(self._text, at)
        if match is None or not match[0].strip():
            raise ValueError("a name or a value is missing")
        return match[0].strip(), match.end()

    def _after(self, text: str, at: int) -> int:
        if not self._text.startswith(text, at):
            raise ValueError(f"{text} is missing")
        return at + len(text)

    def _space(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        return at if match is None else match.end()
