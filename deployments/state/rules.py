"""The semantics that implementations share, as pure functions: versions, appends, token buckets.

redis/functions.lua says the same in Lua.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.deployments.state.store import (
    ABSENT,
    ANY,
    Bucket,
    Conflict,
    Expect,
    Fenced,
    Gap,
    Taken,
)

Level = tuple[float, float]  # tokens in a bucket, and when: seconds of Unix time


def check_version(found: int | None, expect: Expect | int) -> None:
    """Raise Conflict unless the version that is there (None: no value) is the expected one."""
    if expect is ANY or found == (None if expect is ABSENT else expect):
        return
    there = "there is no value" if found is None else f"version {found} is there"
    wanted = "none" if expect is ABSENT else f"version {expect}"
    raise Conflict(f"{there}, and {wanted} was expected")


def new_version(found: int | None, now_s: float) -> int:
    """Microseconds of Unix time, so that no version comes again after a delete."""
    return max((found or 0) + 1, int(now_s * 1e6))


def num_repeated(next: int, highest: int, first: int, num: int, fence: int) -> int:
    """How many of `num` records to append at `first` are there already. Raises Fenced, Gap.

    next, highest: the stream's next index, and the highest fence that was seen.
    """
    if fence < highest:
        raise Fenced(highest)
    if first > next:
        raise Gap(next)
    return min(next - first, num)


def check_repeated(first: int, stored: Sequence[bytes], records: Sequence[bytes]) -> None:
    """Raise Conflict where a record differs from the one of its index that is stored."""
    for index, (old, new) in enumerate(zip(stored, records), first):
        if old != new:
            raise Conflict(f"record {index} of the stream is another one")


def draw(
    buckets: Sequence[Bucket], levels: Sequence[Level | None], now_s: float
) -> tuple[Taken, list[Level]]:
    """Take all costs or none. `levels`: what is stored; None: a bucket that was never used."""
    filled = [_level(bucket, level, now_s) for bucket, level in zip(buckets, levels)]
    waits = [_wait_s(bucket, level) for bucket, level in zip(buckets, filled)]
    if wait_s := max(waits):
        return Taken(False, wait_s, tuple(filled)), [(level, now_s) for level in filled]
    left = [min(bucket.capacity, level - bucket.cost) for bucket, level in zip(buckets, filled)]
    return Taken(True, 0.0, tuple(left)), [(level, now_s) for level in left]


def _level(bucket: Bucket, level: Level | None, now_s: float) -> float:
    if level is None:
        return bucket.capacity
    tokens, then_s = level
    return min(bucket.capacity, tokens + max(0.0, now_s - then_s) * bucket.refill_per_s)


def _wait_s(bucket: Bucket, level: float) -> float:
    if bucket.cost <= max(level, 0.0):
        return 0.0
    if bucket.cost > bucket.capacity or bucket.refill_per_s == 0:
        return math.inf
    return (bucket.cost - level) / bucket.refill_per_s


def ttl_s(bucket: Bucket, level: float) -> float | None:
    """Seconds until a bucket can be forgotten: it is full again, or its own have passed; None: it
    is kept."""
    if bucket.refill_per_s == 0:
        return bucket.ttl_s
    return (bucket.capacity - level) / bucket.refill_per_s + 1.0
