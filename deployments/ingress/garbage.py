"""When an ingress looks for garbage in reference cycles: while few requests are open.

A full collection looks at every object and holds up all threads, that of the probes included: 0.13
to 0.23 s with a thousand open requests (measured, Python 3.11). Python would begin one in the very
burst that makes the objects.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

FEW_CALLS = 64  # a collection then takes a few milliseconds
LOOK_S = 5.0
LONGEST_S = 120.0  # without a collection: under lasting load one is due, too
_NEVER = 1_000_000  # collections of the middle generation, before Python begins a full one


def begin(num_open: Callable[[], int]) -> asyncio.Task[None]:
    """Freeze what there is, and collect in quiet moments from now on: a task to be cancelled."""
    freeze()
    return asyncio.ensure_future(collect_in_quiet(num_open))


def freeze() -> None:
    """Objects made so far stay until the process ends; no collection looks at them again."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)


async def collect_in_quiet(
    num_open: Callable[[], int], clock: Callable[[], float] = time.monotonic
) -> None:
    """Collect whenever at most FEW_CALLS requests are open, and after LONGEST_S; for ever."""
    last_s = clock()
    while True:
        await asyncio.sleep(LOOK_S)
        if num_open() <= FEW_CALLS or clock() - last_s >= LONGEST_S:
            gc.collect()
            last_s = clock()
