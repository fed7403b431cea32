"""Waiting for a condition, in a test or on its event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def eventually(
    condition: Callable[[], object], within_s: float = 60.0, what: str = "the condition"
) -> None:
    """Return once `condition` holds; fail, naming `what` was awaited, after `within_s`."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"{what}: not within {within_s:g} s"
        time.sleep(0.01)


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """The same on an event loop."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
