"""The interface of a store: six verbs, and three errors. Two implementations keep to it.

A name holds a value, a stream and a token bucket, each independent of the others. Every call has a
time budget of its caller, in seconds; a call that is over it raises StateDown, and may still have
been done: put with `expect`, append with its explicit index, and delete can be repeated safely.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Expect(enum.Enum):
    """What a put or a delete expects of the value that is there, besides a version."""

    ANY = "any"  # whatever is there, or nothing
    ABSENT = "absent"


ANY, ABSENT = Expect.ANY, Expect.ABSENT


class StateError(Exception):
    """A call to a store failed. Only its three subclasses are raised."""


class StateDown(StateError):
    """No answer in time, or no connection. Repeat it later; it may have been done."""


class StateFull(StateError):
    """There is no room, or nothing may be written. Reads still work; an operator must make room."""


class Conflict(StateError):
    """What is there is not what the caller expected. Nothing was changed."""


class Gap(Conflict):
    """An append begins behind the stream's end. `next`: the index that it must begin at."""

    def __init__(self, next: int) -> None:
        super().__init__(f"the stream ends before this append: its next index is {next}")
        self.next = next


class Fenced(Conflict):
    """A newer owner appends to this stream. `fence`: the highest that was seen."""

    def __init__(self, fence: int) -> None:
        super().__init__(f"a newer owner, with fence {fence}, appends to this stream")
        self.fence = fence


@dataclass(frozen=True, slots=True)
class Versioned:
    """A value and its version."""

    value: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Records of a stream. `first`: index of the first; above the requested one after a trim."""

    first: int
    records: tuple[bytes, ...] = ()

    @property
    def next(self) -> int:
        """Index at which the next read begins."""
        return self.first + len(self.records)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket of a take: it holds `capacity` tokens at most, and is full at its first use.

    cost: tokens to take; negative: tokens to give back.
    ttl_s: of a bucket that does not fill: seconds from its last take until it is forgotten, and
    full; None: it is kept. One that fills is forgotten once it is full.
    """

    name: str
    capacity: float
    refill_per_s: float
    cost: float = 1.0
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """The outcome of a take.

    wait_s: 0 where granted, else seconds until it would be; inf where it never can be.
    levels: tokens left in each bucket.
    """

    is_granted: bool
    wait_s: float
    levels: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """For operators. notes: what limits this store's promises, one sentence each. fault: why calls
    fail now; None: none did."""

    kind: str
    is_up: bool
    notes: tuple[str, ...] = ()
    fault: str | None = None


class Store(Protocol):
    """What users of the store see. All verbs raise StateDown, and ValueError for bad arguments.

    A store belongs to one event loop. A caller may be cancelled at any time; its call is then done
    or not done, and no other call is disturbed.
    """

    async def get(self, name: str, *, budget_s: float) -> Versioned | None:
        """The value; None where there is none, or it has expired."""

    async def put(
        self,
        name: str,
        value: bytes,
        *,
        ttl_s: float | None = None,
        expect: Expect | int = ANY,
        budget_s: float,
    ) -> int:
        """Set the value, and return its version: above all versions of this name before.

        ttl_s: seconds from this put to its expiry; None: it never expires.
        expect: a version, ABSENT or ANY. Raises Conflict where another one is there; StateFull.
        Versions can serve as fences of a stream: a new owner's is higher than the old one's.
        """

    async def append(
        self,
        name: str,
        first: int,
        records: Sequence[bytes],
        *,
        fence: int = 0,
        ttl_s: float | None = None,
        keep: int | None = None,
        budget_s: float,
    ) -> int:
        """Append `records` as first, first + 1, ...; returns the stream's next index.

        Records that are there already are compared, and not stored again. Without records, only
        the fence and the time to live are set.
        ttl_s: seconds from the last append to the expiry of the whole stream; None: never.
        keep: older records than the last `keep` may be removed.
        Raises Gap, Fenced, StateFull, and Conflict where other records are there.
        """

    async def read(
        self, name: str, start: int = 0, *, limit: int = 1000, wait_s: float = 0.0, budget_s: float
    ) -> Slice:
        """Up to `limit` records from index `start`; where there are none, waits up to `wait_s`.

        It answers within wait_s + budget_s. A stream that does not exist is empty.
        """

    async def take(self, buckets: Sequence[Bucket], *, budget_s: float) -> Taken:
        """Take each bucket's cost, or nothing from any. Raises StateFull."""

    async def delete(self, name: str, *, expect: Expect | int = ANY, budget_s: float) -> None:
        """Remove the value, the stream with its fence, and the bucket of this name, if any.

        expect: as for put, of the value. Raises Conflict.
        """

    def status(self) -> StoreStatus:
        """Cheap: no call to a disk or server."""

    async def close(self) -> None:
        """Close the store. Running calls are finished, or raise StateDown."""
