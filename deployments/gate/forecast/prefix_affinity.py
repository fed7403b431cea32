"""Which workers probably have a prompt's prefix cached, from where similar prompts were sent.

A prompt is known by hashes of its first 32, 64, 128... tokens, so that two prompts with a common
prefix share the first few. A bounded guess: workers evict on their own, and the tokens sent to a
worker since then tell when it has probably evicted the prefix.

Owner of the decision: the gate's Placement, whenever the gate decides (tickets). WorkerPool at the
ingress keeps a second table of what it sent itself, and decides with it only when the gate does not
choose: the order of workers for admission credits, and placement without the gate. The two tables
may differ, because each sees other requests; neither is sent to the other.
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


def prefix_marks(token_ids: Sequence[int], domain: bytes = b"") -> tuple[int, ...]:
    """64-bit hashes of the first 32, 64, 128... tokens, up to the prompt's length.

    Prompts of different `domain`s have no mark in common: their blocks are not shared either.

    Some 10 us for 1,000 tokens. Collisions are expected only among 2^32 different prompts, and
    would send a prompt to a worker that is no worse than others.
    """
    marks: list[int] = []
    hashed, done, length = hashlib.blake2b(digest_size=8, key=domain), 0, SHORTEST
    while length <= len(token_ids) and len(marks) < MAX_MARKS:
        hashed.update(array("q", token_ids[done:length]).tobytes())
        marks.append(int.from_bytes(hashed.copy().digest(), "little"))
        done, length = length, 2 * length
    return tuple(marks)


class PrefixAffinity(Generic[Place]):
    """Where prompts were sent recently: `max_entries` marks with `MAX_PLACES` each at most."""

    MAX_PLACES = 4

    def __init__(self, max_entries: int = 65_536) -> None:
        self._max_entries = max_entries
        # By mark: places, the newest last, and the count of sent tokens until which each holds.
        self._places: OrderedDict[int, dict[Place, int]] = OrderedDict()
        self._sent: dict[Place, int] = {}

    def note(self, marks: Sequence[int], place: Place, tokens: int, capacity: int) -> None:
        """A prompt was sent there: `tokens` with its answer, of `capacity` in its cache."""
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
        """By place: how many of the first tokens it probably has cached."""
        found: dict[Place, int] = {}
        for i, mark in enumerate(marks):
            for place, until in self._places.get(mark, {}).items():
                if self._sent.get(place, until + 1) <= until:
                    found[place] = SHORTEST << i
        return found

    def forget(self, place: Place) -> None:
        """Its cache is gone; a later epoch of the worker has another name."""
        self._sent.pop(place, None)
