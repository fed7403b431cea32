"""Counts of observations by bucket, as Prometheus wants them: cheap to add to, cheap to copy.

Knows nothing of Prometheus, nor of what is observed. One thread adds; others may take snapshots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Distribution:
    """A snapshot. `counts` has one more entry than `bounds`: what lies above all of them.

    An observation is in the first bucket whose upper bound it does not exceed.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def num_observed(self) -> int:
        return sum(self.counts)


class Histogram:
    """Observations by bucket, and their sum."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]):
        """`bounds`: inclusive upper bounds, ascending; what is above the last has its own count."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._total)
