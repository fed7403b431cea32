"""CPU cores that an engine has for itself: which they are, and how a thread is kept on them.

Linux. Knows nothing of engines, Ray, or who keeps off those cores.
"""

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
    """That this thread may run on. Raises OSError where the system keeps no thread on a core."""
    if not hasattr(os, "sched_getaffinity"):
        raise OSError("this system cannot keep a thread on a core; Linux can")
    return frozenset(os.sched_getaffinity(0))


def keep_to(cores: Collection[int]) -> None:
    """This thread, and whatever it starts from now on, run on these cores only."""
    os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def kept_to(cores: Collection[int] | None) -> Iterator[None]:
    """The same for a while; None: wherever it may."""
    if cores is None:
        yield
        return
    before = allowed_cores()
    keep_to(cores)
    try:
        yield
    finally:
        keep_to(before)
