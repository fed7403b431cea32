"""Incremental detokenization: token ids to text while they arrive, and stop strings.

Text that was returned is final: an incomplete character, and a suffix that may still become a stop
string, are held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

MAX_BYTE_RUN = 32  # bytes of byte-fallback tokens that wait for the run to end
WINDOW = 8  # tokens of context, or held back for a character, when the decoder is unknown

Piece = Callable[[int], str | None]  # token id -> token as in the vocabulary; None: not rendered


class Detokenizer(Protocol):
    """The texts of all `feed`s and the `finish` together are the text of all ids together."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""

    def finish(self) -> str:
        """The text held back; invalid UTF-8 becomes U+FFFD. No `feed` may follow."""


class ByteLevelDetokenizer:
    """For byte-level BPE: the bytes of a token do not depend on its neighbours."""

    def __init__(self, token_bytes: Callable[[int], bytes]):
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True, slots=True)
class PieceRules:
    """The rules of a SentencePiece-like decoder.

    `replacements` apply to every token. `drop_in_first` is removed from the first token. Then
    `<0x41>` tokens become bytes if `byte_fallback`; and up to `num_strip` leading characters
    `strip` are removed from the whole text.
    """

    replacements: tuple[tuple[str, str], ...] = ()
    drop_in_first: str = ""
    byte_fallback: bool = False
    strip: str = " "
    num_strip: int = 0


class PieceDetokenizer:
    """For SentencePiece-like decoders.

    A run of byte tokens is text only if all of it is UTF-8, and one U+FFFD a byte otherwise, so it
    is held back until it ends. Beyond MAX_BYTE_RUN bytes complete characters are returned at once:
    a script that is encoded in byte tokens must stream, too. If such a run turns out invalid later,
    only the bytes not yet returned become U+FFFD.
    """

    def __init__(self, rules: PieceRules, piece: Piece, *, is_start: bool = True):
        """`is_start`: the text begins here; false if it continues another."""
        self._rules = rules
        self._piece = piece
        self._first = is_start
        self._num_strip = rules.num_strip if is_start else 0
        self._run = bytearray()  # bytes of the current run that were not returned yet
        self._num_run_bytes = 0
        self._run_is_broken = False

    def feed(self, token_ids: Iterable[int]) -> str:
        texts = []
        for token_id in token_ids:
            piece = self._piece(token_id)
            if piece is None:
                continue
            byte = _byte_of(piece) if self._rules.byte_fallback else None
            if byte is None:
                texts.append(self._end_run())
                texts.append(self._text_of(piece))
            else:
                texts.append(self._grow_run(byte))
            self._first = False
        return self._strip("".join(texts))

    def finish(self) -> str:
        return self._strip(self._end_run())

    def _text_of(self, piece: str) -> str:
        if self._first and self._rules.drop_in_first:
            piece = piece.replace(self._rules.drop_in_first, "")
        for old, new in self._rules.replacements:
            piece = piece.replace(old, new)
        return piece

    def _grow_run(self, byte: int) -> str:
        if self._run_is_broken:
            return "\ufffd"
        self._run.append(byte)
        self._num_run_bytes += 1
        try:
            text, num_bytes = codecs.utf_8_decode(self._run, "strict", False)
        except UnicodeDecodeError:
            self._run_is_broken = True
            text, num_bytes = "\ufffd" * len(self._run), len(self._run)
        if not self._run_is_broken and self._num_run_bytes < MAX_BYTE_RUN:
            return ""
        del self._run[:num_bytes]
        return text

    def _end_run(self) -> str:
        self._run_is_broken = False
        self._num_run_bytes = 0
        if not self._run:
            return ""
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _strip(self, text: str) -> str:
        while self._num_strip and text:
            if text[0] != self._rules.strip:
                self._num_strip = 0
                break
            text = text[1:]
            self._num_strip -= 1
        return text


class WindowDetokenizer:
    """For any other decoder: decodes a short window, and returns the text after its known part.

    Exact if a token's text depends only on its left neighbours within the window.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        piece: Piece,
        *,
        after: Sequence[int] = (),
    ):
        """`after`: the last tokens before these."""
        self._decode = decode
        self._piece = piece
        self._window = [token_id for token_id in after if piece(token_id) is not None]
        self._num_known = len(self._window)

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join(self._feed_one(i) for i in token_ids if self._piece(i) is not None)

    def finish(self) -> str:
        return self._take()

    def _feed_one(self, token_id: int) -> str:
        self._window.append(token_id)
        waits = self._decode(self._window).endswith("\ufffd")
        if waits and len(self._window) - self._num_known < WINDOW:
            return ""
        return self._take()

    def _take(self) -> str:
        known = self._decode(self._window[: self._num_known])
        text = self._decode(self._window)[len(known) :]
        self._window = self._window[self._num_known :] or self._window
        self._num_known = len(self._window)
        return text


def piece_rules(decoder: dict[str, Any] | None) -> PieceRules | None:
    """The rules of a decoder as tokenizer.json describes it; None if it does anything else."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["Metaspace"]:
        drops = steps[0].get("prepend_scheme", "always") != "never"
        mark = steps[0]["replacement"]
        return PieceRules(((mark, " "),), drop_in_first=mark if drops else "")
    replacements = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        replacements.append((steps[0]["pattern"]["String"], steps[0]["content"]))
        steps = steps[1:]
    byte_fallback = bool(steps) and steps[0]["type"] == "ByteFallback"
    steps = steps[byte_fallback:]
    if not steps or steps[0]["type"] != "Fuse":
        return None
    rules = PieceRules(tuple(replacements), byte_fallback=byte_fallback)
    if len(steps) == 1:
        return rules
    if len(steps) == 2 and steps[1]["type"] == "Strip" and steps[1]["stop"] == 0:
        return PieceRules(
            rules.replacements,
            byte_fallback=byte_fallback,
            strip=steps[1]["content"],
            num_strip=steps[1]["start"],
        )
    return None


def bytes_of_piece(piece: str, rules: PieceRules) -> bytes:
    """The bytes of a token inside a text."""
    byte = _byte_of(piece) if rules.byte_fallback else None
    if byte is not None:
        return bytes([byte])
    for before, after in rules.replacements:
        piece = piece.replace(before, after)
    return piece.encode()


def _byte_of(piece: str) -> int | None:
    """65 for '<0x41>'; None for any other token."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (as GPT-2 defined it)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


def bytes_of_byte_level(piece: str) -> bytes:
    """The bytes of a byte-level token; an added token outside that alphabet is plain text."""
    if all(char in _BYTE_OF for char in piece):
        return bytes(_BYTE_OF[char] for char in piece)
    return piece.encode()


class StopChecker:
    """Cuts text before the stop string that is complete first; of two, the one that began first.

    A suffix that may still become a stop string is held back, so no part of a stop string is ever
    returned, however the text is split into pieces.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._prefixes = {stop[:n] for stop in stops for n in range(1, len(stop))}
        self._max_prefix_chars = max(map(len, self._prefixes), default=0)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Text that can be returned, and the stop string once one is complete: then the text
        ends."""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, stop = min(found)
            self._held = ""
            return text[:at], stop
        longest = min(self._max_prefix_chars, len(text))
        num_held = next((n for n in range(longest, 0, -1) if text[-n:] in self._prefixes), 0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def finish(self) -> str:
        """The text that was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held
