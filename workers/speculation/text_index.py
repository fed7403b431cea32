"""A growing text in which the last occurrence of its newest tokens is found in constant time."""

from __future__ import annotations

from array import array

import numpy as np

from penstock.kernels.text_match import DEPTH, TextArrays, index_text, match_text

FIRST_CAPACITY = 1024
LAST_POSITION = 1 << 30  # positions are 32-bit numbers: then the text is forgotten
SEPARATOR = -1  # no token: nothing is matched or continued across it


class TextIndex:
    """The newest `capacity` tokens of a text. Its memory grows with the text: 20 bytes a token."""

    def __init__(self, capacity: int, first_capacity: int = FIRST_CAPACITY):
        """Both in tokens, powers of two."""
        self._most = capacity
        self._arrays = TextArrays.of(min(capacity, first_capacity))
        self.num_tokens = 0  # since the beginning

    @property
    def num_bytes(self) -> int:
        return self._arrays.num_bytes

    def extend(self, token_ids: array[int], begin: int = 0) -> None:
        """Append `token_ids[begin:]`."""
        added = np.array(token_ids[max(begin, len(token_ids) - self._most) :], dtype=np.int32)
        while len(self._arrays.tokens) < min(self._most, self.num_tokens + len(added)):
            self._double()
        if self.num_tokens + len(added) > LAST_POSITION:
            self._arrays, self.num_tokens = TextArrays.of(len(self._arrays.tokens)), 0
        capacity, end = len(self._arrays.tokens), self.num_tokens + len(added)
        at = self.num_tokens % capacity
        num_first = min(len(added), capacity - at)
        self._arrays.tokens[at : at + num_first] = added[:num_first]
        self._arrays.tokens[: len(added) - num_first] = added[num_first:]
        index_text(self._arrays, self.num_tokens, end)
        self.num_tokens = end

    def find(
        self, token_ids: array[int], most: int, *, is_own: bool = False
    ) -> tuple[int, list[int]]:
        """How many tokens at the end of `token_ids` occurred in this text, and up to `most`
        tokens that followed. `is_own`: they are the text's own end."""
        if not token_ids:
            return 0, []
        newest = np.array(token_ids[-DEPTH:], dtype=np.int32)
        return match_text(self._arrays, self.num_tokens, newest, most, is_own=is_own)

    def _double(self) -> None:
        """Twice the capacity. Nothing has been overwritten yet."""
        old = self._arrays.tokens
        self._arrays = TextArrays.of(2 * len(old))
        self._arrays.tokens[: len(old)] = old
        index_text(self._arrays, 0, self.num_tokens)
