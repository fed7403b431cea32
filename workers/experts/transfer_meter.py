"""The load of the host link: transfer counters, and whether prefetching would pay.

A prefetch costs nothing only while no demand load needs the link. Where demand loads alone keep it
busy, each wrong prefetch delays one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

WINDOW_S = 0.25  # of computing, over which the share is averaged
PAUSE_S = 0.5  # a longer interval between two calls counts as idle
SATURATED = 0.5  # the gain is bounded by the time the link is idle, the loss by the time it is busy


@dataclass(slots=True)
class TransferCounts:
    """Transfers over the host link so far."""

    demand_bytes: int = 0
    prefetch_bytes: int = 0
    busy_s: float = 0.0
    demand_busy_s: float = 0.0  # of that, with demand loads
    num_corrupted: int = 0  # loads of experts that did not match their digest


@dataclass(slots=True)
class TransferMeter:
    """The share of the computing time in which demand loads occupy the host link, over the last
    full window."""

    counts: TransferCounts
    clock: Callable[[], float] = time.monotonic
    share: float = 0.0
    _last: tuple[float, float] | None = None  # time of the last call, and demand_busy_s then
    _window: tuple[float, float] = 0.0, 0.0  # so far: seconds of computing, and of demand loads

    def is_saturated(self) -> bool:
        """Whether prefetching would cost more than it can gain. Called at every MoE layer."""
        now_s, busy_s = self.clock(), self.counts.demand_busy_s
        if self._last is not None and now_s - self._last[0] <= PAUSE_S:
            worked_s = self._window[0] + now_s - self._last[0]
            self._window = worked_s, self._window[1] + busy_s - self._last[1]
            if worked_s >= WINDOW_S:
                self.share, self._window = self._window[1] / worked_s, (0.0, 0.0)
        self._last = now_s, busy_s
        return self.share > SATURATED
