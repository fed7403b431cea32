"""When an answer must have ended: one timer for all its waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class Deadline:
    """Expires at `at_s`, on the clock of the event loop, or when `expire` is called; None: only so.

    One timer serves all waits of an answer: `asyncio.timeout_at` makes one for each wait, which
    costs as much as the rest of the wait. One task waits at a time. Call `close` in the end.
    """

    def __init__(self, at_s: float | None):
        self._at_s = at_s
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Task[object] | None = None
        self._has_cancelled = False  # this deadline cancelled the task that waits

    def expire(self) -> None:
        """Expire now: the task that waits, or the next one that does, gets a TimeoutError."""
        self._at_s = asyncio.get_running_loop().time()
        if self._waiting is not None and not self._has_cancelled:
            self._has_cancelled = True
            self._waiting.cancel()

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    async def wait(self, thing: Awaitable[T]) -> T:
        """What `thing` gives. Raises TimeoutError once the deadline has expired.

        As with `asyncio.timeout_at`, what is there without waiting is given all the same, and a
        task that is cancelled from outside gets its CancelledError.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None and self._waiting is None
        if self._at_s is not None and self._at_s <= loop.time():
            async with asyncio.timeout_at(self._at_s):
                return await thing
        if self._timer is None and self._at_s is not None:
            self._timer = loop.call_at(self._at_s, self.expire)
        num_cancels, self._waiting = task.cancelling(), task
        try:
            return await thing
        except asyncio.CancelledError:
            if self._has_cancelled and task.cancelling() - 1 <= num_cancels:
                raise TimeoutError from None
            raise
        finally:
            self._waiting = None
            if self._has_cancelled:
                self._has_cancelled = False
                task.uncancel()
