"""Whether the link to host memory has time to spare, from what has gone over it.

A copy that is made ahead is free only while nothing else wants the link. Where demands alone keep
it busy, each wrong guess delays one. Knows counters and a clock; nothing of experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

WINDOW_S = 0.25  # over which the share is taken
PAUSE_S = 4 * WINDOW_S  # longer between two looks: nobody was at work
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
    """The share of the time that demands take of the link, over the last full window."""

    counts: LinkCounts
    clock: Callable[[], float] = time.monotonic
    share: float = 0.0
    _since_s: float | None = None
    _busy_s: float = 0.0

    def is_saturated(self) -> bool:
        """Whether copying ahead would cost more than it can give. Asked at every layer or so."""
        now_s = self.clock()
        if self._since_s is None or now_s - self._since_s > PAUSE_S:
            self._since_s, self._busy_s = now_s, self.counts.demand_busy_s
        elif now_s - self._since_s >= WINDOW_S:
            self.share = (self.counts.demand_busy_s - self._busy_s) / (now_s - self._since_s)
            self._since_s, self._busy_s = now_s, self.counts.demand_busy_s
        return self.share > SATURATED
