"""Bounds of what a store is given: the same for all implementations. ValueError names the field."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from penstock.deployments.state.store import Bucket, Expect

MAX_BYTES = 16 << 20  # of a value, and of the records of one append
MAX_RECORDS = 4096  # of one append, and of one read
MAX_INDEX = 2**53 - 1  # Redis's Lua has numbers of 53 bits
MAX_BUCKETS = 16
_NAME = re.compile(r"[!-~]{1,512}")


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"name must be 1 to 512 printable ASCII characters; got {name[:80]!r}")


def check_put(name: str, value: bytes, ttl_s: float | None, expect: Expect | int) -> None:
    check_name(name)
    check_ttl(ttl_s)
    check_expect(expect)
    if len(value) > MAX_BYTES:
        raise ValueError(f"value must have at most {MAX_BYTES} bytes; got {len(value)}")


def check_append(
    name: str,
    first: int,
    records: Sequence[bytes],
    fence: int,
    ttl_s: float | None,
    keep: int | None,
) -> int:
    """Returns the number of bytes in `records`."""
    check_name(name)
    check_ttl(ttl_s)
    if not 0 <= first <= MAX_INDEX - MAX_RECORDS:
        raise ValueError(f"first must lie in 0 ... {MAX_INDEX - MAX_RECORDS}; got {first}")
    if not 0 <= fence <= MAX_INDEX:
        raise ValueError(f"fence must lie in 0 ... {MAX_INDEX}; got {fence}")
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be at least 1; got {keep}")
    if len(records) > MAX_RECORDS:
        raise ValueError(f"an append takes at most {MAX_RECORDS} records; got {len(records)}")
    if (size := sum(map(len, records))) > MAX_BYTES:
        raise ValueError(f"the records of an append have at most {MAX_BYTES} bytes; got {size}")
    return size


def check_read(name: str, start: int, limit: int, wait_s: float) -> None:
    check_name(name)
    if not 0 <= start <= MAX_INDEX:
        raise ValueError(f"start must lie in 0 ... {MAX_INDEX}; got {start}")
    if not 1 <= limit <= MAX_RECORDS:
        raise ValueError(f"limit must lie in 1 ... {MAX_RECORDS}; got {limit}")
    if not 0 <= wait_s < math.inf:
        raise ValueError(f"wait_s must be 0 or more, and finite; got {wait_s}")


def check_buckets(buckets: Sequence[Bucket]) -> None:
    if not 1 <= len(buckets) <= MAX_BUCKETS:
        raise ValueError(f"a take needs 1 to {MAX_BUCKETS} buckets; got {len(buckets)}")
    if len({bucket.name for bucket in buckets}) < len(buckets):
        raise ValueError("a take names a bucket twice; add up its costs")
    for bucket in buckets:
        check_name(bucket.name)
        if not 0 < bucket.capacity <= MAX_INDEX:
            raise ValueError(f"capacity of {bucket.name} must be positive; got {bucket.capacity}")
        if not 0 <= bucket.refill_per_s <= MAX_INDEX:
            raise ValueError(
                f"refill_per_s of {bucket.name} must be 0 or more; got {bucket.refill_per_s}"
            )
        check_ttl(bucket.ttl_s)
        if not -MAX_INDEX <= bucket.cost <= MAX_INDEX:
            raise ValueError(f"cost of {bucket.name} must be finite; got {bucket.cost}")


def check_expect(expect: Expect | int) -> None:
    if not isinstance(expect, Expect) and not 0 < expect <= MAX_INDEX:
        raise ValueError(f"expect must be ANY, ABSENT or a version that put returned; got {expect}")


def check_ttl(ttl_s: float | None) -> None:
    if ttl_s is not None and not 0.001 <= ttl_s <= 1e9:
        raise ValueError(f"ttl_s must lie in 0.001 ... 1e9, or be None; got {ttl_s}")
