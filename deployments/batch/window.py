"""The limit of a batch's requests in flight: grows after a success, halves after a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

FIRST_LIMIT = 8.0
CUT_EVERY_S = 1.0  # requests that were in flight together are refused together: one reason


class Window:
    """A limit between 1 and `most`. Belongs to one event loop; `clock` gives seconds."""

    def __init__(self, most: int, clock: Callable[[], float]):
        self._most = most
        self._clock = clock
        self._limit = min(FIRST_LIMIT, most)
        self._was_refused = False
        self._last_cut_s = float("-inf")
        self._changed = asyncio.Condition()
        self.num_in_flight = 0

    @property
    def limit(self) -> int:
        return int(self._limit)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for room, and hold it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_in_flight < self.limit)
            self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1
            async with self._changed:
                self._changed.notify_all()

    def succeeded(self) -> None:
        """Raise the limit by 1 for each success; after a refusal, for each `limit` successes."""
        step = 1 / self._limit if self._was_refused else 1.0
        self._limit = min(self._limit + step, self._most)

    def refused(self) -> None:
        """Halve the limit, once in CUT_EVERY_S at most."""
        if self._clock() - self._last_cut_s < CUT_EVERY_S:
            return
        self._last_cut_s = self._clock()
        self._was_refused = True
        self._limit = max(self._limit / 2, 1.0)
