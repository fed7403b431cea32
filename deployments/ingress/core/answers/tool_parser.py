"""Tool calls in the text of an answer, found while it streams. Linear in the text, no backtracking.

The form is that of Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any
number of them, with text around. A block that is no such call, or calls what was never offered,
stays text. Other forms are other classes with `feed` and `finish`; PARSERS has them by name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection
from enum import Enum
from typing import Any, Protocol

from penstock.deployments.ingress.core.call import TextDelta, ToolCallPiece
from penstock.deployments.ingress.core.tools import CLOSE, OPEN, Toolset
from penstock.workers.request import FinishReason

MAX_HEAD_CHARS = 512  # up to the arguments
MAX_BLOCK_CHARS = 65_536  # of a block that is read as a whole; a longer one is text

Found = tuple[str, list[ToolCallPiece]]

_HEAD = re.compile(r'\s*+\{\s*+"name"\s*+:\s*+"([^"\\]*+)"\s*+,\s*+"arguments"\s*+:\s*+(?=\{)')
_TAIL = re.compile(r"\s*+\}?\s*+")


class ToolParser(Protocol):
    """Splits one answer into text and calls. `feed` takes it in pieces, `finish` its end."""

    def feed(self, text: str) -> Found: ...
    def finish(self) -> Found: ...


class _State(Enum):
    TEXT = 0
    HEAD = 1  # within a block, before its arguments
    WHOLE = 2  # within a block that is to be read as a whole
    ARGUMENTS = 3  # they are passed on as they come
    TAIL = 4  # after the arguments, before the end of the block


class HermesParser:
    """One answer. `names`: the tools that may be called. `answer_id`: unique to the answer.

    The ids of its calls follow from `answer_id`: they are the same where a stream is continued.
    """

    def __init__(self, names: Collection[str], answer_id: str):
        self._names = names
        self._answer_id = answer_id
        self._state = _State.TEXT
        self._held = ""  # not decided yet
        self._num_calls = 0
        self._skips_space = False  # between calls, and after the last one
        self._depth = 0  # of brackets in the arguments
        self._in_string = self._is_escaped = False

    def feed(self, text: str) -> Found:
        """What `text` adds: text that is no call, and pieces of calls."""
        self._held += text
        texts: list[str] = []
        pieces: list[ToolCallPiece] = []
        step = {
            _State.TEXT: self._in_text,
            _State.HEAD: self._in_head,
            _State.WHOLE: self._in_whole,
            _State.ARGUMENTS: self._in_arguments,
            _State.TAIL: self._in_tail,
        }
        while step[self._state](texts, pieces):
            pass
        return "".join(texts), pieces

    def finish(self) -> Found:
        """The answer ends here: what was held back is decided."""
        held, self._held = self._held, ""
        texts: list[str] = []
        pieces: list[ToolCallPiece] = []
        if self._state is _State.TEXT:
            self._say(held, texts)
        elif self._state in (_State.HEAD, _State.WHOLE):
            self._whole(held, "", texts, pieces)
        return "".join(texts), pieces

    def _in_text(self, texts: list[str], _: list[ToolCallPiece]) -> bool:
        before, opening, rest = self._held.partition(OPEN)
        if opening:
            self._say(before, texts)
            self._held, self._state = rest, _State.HEAD
            return True
        num_kept = next(
            (n for n in range(len(OPEN) - 1, 0, -1) if self._held.endswith(OPEN[:n])), 0
        )
        cut = len(self._held) - num_kept
        self._say(self._held[:cut], texts)
        self._held = self._held[cut:]
        return False

    def _in_head(self, _: list[str], pieces: list[ToolCallPiece]) -> bool:
        head = _HEAD.match(self._held[:MAX_HEAD_CHARS])
        if head is not None and head[1] in self._names:
            self._begin(head[1], "", pieces)
            self._held, self._state = self._held[head.end() :], _State.ARGUMENTS
            return True
        if head is not None or len(self._held) >= MAX_HEAD_CHARS or CLOSE in self._held:
            self._state = _State.WHOLE
            return True
        return False

    def _in_whole(self, texts: list[str], pieces: list[ToolCallPiece]) -> bool:
        block, closing, rest = self._held.partition(CLOSE)
        if not closing and len(self._held) <= MAX_BLOCK_CHARS:
            return False
        self._held, self._state = rest, _State.TEXT
        self._whole(block, closing, texts, pieces)
        return True

    def _in_arguments(self, _: list[str], pieces: list[ToolCallPiece]) -> bool:
        end = self._end_of_value()
        is_over = end is not None
        passed, self._held = self._held[:end], self._held[end:] if is_over else ""
        if passed:
            pieces.append(ToolCallPiece(self._num_calls - 1, arguments=passed))
        if is_over:
            self._state = _State.TAIL
        return is_over

    def _in_tail(self, _: list[str], __: list[ToolCallPiece]) -> bool:
        tail = _TAIL.match(self._held)
        rest = self._held[tail.end() if tail else 0 :]
        if len(rest) < len(CLOSE) and CLOSE.startswith(rest):
            return False
        self._held, self._state = rest.removeprefix(CLOSE), _State.TEXT
        return True

    def _end_of_value(self) -> int | None:
        """Where the JSON value ends in what is held; None: not within it."""
        for i, char in enumerate(self._held):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return None

    def _whole(
        self, block: str, closing: str, texts: list[str], pieces: list[ToolCallPiece]
    ) -> None:
        call = _call(block)
        if call is None or call[0] not in self._names:
            self._say(OPEN + block + closing, texts)
        else:
            self._begin(*call, pieces)

    def _begin(self, name: str, arguments: str, pieces: list[ToolCallPiece]) -> None:
        unique = f"{self._answer_id}/{self._num_calls}".encode()
        call_id = f"call_{hashlib.blake2b(unique, digest_size=12).hexdigest()}"
        pieces.append(ToolCallPiece(self._num_calls, call_id, name, arguments))
        self._num_calls += 1
        self._skips_space = True

    def _say(self, text: str, texts: list[str]) -> None:
        if self._skips_space:
            text = text.lstrip()
        if text:
            self._skips_space = False
            texts.append(text)


def _call(block: str) -> tuple[str, str] | None:
    """Name and arguments of the call that a block is, if it is one."""
    try:
        call: Any = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON, as some models write it
        return call["name"], arguments
    return call["name"], json.dumps(arguments, ensure_ascii=False)


PARSERS: dict[str, Callable[[Collection[str], str], ToolParser]] = {"hermes": HermesParser}


class ToolCallReader:
    """Takes the calls out of the pieces of one answer."""

    def __init__(self, toolset: Toolset, answer_id: str, parser: str = "hermes"):
        self._parser = PARSERS[parser]([tool.name for tool in toolset.tools], answer_id)
        self._is_parallel = toolset.is_parallel
        self._has_calls = False
        self._blank: str | None = ""  # white space that all text so far is; None: it is more

    def read(self, piece: TextDelta) -> TextDelta:
        """`piece`, in which calls have become `tool_calls`. Without parallel ones: the first."""
        text, calls = self._parser.feed(piece.text)
        if piece.finish_reason is not None:
            last_text, last_calls = self._parser.finish()
            text, calls = text + last_text, calls + last_calls
        if not self._is_parallel:
            calls = [call for call in calls if call.index == 0]
        self._has_calls = self._has_calls or bool(calls)
        piece.text, piece.tool_calls = self._unless_blank(text, piece.finish_reason), calls
        piece.ends_in_tool_calls = self._has_calls and piece.finish_reason is FinishReason.STOP
        return piece

    def _unless_blank(self, text: str, finish: FinishReason | None) -> str:
        """`text`; white space waits until more follows, and goes if that is calls only."""
        if self._blank is None:
            return text
        self._blank += text
        if not self._blank.isspace() or (finish is not None and not self._has_calls):
            text, self._blank = self._blank, None if self._blank else ""
            return text
        return ""
