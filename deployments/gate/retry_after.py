"""How soon would those have been let in that were refused? What Retry-After learns from.

A predicted wait is a quantile, and cautious; the moment from which a refused request would be let
in after all is often much sooner. So a few of the refused are remembered, and asked about in
between as if they came now, which changes nothing. The factor on what clients are told follows
such that `HELD` of them would be let in by the time they were told. Knows nothing of how a wait is
predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from penstock.deployments.gate.wait_queue import Waiting

TARGET_SHARE = 0.6  # share of the refused that would be let in by the time they are told
STEP = 0.05  # of the factor's logarithm, for each of them
SMALLEST, LARGEST = 0.05, 3.0
UPDATE_S = 0.5
MAX_WATCHED = 8  # that are remembered; others are not learnt from


@dataclass(slots=True)
class _Refused:
    entry: Waiting
    after_s: float  # that it was to stay away, before the factor
    patience_s: float  # that it may wait


class RetryAfterModel:
    """Of one gate. `would_wait(entry, now)` is what it would wait if it came now, in seconds."""

    def __init__(self, would_wait: Callable[[Waiting, float], float]) -> None:
        self.factor = 1.0  # of the seconds that clients are told
        self._would_wait = would_wait
        self._watched: list[_Refused] = []
        self._looked_at = -math.inf

    def watch(self, entry: Waiting, after_s: float, patience_s: float) -> None:
        """It came at `entry.arrived`, and would have waited longer than it may."""
        if len(self._watched) < MAX_WATCHED and after_s > 0:
            self._watched.append(_Refused(entry, after_s, patience_s))

    def update(self, now: float) -> None:
        """Who would be let in by now? Called as often as is convenient."""
        if not self._watched or now < self._looked_at + UPDATE_S:
            return
        self._looked_at, kept = now, []
        for each in self._watched:
            since, quoted_s = now - each.entry.arrived, self.factor * each.after_s
            if self._would_wait(each.entry, now) <= each.patience_s:
                self._learn(since <= quoted_s)
            elif since > max(quoted_s, LARGEST * each.after_s):
                self._learn(False)
            else:
                kept.append(each)
        self._watched = kept

    def _learn(self, held: bool) -> None:
        moved = self.factor * math.exp(STEP * (TARGET_SHARE - held))
        self.factor = min(max(moved, SMALLEST), LARGEST)
