"""Which workers are likely to have a prompt's beginning in their caches, by where its like went.

A prompt is known by hashes of its first 32, 64, 128... tokens, so that two prompts with a common
beginning share the first few. A guess, and bounded: workers evict what they like, and nobody asks
them; what a worker was sent since then tells when it has probably forgotten. Knows nothing of
admission, load or gRPC.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

SHORTEST = 32  # tokens of the first mark; each further one is of twice as many
MAX_MARKS = 10  # of a prompt: the last is of 16,384 tokens

Place = TypeVar("Place", bound=Hashable)


def prefix_marks(token_ids: Sequence[int]) -> tuple[int, ...]:
    """64-bit hashes of the first 32, 64, 128... tokens, as far as there are so many.

    Some 10 us for 1,000 tokens. 2^32 different prompts would be needed for one to be mistaken for
    another, which would send it to a worker that is no worse than others.
    """
    marks: list[int] = []
    hashed, done, length = hashlib.blake2b(digest_size=8), 0, SHORTEST
    while length <= len(token_ids) and len(marks) < MAX_MARKS:
        hashed.update(array("q", token_ids[done:length]).tobytes())
        marks.append(int.from_bytes(hashed.copy().digest(), "little"))
        done, length = length, 2 * length
    return tuple(marks)


class PrefixAffinity(Generic[Place]):
    """Where prompts went of late. At most `max_entries` marks, with `MAX_PLACES` each."""

    MAX_PLACES = 4

    def __init__(self, max_entries: int = 65_536) -> None:
        self._max_entries = max_entries
        # By mark: places, the newest last, and until which count of tokens sent there it holds.
        self._places: OrderedDict[int, dict[Place, int]] = OrderedDict()
        self._sent: dict[Place, int] = {}

    def note(self, marks: Sequence[int], place: Place, tokens: int, capacity: int) -> None:
        """A prompt with these marks went there: `tokens` with its answer, of `capacity` in all."""
        sent = self._sent[place] = self._sent.get(place, 0) + tokens
        for mark in marks:
            places = self._places.setdefault(mark, {})
            places.pop(place, None)
            places[place] = sent + capacity
            if len(places) > PrefixAffinity.MAX_PLACES:
                del places[next(iter(places))]
            self._places.move_to_end(mark)
        while len(self._places) > self._max_entries:
            self._places.popitem(last=False)

    def hits(self, marks: Sequence[int]) -> dict[Place, int]:
        """By place: how many of the first tokens it probably has."""
        found: dict[Place, int] = {}
        for i, mark in enumerate(marks):
            for place, until in self._places.get(mark, {}).items():
                if self._sent.get(place, until + 1) <= until:
                    found[place] = SHORTEST << i
        return found

    def forget(self, place: Place) -> None:
        """Its cache is gone, and no later life of it has the same name."""
        self._sent.pop(place, None)
