"""What a run does inside the processes that it forks: faults that nothing outside could make.

Functions of a module, since they travel by name. Each gets the parts of its process.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.faults.worker_process import WorkerParts
from penstock.workers.request import Delta

STEP_S = 0.004  # so that a fault meets a stream that has not ended
FATAL = 1999  # a request whose prompt has this token ends its worker
UNSOUND = 1998  # the K of such a request is not a number, from the third step on
_eaten: list[bytearray] = []


def pace(parts: WorkerParts, step_s: float = STEP_S) -> None:
    """Steps take at least `step_s`."""
    _before_step(parts, lambda: time.sleep(step_s))


def nothing(parts: WorkerParts) -> None:
    """A worker as it is."""


def fatal(parts: WorkerParts) -> None:
    """Paced; a request with the token FATAL aborts the process, as a fault in a kernel would."""
    pace(parts)

    def check() -> None:
        for each in parts.engine._sequences.values():
            if FATAL in each.request.prompt_ids:
                os.abort()

    _before_step(parts, check)


def unsound(parts: WorkerParts) -> None:
    """Paced; the first block of a request with the token UNSOUND becomes NaN."""
    pace(parts)
    engine = parts.engine

    def spoil() -> None:
        for each in engine._sequences.values():
            is_marked = UNSOUND in each.request.prompt_ids
            if is_marked and len(each.token_ids) > each.num_prompt_tokens + 2:
                engine.arena.block(each.block_table[0]).fill_(0xFF)

    _before_step(parts, spoil)


def _before_step(parts: WorkerParts, act: Callable[[], None]) -> None:
    step = parts.engine.step

    def acted() -> list[Delta]:
        act()
        return step()

    parts.engine.step = acted  # type: ignore[method-assign]


def eat(parts: Any) -> int:
    """Take 32 MiB of memory more, for good; returns the MiB taken in all."""
    _eaten.append(bytearray(os.urandom(1 << 20)) * 32)
    return 32 * len(_eaten)


def jump(parts: Any, seconds: float) -> float:
    """Set the process's wall clock by `seconds`, where clock.py's library is loaded.

    Returns the time that the process then has. Raises AttributeError where it is not.
    """
    ctypes.CDLL(None).penstock_clock_jump(ctypes.c_longlong(round(seconds)))
    return time.time()
