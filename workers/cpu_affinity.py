"""CPU cores that only an engine uses: parsing their list, and pinning threads to them. Linux."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator

_PART = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


def parse_cores(text: str) -> frozenset[int]:
    """Cores by number, as taskset has them: "3", or "2-7,9". Raises ValueError."""
    cores: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(first) > int(last):
            raise ValueError(f"cores are written as 3 or 2-7,9; got {text!r}")
        cores |= set(range(int(first), int(last) + 1))
    return frozenset(cores)


def allowed_cores() -> frozenset[int]:
    """Cores that this thread may run on. Raises OSError where the system has no CPU affinity."""
    if not hasattr(os, "sched_getaffinity"):
        raise OSError("this system cannot keep a thread on a core; Linux can")
    return frozenset(os.sched_getaffinity(0))


def keep_to(cores: Collection[int]) -> None:
    """Pin this thread, and threads that it starts from now on, to these cores."""
    os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def kept_to(cores: Collection[int] | None) -> Iterator[None]:
    """`keep_to` within a context; None: on all allowed cores."""
    if cores is None:
        yield
        return
    before = allowed_cores()
    keep_to(cores)
    try:
        yield
    finally:
        keep_to(before)
