"""Whether this ingress lives, and is ready, for a thread that no request can delay.

On the ports of clients a probe waits in the event loop behind all requests: under overload its
answer is late, and an orchestrator ends a process that only has much to do. The metrics port
answers from what the loop noted last, and from how long ago that was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

NOTE_S = 0.1  # from one note of the loop to the next
LATE_S = 2.0  # the loop is then too late for new requests
STUCK_S = 30.0  # it has then stopped for good


class Probes:
    """The notes of one event loop. `run` writes them there; any thread reads them."""

    def __init__(
        self,
        is_ready: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[], object | None] = lambda: None,
    ):
        """`is_ready`: whether requests should be sent here, asked on the loop. `start`: how far
        workers that start have got, asked on any thread; None: none starts."""
        self._asks_ready, self._clock, self._start = is_ready, clock, start
        self._is_ready = False
        self._noted_s = clock()

    async def run(self) -> None:
        """Write notes, for ever."""
        while True:
            self.note()
            await asyncio.sleep(NOTE_S)

    def note(self) -> None:
        """The loop turns, and says whether this ingress is ready."""
        self._is_ready, self._noted_s = self._asks_ready(), self._clock()

    def why_not_live(self) -> str:
        """Empty: the process serves, or will when it has less to do."""
        age_s = self._clock() - self._noted_s
        return f"the event loop has stood still for {age_s:.0f} s" if age_s > STUCK_S else ""

    def why_not_ready(self) -> str:
        """Empty: requests should be sent here."""
        age_s = self._clock() - self._noted_s
        if age_s > LATE_S:
            return f"the event loop is {age_s:.1f} s late"
        if self._is_ready:
            return ""
        start = self._start()
        if start is not None:
            return f"no worker is ready yet: {start}"
        return "no worker takes requests, or this server is about to stop"
