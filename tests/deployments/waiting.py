"""Waiting for a condition, in a test or on its event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


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
