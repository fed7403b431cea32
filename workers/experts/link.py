"""Whether the link to host memory has time to spare, from what has gone over it.

A copy that is made ahead is free only while nothing else wants the link. Where demands alone keep
it busy, each wrong guess delays one. Knows counters and a clock; nothing of experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

WINDOW_S = 0.25  # of work, over which the share is taken
PAUSE_S = 0.5  # longer between two looks: nobody was at work
SATURATED = 0.5  # a gain is bounded by the time the link rests, a loss by the time it works


@dataclass(slots=True)
class LinkCounts:
    """What has gone over the link so far."""

    demand_bytes: int = 0
    prefetch_bytes: int = 0
    busy_s: float = 0.0
    demand_busy_s: float = 0.0  # of that, with what a step waited for
    num_corrupted: int = 0  # experts that did not match their digest, each time


@dataclass(slots=True)
class LinkMeter:
    """The share of the time at work that demands take of the link, over the last full window."""

    counts: LinkCounts
    clock: Callable[[], float] = time.monotonic
    share: float = 0.0
    _last: tuple[float, float] | None = None  # when it was looked at, and how busy it had been
    _window: tuple[float, float] = 0.0, 0.0  # so far: seconds of work, and of demands

    def is_saturated(self) -> bool:
        """Whether copying ahead would cost more than it can give. Asked at every layer or so."""
        now_s, busy_s = self.clock(), self.counts.demand_busy_s
        if self._last is not None and now_s - self._last[0] <= PAUSE_S:
            worked_s = self._window[0] + now_s - self._last[0]
            self._window = worked_s, self._window[1] + busy_s - self._last[1]
            if worked_s >= WINDOW_S:
                self.share, self._window = self._window[1] / worked_s, (0.0, 0.0)
        self._last = now_s, busy_s
        return self.share > SATURATED
