"""Where a text's newest tokens occurred before, by chains of hashes: on the CPU, natively.

A text is a ring of int32 ids in arrays that the caller owns; an id below 0 separates texts. Work is
bounded: a search looks at 8 places and 32 tokens of each, then at two, and to add a token takes
constant time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu import native
from penstock.kernels.cpu.arguments import INDEX_TEXT, MATCH_TEXT

Ids = NDArray[np.int32]
DEPTH = 32  # tokens before a place that are compared at most
GRAM = 3  # tokens of a long match, at least: the longest is found; of one or two, the newest


@dataclass(frozen=True, slots=True, eq=False)
class TextArrays:
    """The memory of an indexed text of up to `capacity` tokens, a power of two: position p is at
    p % capacity. `heads` and `short_heads`, zeroed, have an entry for each hash."""

    tokens: Ids  # [capacity]
    heads: Ids
    before: Ids  # [capacity]
    short_heads: Ids  # [2 * capacity]
    fields: tuple[int, ...]  # of these arrays, as the native functions take them

    @classmethod
    def of(cls, capacity: int) -> TextArrays:
        assert capacity & (capacity - 1) == 0 and capacity >= 2
        sizes = (capacity, capacity, capacity, 2 * capacity)
        tokens, heads, before, short_heads = (np.zeros(size, np.int32) for size in sizes)
        arrays = (tokens, heads, before, short_heads)
        fields = (*(each.ctypes.data for each in arrays), capacity, capacity.bit_length() - 1)
        return cls(tokens, heads, before, short_heads, fields)

    @property
    def num_bytes(self) -> int:
        arrays = (self.tokens, self.heads, self.before, self.short_heads)
        return sum(each.nbytes for each in arrays)


def is_available() -> bool:
    """Whether the native library is there."""
    return native.bound.library is not None


def index_text(text: TextArrays, begin: int, end: int) -> None:
    """Add positions [begin, end), whose tokens are in place; all before are indexed already, and
    `end` is below 2**31."""
    assert 0 <= begin <= end < 2**31 and end - begin <= len(text.tokens)
    native.bound.library.pk_index_text(INDEX_TEXT.pack(*text.fields, begin, end))


def match_text(
    text: TextArrays, end: int, newest: Ids, most: int, *, is_own: bool
) -> tuple[int, list[int]]:
    """How many of the tokens before some place in [0, end) are the last of `newest` (0 to
    32), and up to `most` tokens after it.

    The longest match; of several, one before the most frequent next token; then the newest. Of
    matches of one or two tokens the newest of two, or else of one; its hash may have lost it.
    `is_own`: `newest` is the end of the text itself, which is continued as it repeats itself.
    """
    assert newest.flags.c_contiguous and newest.dtype == np.int32 and most > 0
    out, found = np.empty(most, np.int32), np.empty(2, np.int64)
    native.bound.library.pk_match_text(MATCH_TEXT.pack(
        *text.fields, end, newest.ctypes.data, len(newest), is_own, out.ctypes.data, most,
        found.ctypes.data,
    ))  # fmt: skip
    length, num = found.tolist()
    return length, out[:num].tolist()
