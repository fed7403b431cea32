"""What the parsers of all forms share: text and calls out of an answer, however it is cut.

A parser is one generator, `_read`, that goes through the answer once. It waits with `yield` where
it needs more text to decide; what it decides does not depend on how the text was cut. It holds
back the beginning of a mark, and a block that is not yet known to be a call.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Generator
from typing import Protocol, TypeVar

from penstock.deployments.ingress.core.call import ToolCallPiece

MAX_HEAD_CHARS = 512  # up to the arguments
MAX_BLOCK_CHARS = 65_536  # of a block that is read as a whole; a longer one is text

T = TypeVar("T")
Found = tuple[str, list[ToolCallPiece]]
Reading = Generator[None, None, T]  # waits for text, and returns what it has read

HEAD = re.compile(
    r'\s*+\{\s*+"name"\s*+:\s*+"([^"\\]*+)"\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
)
_NAME = re.compile(r"[A-Za-z0-9_.-]*+")


class ToolParser(Protocol):
    """Splits one answer into text and calls. `feed` takes it in pieces, `finish` its end.

    `num_unread`: blocks that look like calls and came back as text.
    """

    num_unread: int

    def feed(self, text: str) -> Found: ...
    def finish(self) -> Found: ...


class JsonScan:
    """Finds the end of a JSON object or list that comes in pieces. `depth`: of open brackets."""

    def __init__(self, depth: int = 0):
        self._depth = depth
        self._in_string = self._is_escaped = False

    def end(self, text: str, start: int = 0) -> int | None:
        """The index after the value in `text`, of which it has seen all before `start`."""
        for i in range(start, len(text)):
            char = text[i]
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
                if self._depth <= 0:
                    return i + 1
        return None


class FormParser:
    """One answer. `names`: the tools that may be called. `answer_id`: unique to the answer.

    The ids of its calls follow from `answer_id`: they are the same where a stream is continued.
    """

    def __init__(self, names: Collection[str], answer_id: str):
        self.num_unread = 0
        self._names = names
        self._answer_id = answer_id
        self._held = ""  # not decided yet
        self._pos = 0  # in what is held: read, and not yet decided
        self._is_end = False
        self._texts: list[str] = []
        self._pieces: list[ToolCallPiece] = []
        self._num_calls = 0
        self._skips_space = False  # between calls, and after the last one
        self._reading = self._read()

    def feed(self, text: str) -> Found:
        """What `text` adds: text that is no call, and pieces of calls."""
        self._held += text
        next(self._reading, None)
        return self._found()

    def finish(self) -> Found:
        """The answer ends here: what was held back is decided."""
        self._is_end = True
        next(self._reading, None)
        return self._found()

    def _read(self) -> Reading[None]:
        """Goes through the answer; subclasses say how. Ends only at the end of the answer."""
        raise NotImplementedError

    def _found(self) -> Found:
        text, pieces = "".join(self._texts), self._pieces
        self._texts, self._pieces = [], []
        return text, pieces

    # What is decided

    def _say(self, text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
        if text:
            self._skips_space = False
            self._texts.append(text)

    def _begin(self, name: str, arguments: str = "") -> None:
        """The next call begins; what was read up to here belongs to it."""
        unique = f"{self._answer_id}/{self._num_calls}".encode()
        call_id = f"call_{hashlib.blake2b(unique, digest_size=12).hexdigest()}"
        self._pieces.append(ToolCallPiece(self._num_calls, call_id, name, arguments))
        self._num_calls += 1
        self._skips_space = True
        self._drop()

    def _add(self, arguments: str) -> None:
        if arguments:
            self._pieces.append(ToolCallPiece(self._num_calls - 1, arguments=arguments))

    def _drop(self) -> None:
        """What was read is decided."""
        self._held, self._pos = self._held[self._pos :], 0

    def _unread(self, opener: str = "") -> None:
        """What was read since the last decision, and `opener` before it, is text after all."""
        self.num_unread += 1
        self._say(opener + self._held[: self._pos])
        self._drop()

    # What is read

    def _text_until(self, openers: tuple[str, ...]) -> Reading[str | None]:
        """Text up to the first of `openers`, which is taken; None: there is none any more."""
        while True:
            found = [(at, opener) for opener in openers if (at := self._held.find(opener)) >= 0]
            if found:
                at, opener = min(found)
                self._say(self._held[:at])
                self._held, self._pos = self._held[at + len(opener) :], 0
                return opener
            kept = 0 if self._is_end else num_begun(self._held, openers)
            cut = len(self._held) - kept
            self._say(self._held[:cut])
            self._held, self._pos = self._held[cut:], 0
            if self._is_end:
                return None
            yield

    def _space(self) -> Reading[None]:
        """White space, as much as there is."""
        while True:
            rest = self._held[self._pos : self._pos + MAX_HEAD_CHARS]
            kept = rest.lstrip()
            self._pos += len(rest) - len(kept)
            if kept or self._is_end or len(rest) == MAX_HEAD_CHARS:
                return
            yield

    def _literal(self, *texts: str) -> Reading[str | None]:
        """The one of `texts` that comes next; None: none of them does, and nothing is read."""
        while True:
            for text in texts:
                if self._held.startswith(text, self._pos):
                    self._pos += len(text)
                    return text
            rest = self._held[self._pos :]
            if self._is_end or not any(text.startswith(rest) for text in texts):
                return None
            yield

    def _name(self) -> Reading[str]:
        """A name, up to what cannot be part of one; "" for one that is too long."""
        while True:
            match = _NAME.match(self._held, self._pos)
            assert match is not None, "the pattern matches the empty text"
            is_over = match.end() < len(self._held)
            if is_over or self._is_end or len(match[0]) > MAX_HEAD_CHARS:
                self._pos = match.end()
                return match[0] if len(match[0]) <= MAX_HEAD_CHARS else ""
            yield

    def _up_to(self, end: str, most: int = MAX_BLOCK_CHARS) -> Reading[str | None]:
        """The text before `end`, which is taken, too; None: it does not come, or not in `most`
        characters, and what there is has been read."""
        begin = looked = self._pos
        while True:
            at = self._held.find(end, looked)
            if at >= 0 and at - begin <= most:
                self._pos = at + len(end)
                return self._held[begin:at]
            if self._is_end or len(self._held) - begin > most + len(end):
                self._pos = min(len(self._held), begin + most)
                return None
            looked = max(begin, len(self._held) - len(end) + 1)
            yield

    def _value(self) -> Reading[str | None]:
        """A JSON object or list as a whole; None: it does not end, and what there is has been
        read."""
        begin, scan = self._pos, JsonScan()
        seen = begin
        while True:
            end = scan.end(self._held, seen)
            if end is not None and end - begin <= MAX_BLOCK_CHARS:
                self._pos = end
                return self._held[begin:end]
            if self._is_end or len(self._held) - begin > MAX_BLOCK_CHARS:
                self._pos = min(len(self._held), begin + MAX_BLOCK_CHARS)
                return None
            seen = len(self._held)
            yield

    # Calls in JSON

    def _head(self, is_over: Callable[[], bool]) -> Reading[str | None]:
        """The name of an offered tool at the head of a JSON call, up to its arguments.

        None: there is no such head, and nothing is read. `is_over`: whether no more of it comes.
        """
        while True:
            head = HEAD.match(self._held, self._pos, self._pos + MAX_HEAD_CHARS)
            if head is not None:
                if head[1] not in self._names:
                    return None
                self._pos = head.end()
                return head[1]
            is_long = len(self._held) - self._pos >= MAX_HEAD_CHARS
            if is_long or self._is_end or is_over():
                return None
            yield

    def _pass_arguments(self) -> Reading[None]:
        """A JSON object, which goes out as it comes. All before it is decided."""
        self._drop()
        scan = JsonScan()
        while True:
            end = scan.end(self._held)
            self._add(self._held[:end])
            self._held = "" if end is None else self._held[end:]
            if end is not None or self._is_end:
                return
            yield

    def _json_call(self) -> Reading[bool]:
        """A call as a JSON object of name and arguments. False: what was read is none."""
        name = yield from self._head(lambda: JsonScan().end(self._held, self._pos) is not None)
        if name is not None:
            self._begin(name)
            yield from self._pass_arguments()
            yield from self._rest_of_object()
            return True
        block = yield from self._value()
        call = None if block is None else call_in(block)
        if call is None or call[0] not in self._names:
            return False
        self._begin(*call)
        return True

    def _rest_of_object(self) -> Reading[None]:
        """What follows the arguments in the object of a call, such as its id: it is left out."""
        yield from self._space()
        if (yield from self._literal("}", ",")) == ",":
            scan, seen = JsonScan(depth=1), self._pos
            while True:
                end = scan.end(self._held, seen)
                if end is not None and end <= MAX_HEAD_CHARS:
                    self._pos = end
                    break
                if self._is_end or len(self._held) > MAX_HEAD_CHARS:
                    self._pos = 0  # it is no object: all of it is text
                    break
                seen = len(self._held)
                yield
        self._drop()


def num_begun(text: str, marks: tuple[str, ...]) -> int:
    """Characters at the end of `text` that may be the beginning of one of `marks`."""
    longest = min(len(text), max(map(len, marks)) - 1)
    return next(
        (n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0
    )


def call_in(block: str) -> tuple[str, str] | None:
    """Name and arguments of the call that a JSON text is, if it is one."""
    try:
        call = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON, as some models write it
        return call["name"], arguments
    return call["name"], json.dumps(arguments, ensure_ascii=False)
