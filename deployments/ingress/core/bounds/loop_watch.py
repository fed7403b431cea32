"""Watches the event loop of an ingress from a thread: how late it is, and what holds it up.

While it is late, this thread sends the heartbeats that the loop cannot, so that workers do not take
the ingress for dead and cancel its streams.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

from penstock.workers.stats import Distribution, Histogram

NOTE_S = 0.1  # from one note of the loop to the next
LATE_S = 0.5  # then the stack is logged, and heartbeats are sent from here
BEAT_S = 0.5
GIVE_UP_S = 30.0  # a loop that stands still for so long has stopped for good: no more heartbeats
LOG_EVERY_S = 10.0
NUM_FRAMES = 12  # of the stack, the innermost
LAGS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

log = logging.getLogger("penstock.ingress")


class LoopWatch:
    """Of one loop. `run` writes notes there; a thread of its own reads them."""

    def __init__(self, beat: Callable[[], None], clock: Callable[[], float] = time.monotonic):
        """`beat`: sends heartbeats; called in the watching thread while the loop is late."""
        self.num_beats = 0
        self._beat, self._clock = beat, clock
        self._noted_s = clock()
        self._loop_thread: int | None = None
        self._lags = Histogram(LAGS_S)
        self._logged_s = -LOG_EVERY_S
        self._is_over = threading.Event()

    async def run(self) -> None:
        """Write notes until this is cancelled, which ends the thread, too."""
        self._loop_thread = threading.get_ident()
        self._noted_s = self._clock()
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()
        try:
            while True:
                await asyncio.sleep(NOTE_S)
                self.note()
        finally:
            self._is_over.set()

    def note(self) -> None:
        """The loop turns; called every NOTE_S."""
        now_s = self._clock()
        self._lags.observe(max(0.0, now_s - self._noted_s - NOTE_S))
        self._noted_s = now_s

    def lag_s(self) -> float:
        """Seconds by which the loop is late now."""
        return max(0.0, self._clock() - self._noted_s - NOTE_S)

    def lags(self) -> Distribution:
        """All lags since the start, in seconds."""
        return self._lags.snapshot()

    def _watch(self) -> None:
        slept_from_s = self._clock()
        while not self._is_over.wait(BEAT_S):
            now_s = self._clock()
            # If this thread was late as well, the whole process stood still: the loop is not held
            # up by anything in it, and its next turn is about to come.
            stood_still = now_s - slept_from_s > 2 * BEAT_S
            slept_from_s = now_s
            if not stood_still:
                self.look()

    def look(self) -> None:
        """Send heartbeats, and log the stack, if the loop is late."""
        lag_s = self.lag_s()
        if not LATE_S < lag_s < GIVE_UP_S:
            return
        self.num_beats += 1
        try:
            self._beat()
        except Exception:  # one that fails must not end the watch
            log.exception("heartbeats of a late event loop failed")
        if self._clock() - self._logged_s >= LOG_EVERY_S:
            self._logged_s = self._clock()
            log.warning("the event loop is %.1f s late, in: %s", lag_s, self._stack())

    def _stack(self) -> str:
        """Names of functions and lines; no values, which may be a client's."""
        frame = sys._current_frames().get(self._loop_thread or 0)
        if frame is None:
            return "no frame"
        frames = traceback.extract_stack(frame)[-NUM_FRAMES:]
        return " < ".join(
            f"{each.name} ({each.filename.rpartition('/')[2]}:{each.lineno})"
            for each in reversed(frames)
        )
