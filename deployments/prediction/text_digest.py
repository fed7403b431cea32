"""A digest of a prompt's text for the length predictor: hashes of words and a few numbers.

Made at the ingress, where the text is. Only the digest is sent: the prompt cannot be read back from
32-bit hashes of words and word pairs, and it has 1-2 kB however long the prompt is.
"""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_TOKENS = 64  # read from the prompt's beginning, and from its end
_CHARS = 2048  # of either end: the regular expressions never see more

_WORD = re.compile(r"\w+|[^\w\s]")
_COUNT = re.compile(
    r"(\d{1,5})\s+(?:\w+\s+)?(?:words?|sentences?|items?|paragraphs?|pages?|lines?|examples?|ideas?"
    r"|points?|questions?|steps?|ways?|tips?|names?|titles?)\b"
)
_LONG = re.compile(
    r"\b(?:write|essay|story|article|blog|code|script|program|create|generate|plan|list|explain"
    r"|describe|guide|tutorial|implement|develop|detailed|outline|table)\b"
)
_SHORT = re.compile(
    r"\b(?:translate|fix|summari[sz]e|correct|rephrase|short|brief|yes|no|answer|classify|one|only"
    r"|name|title)\b"
)
_SYMBOL = re.compile(r"[{};=]")
_WHAT = ("what", "who", "when", "where", "is ", "are ", "can ", "does", "do ")
_MAKE = ("write", "create", "make", "generate")

FACTS = (
    *("ends_with_question", "log_newlines", "code_fence", "digit_share", "non_ascii_share"),
    *("log_asked_count", "asks_count", "log_long_words", "asks_long", "asks_short"),
    *("log_symbols", "opens_what", "opens_how", "opens_make"),
)


@dataclass(frozen=True, slots=True)
class TextDigest:
    """One prompt: `keys` are little-endian uint32 hashes, `facts` the numbers named in FACTS."""

    keys: bytes
    facts: tuple[float, ...] | None = None  # None: only token ids were at hand

    def hashes(self) -> NDArray[np.uint32]:
        return np.frombuffer(self.keys, "<u4")


def digest_text(text: str) -> TextDigest:
    """The digest of a prompt's text: best the last user message, without the chat template."""
    start = text[:_CHARS].lower()
    head = _WORD.findall(start)
    tail = head if len(text) <= _CHARS else _WORD.findall(text[-_CHARS:].lower())
    return TextDigest(_pack(head, tail, ""), _facts(text, start))


def digest_ids(token_ids: Sequence[int], tokenizer: str) -> TextDigest:
    """The digest of a prompt known by token ids alone, which mean something per tokenizer."""
    head = [str(token) for token in token_ids[:NUM_TOKENS]]
    tail = [str(token) for token in token_ids[-NUM_TOKENS:]]
    return TextDigest(_pack(head, tail, tokenizer))


def _pack(head: Sequence[str], tail: Sequence[str], salt: str) -> bytes:
    head, tail = head[:NUM_TOKENS], tail[-NUM_TOKENS:]
    names = {*head, *_pairs(head)}
    if tail != head:  # a short prompt has its end in its beginning
        names.update(tail, _pairs(tail))
    names.update(f"^{n} {' '.join(head[:n])}" for n in (1, 2, 3))
    names.add(f"$ {' '.join(tail[-2:])}")
    start = zlib.crc32(salt.encode())
    hashes = sorted({zlib.crc32(name.encode(), start) for name in names})
    return np.array(hashes, "<u4").tobytes()


def _pairs(words: Sequence[str]) -> Iterable[str]:
    return (f"{one} {two}" for one, two in itertools.pairwise(words))


def _facts(text: str, start: str) -> tuple[float, ...]:
    """In the order of FACTS. `start` is the text's beginning in lower case."""
    seen = text if len(text) <= 2 * _CHARS else text[:_CHARS] + text[-_CHARS:]
    size = max(len(seen), 1)
    count = _COUNT.search(start)
    num_long = len(_LONG.findall(start))
    return (
        float(seen.rstrip().endswith("?")),
        math.log1p(seen.count("\n")),
        float("```" in seen),
        sum(map(seen.count, "0123456789")) / size,
        (size - len(seen.encode("ascii", "ignore"))) / size if seen else 0.0,
        math.log1p(int(count[1])) if count else 0.0,
        float(count is not None),
        math.log1p(num_long),
        float(num_long > 0),
        float(_SHORT.search(start) is not None),
        math.log1p(len(_SYMBOL.findall(seen))),
        float(start.startswith(_WHAT)),
        float(start.startswith(("how", "why"))),
        float(start.startswith(_MAKE)),
    )
