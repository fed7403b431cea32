"""Calibrates Retry-After from how soon refused requests would have been admitted.

A predicted wait is a cautious quantile; often a refused request could be admitted much sooner. So
a few refused requests are remembered and judged again from time to time as if they arrived now,
which changes nothing. A factor on Retry-After follows, such that TARGET_SHARE of them would have
been admitted by the time that their clients were given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

TARGET_SHARE = 0.6  # of refused requests, admitted by the time that they were given
STEP = 0.05  # of the factor's logarithm, for each request
SMALLEST, LARGEST = 0.05, 3.0
UPDATE_S = 0.5
MAX_WATCHED = 8  # remembered at once; others are not learnt from


Entry = TypeVar("Entry")  # a request as `would_wait` takes it


@dataclass(slots=True)
class _Refused(Generic[Entry]):
    entry: Entry
    at: float  # when it arrived and was refused
    after_s: float  # Retry-After before the factor
    given_s: float  # Retry-After as its client was told: with the factor, bounded and spread
    patience_s: float  # longest that it may wait


class RetryAfterModel(Generic[Entry]):
    """Of one gate. `would_wait(entry, now)`: seconds that it would wait if it arrived now."""

    def __init__(self, would_wait: Callable[[Entry, float], float]) -> None:
        self.factor = 1.0  # on Retry-After
        # Judged so far: admissible by the time that their clients were given, and only later.
        self.num_in_time = 0
        self.num_late = 0
        self._would_wait = would_wait
        self._watched: list[_Refused[Entry]] = []
        self._looked_at = -math.inf

    def watch(
        self, entry: Entry, at: float, after_s: float, patience_s: float, given_s: float
    ) -> None:
        """It arrived at `at`, and was refused for its predicted wait."""
        if len(self._watched) < MAX_WATCHED and after_s > 0:
            self._watched.append(_Refused(entry, at, after_s, given_s, patience_s))

    def update(self, now: float) -> None:
        """Judge the remembered requests again. May be called often."""
        if not self._watched or now < self._looked_at + UPDATE_S:
            return
        self._looked_at, kept = now, []
        for each in self._watched:
            since, quoted_s = now - each.at, self.factor * each.after_s
            if self._would_wait(each.entry, now) <= each.patience_s:
                self._learn(since <= quoted_s)
                self._count(since <= each.given_s)
            elif since > max(quoted_s, each.given_s, LARGEST * each.after_s):
                self._learn(False)
                self._count(False)
            else:
                kept.append(each)
        self._watched = kept

    def _learn(self, held: bool) -> None:
        moved = self.factor * math.exp(STEP * (TARGET_SHARE - held))
        self.factor = min(max(moved, SMALLEST), LARGEST)

    def _count(self, in_time: bool) -> None:
        self.num_in_time += in_time
        self.num_late += not in_time
