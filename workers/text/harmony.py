"""Harmony, the form of gpt-oss's answers: messages in channels, taken apart.

An answer is a row of messages `<|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>`; the prompt
has the beginning of the first one. The channel analysis is reasoning; final, and commentary without
a recipient, are the answer. A message with a recipient (`to=functions.NAME`) is a tool call, which
stays as it was written, for a parser of tool calls.
"""

from __future__ import annotations

import re

from penstock.workers.text.reasoning import Start

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
TOKENS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
FIRST_HEADER = f"{START}assistant"  # is in the prompt
MAX_HEADER_CHARS = 512

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=\S")


def start_in(tail: str) -> Start:
    """The state of an answer to a prompt that ends with `tail`."""
    header, is_begun, _ = tail.rpartition(START)[2].partition(MESSAGE)
    if not is_begun:
        return Start.MAYBE
    return Start.INSIDE if _channel(header) == "analysis" else Start.AFTER


def _channel(header: str) -> str:
    found = _CHANNEL.search(header)
    return "" if found is None else found[1]


class HarmonyReader:
    """Splits one answer into reasoning and the rest, however the text is cut into pieces.

    Messages of one kind are joined by a line break. It holds back headers, and parts of tokens.
    Text without a header is the answer.
    """

    def __init__(self, start: Start):
        self._held = ""
        # Of the message: thought, text or call; "" before its text.
        self._kind = {Start.MAYBE: "", Start.INSIDE: "thought", Start.AFTER: "text"}[start]
        self._is_first = start is Start.MAYBE  # the header that the prompt has begun
        self._said: set[str] = set()  # kinds of the messages before
        self._joins = False  # the message has no text yet, and is not the first of its kind
        self._num_fed = self._num_out = 0
        self._is_end = False

    @property
    def is_inside(self) -> bool:
        """Whether it is within reasoning."""
        return self._kind == "thought"

    @property
    def num_taken(self) -> int:
        """Characters decided so far that are not part of the answer."""
        return self._num_fed - len(self._held) - self._num_out

    def feed(self, text: str) -> tuple[str, str]:
        """What `text` adds to the reasoning, and to the answer."""
        self._held += text
        self._num_fed += len(text)
        thoughts: list[str] = []
        texts: list[str] = []
        while self._step(thoughts, texts):
            pass
        answer = "".join(texts)
        self._num_out += len(answer)
        return "".join(thoughts), answer

    def finish(self) -> tuple[str, str]:
        """The text that was held back, at the end of the answer."""
        self._is_end = True
        return self.feed("")

    def _step(self, thoughts: list[str], texts: list[str]) -> bool:
        """Decide what is held, as far as that goes. False: more text is needed."""
        if not self._kind:
            return self._header(texts)
        found = [(at, mark) for mark in (*ENDS, START) if (at := self._held.find(mark)) >= 0]
        at, mark = min(found, default=(-1, ""))
        if not mark:
            at = len(self._held) - (0 if self._is_end else _num_begun(self._held))
        body, self._held = self._held[:at], self._held[at:]
        self._say(body, thoughts if self._kind == "thought" else texts)
        if not mark:
            return False
        if mark != START:
            self._held = self._held[len(mark) :]
            if self._kind == "call":
                texts.append(mark)
        self._kind = ""
        return True

    def _say(self, body: str, where: list[str]) -> None:
        if body:
            where.append("\n" + body if self._joins else body)
            self._joins = False
            self._said.add(self._kind)

    def _header(self, texts: list[str]) -> bool:
        starts = (CHANNEL, START, " to=", "to=") if self._is_first else (START, CHANNEL)
        begun = self._held if self._is_first else self._held.lstrip()
        is_one = begun.startswith(starts)
        at = self._held.find(MESSAGE, 0, MAX_HEADER_CHARS + len(MESSAGE))
        if is_one and at >= 0:
            header, self._held = self._held[:at], self._held[at + len(MESSAGE) :]
            self._begin(header, texts)
            return True
        may_be = is_one or any(each.startswith(begun) for each in starts)
        if may_be and not self._is_end and len(self._held) < MAX_HEADER_CHARS + len(MESSAGE):
            return False
        if may_be and self._is_end and (not begun or "<|" in begun):
            self._held = ""  # the answer ends in a header
            return False
        self._kind, self._is_first = "text", False
        return True

    def _begin(self, header: str, texts: list[str]) -> None:
        """A message with this header begins."""
        self._is_first = False
        if _RECIPIENT.search(header):
            before = "" if header.lstrip().startswith(START) else FIRST_HEADER
            texts.append(before + header + MESSAGE)
            self._kind = "call"
        else:
            self._kind = "thought" if _channel(header) == "analysis" else "text"
        self._joins = self._kind != "call" and self._kind in self._said


def _num_begun(text: str) -> int:
    """Characters at the end of `text` that may be the beginning of the end of a message."""
    marks = (*ENDS, START)
    longest = min(len(text), max(map(len, marks)) - 1)
    return next(
        (n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0
    )
