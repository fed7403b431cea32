"""The admission rule of sampled.py by means and variances on a grid of horizons.

For thousands of workers, or hundreds of answers on each, sampled futures cost too much: here a
worker is 24 means and variances, whatever the number of its answers, and one more answer is one
more sum. Peaks between horizons are missed, and with heavy tails it predicts less than the sampled
rule (docs/design/prediction.md). A snapshot of one worker.

Used by `GateSettings.rule = "gaussian"`, which no setting of `penstock serve` selects yet: for
clusters where the sampled rule is too slow (benchmarks/gate/scale.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.deployments.gate.forecast.peaks import UseGrid, empty_grid, horizons_of
from penstock.deployments.gate.forecast.sampled import UNBOUNDED, Candidate
from penstock.deployments.prediction.distribution import Floats, Ints

HORIZONS = horizons_of(1 << 16)  # steps; longer answers are taken to end there
_AT = HORIZONS.astype(np.float64)


@dataclass(frozen=True, slots=True)
class GaussianForecast:
    """What a worker's answers may hold at each of HORIZONS."""

    capacity: int  # tokens of KV
    limit: int  # tokens that the peak may reach
    level: float  # of the quantile of use, such as 0.95
    deviations: float  # standard deviations above the mean at that level: 1.645
    slots: int  # answers that may still join
    num: int  # answers that run
    use: UseGrid
    alive: Floats  # [horizons] answers still there, mean
    alive_variance: Floats  # [horizons]

    def peak_with(self, candidate: Candidate) -> int:
        """The largest of the quantiles over time, were the candidate to join now."""
        return int(np.ceil(_with(self.use, candidate).peak(self.deviations)))

    def admits(self, candidate: Candidate) -> bool:
        """The rule; on an empty worker an answer is admitted if its longest fits the capacity."""
        return self.peak_if_admitted(candidate) is not None

    def peak_if_admitted(self, candidate: Candidate) -> int | None:
        """The peak, were it to join now; None: it may not."""
        if self.slots < 1 or candidate.longest > self.capacity:
            return None
        peak = self.peak_with(candidate)
        return peak if self.num == 0 or peak <= self.limit else None

    def peaks_if_admitted(self, candidates: Sequence[Candidate]) -> list[int | None]:
        """`peak_if_admitted` of each, were it the only one."""
        return [self.peak_if_admitted(each) for each in candidates]

    def joined_by(self, candidate: Candidate) -> GaussianForecast:
        """The same worker with the candidate on it."""
        there = _survival(candidate)
        return replace(
            self,
            slots=self.slots - 1,
            num=self.num + 1,
            use=_with(self.use, candidate),
            alive=self.alive + there,
            alive_variance=self.alive_variance + there * (1.0 - there),
        )

    def fits_after(self, candidate: Candidate) -> int | None:
        """Steps until the candidate may join if no other does: one of HORIZONS; None: never."""
        if candidate.longest > self.capacity:
            return None
        if self.admits(candidate):
            return 0
        if self.num == 0:
            return None
        low, high = 1, len(HORIZONS) - 1
        while low < high:
            middle = (low + high) // 2
            if self.admits_after(int(HORIZONS[middle]), candidate):
                high = middle
            else:
                low = middle + 1
        return int(HORIZONS[high])

    def admits_after(self, steps: int, candidate: Candidate) -> bool:
        """The rule `steps` from now."""
        if candidate.longest > self.capacity:
            return False
        if steps >= HORIZONS[-1]:
            return True  # all are taken to have ended
        there = float(np.interp(steps, _AT, self.alive))
        spread = float(np.interp(steps, _AT, self.alive_variance)) ** 0.5
        if there + self.deviations * spread > self.num + self.slots - 1:
            return False
        later = _AT + steps
        use = UseGrid(
            HORIZONS,
            np.interp(later, _AT, self.use.mean),
            np.interp(later, _AT, self.use.variance),
        )
        return _with(use, candidate).peak(self.deviations) <= self.limit


def gaussian_forecast(
    used: Ints,
    survival: Floats,
    ceilings: Ints,
    *,
    capacity: int,
    limit: int,
    level: float,
    deviations: float,
    slots: int,
) -> GaussianForecast:
    """Of a worker: used [n] tokens, survival [n, horizons], ceilings [n] tokens."""
    if len(used) == 0:
        zero = np.zeros(len(HORIZONS))
        return GaussianForecast(
            capacity, limit, level, deviations, slots, 0, empty_grid(HORIZONS), zero, zero.copy()
        )
    holds = np.minimum(used[:, None] + _AT, np.maximum(ceilings, used)[:, None])
    dead = 1.0 - survival
    return GaussianForecast(
        capacity,
        limit,
        level,
        deviations,
        slots,
        len(used),
        UseGrid(HORIZONS, (survival * holds).sum(0), (survival * dead * holds**2).sum(0)),
        survival.sum(0),
        (survival * dead).sum(0),
    )


def _survival(candidate: Candidate) -> Floats:
    """[horizons] share of the candidate's futures that reach each horizon."""
    if not candidate.survival:
        left = np.sort(candidate.remaining)
        candidate.survival.append(1.0 - np.searchsorted(left, HORIZONS) / len(left))
    return candidate.survival[0]


def _with(use: UseGrid, candidate: Candidate) -> UseGrid:
    ceiling = None if candidate.ceiling == UNBOUNDED else candidate.ceiling
    return use.adding(candidate.used, _survival(candidate), ceiling)
