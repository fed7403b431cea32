"""Waiting for a condition, in a test or on its event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


def eventually(
    condition: Callable[[], object], within_s: float = 60.0, what: str = "the condition"
) -> None:
    """Return once `condition` holds; fail, naming `what` was awaited, after `within_s`."""
    began_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began_s
        assert waited_s < within_s, f"{what}: not within {within_s:g} s"
        time.sleep(pause_s(waited_s))


def pause_s(waited_s: float) -> float:
    """Until one asks again: what is long in coming, processes that start for the most part, needs
    the CPU that a question to a server or to Ray costs, too."""
    return min(0.01 + waited_s / 50, 0.15)


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """The same on an event loop."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


class RunTime:
    """Seconds for which this process ran: a machine that stands still counts as one look."""

    def __init__(self) -> None:
        self.passed_s = 0.0


@asynccontextmanager
async def run_time(look_s: float = 0.01, most_s: float = 0.1) -> AsyncIterator[RunTime]:
    """On an event loop. `most_s`: that count of the time between two looks."""
    clock, seen_s = RunTime(), time.monotonic()

    async def look() -> None:
        nonlocal seen_s
        while True:
            await asyncio.sleep(look_s)
            now_s = time.monotonic()
            clock.passed_s += min(now_s - seen_s, most_s)
            seen_s = now_s

    looking = asyncio.ensure_future(look())
    try:
        yield clock
    finally:
        looking.cancel()


def undisturbed(attempt: Callable[[], T], most_s: float = 0.1, most_attempts: int = 5) -> T:
    """What `attempt` does in a run in which this machine never stood still for `most_s`.

    For what has to be done in less time than a virtual machine may stand still. An attempt during
    which it did is made again, whatever came of it; that of a quiet time counts, and the last one.
    """
    for _ in range(most_attempts - 1):
        with _Watched() as watched:
            try:
                result, failure = [attempt()], None
            except Exception as error:
                result, failure = [], error
        if watched.longest_s < most_s:
            if failure is not None:
                raise failure
            return result[0]
    return attempt()


class _Watched:
    """How long a thread that sleeps for a moment was kept from waking, at most."""

    LOOK_S = 0.01

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        seen_s = time.monotonic()
        while not self._is_over.wait(self.LOOK_S):
            now_s = time.monotonic()
            self.longest_s = max(self.longest_s, now_s - seen_s - self.LOOK_S)
            seen_s = now_s
