"""Arithmetic of fault runs: exact quantiles, pauses by the fault that they span, slopes.

Pure functions; times are seconds of one clock.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import stats

NO_FAULT = "no fault"
CONFIDENCE = 0.95
SAME_AGE_S = 20.0  # ages that differ by less are the same


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of all do not exceed (nearest rank); None: none."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


def summary(values: Sequence[float], digits: int = 3) -> dict[str, Any]:
    """Number, p50, p99 and maximum."""
    found = {
        "p50": quantile(values, 0.5),
        "p99": quantile(values, 0.99),
        "max": quantile(values, 1),
    }
    rounded = {name: None if v is None else round(v, digits) for name, v in found.items()}
    return {"n": len(values), **rounded}


def pauses(
    arrivals: Iterable[Sequence[float]], faults: Sequence[tuple[float, str]], least_s: float
) -> dict[str, list[float]]:
    """Gaps between tokens of at least `least_s`, by the role of the first fault within each.

    `arrivals`: when each call's tokens came; `faults`: when, and of which role. Gaps in which there
    was none are under NO_FAULT: a busy machine makes them.
    """
    found: dict[str, list[float]] = defaultdict(list)
    ordered = sorted(faults)
    times = np.array([at_s for at_s, _ in ordered])
    for times_s in arrivals:
        for earlier, later in pairwise(times_s):
            if later - earlier < least_s:
                continue
            first = int(np.searchsorted(times, earlier))
            is_within = first < len(ordered) and times[first] <= later
            found[ordered[first][1] if is_within else NO_FAULT].append(later - earlier)
    return dict(found)


def gaps(arrivals: Iterable[Sequence[float]]) -> list[float]:
    return [later - earlier for times_s in arrivals for earlier, later in pairwise(times_s)]


@dataclass(frozen=True)
class Slope:
    """Growth in units an hour, with the bounds of its 95 % confidence interval.

    `num_effective`: samples that count, after those are discounted that repeat their neighbours.
    """

    per_hour: float
    low: float
    high: float
    num_effective: float

    @property
    def is_flat(self) -> bool:
        """Whether no growth is within the interval."""
        return self.low <= 0.0 <= self.high

    def as_dict(self) -> dict[str, Any]:
        rounded = {name: round(value, 4) for name, value in asdict(self).items()}
        return {**rounded, "is_flat": self.is_flat}


def slope(segments: Iterable[Sequence[tuple[float, float]]]) -> Slope | None:
    """The common slope of several series of (seconds, value), each with a level of its own.

    Least squares within the segments: what differs between two processes is no growth of either.
    The interval is widened by the first autocorrelation of the residuals (n_eff = n (1-r)/(1+r)).
    None: fewer than three samples more than segments, or all at one time.
    """
    centred = [_centred(each) for each in segments if len(each) > 1]
    if not centred:
        return None
    times, values = (np.concatenate([each[i] for each in centred]) for i in (0, 1))
    spread = float(times @ times)
    free = len(times) - len(centred) - 1
    if free < 2 or spread == 0.0:
        return None
    rate = float(times @ values) / spread
    left = [each[1] - rate * each[0] for each in centred]
    total = float(sum(each @ each for each in left))
    repeated = sum(float(each[1:] @ each[:-1]) for each in left)
    correlation = min(max(repeated / total, 0.0), 0.99) if total > 0.0 else 0.0
    share = (1.0 - correlation) / (1.0 + correlation)
    effective = max(free * share, 1.0)
    error = math.sqrt(total / free / spread / share)
    width = float(stats.t.ppf((1.0 + CONFIDENCE) / 2.0, effective)) * error
    return Slope(rate * 3600, (rate - width) * 3600, (rate + width) * 3600, effective)


def _centred(samples: Sequence[tuple[float, float]]) -> tuple[Any, Any]:
    table = np.array(samples, dtype=float)
    return table[:, 0] - table[:, 0].mean(), table[:, 1] - table[:, 1].mean()


@dataclass(frozen=True)
class Sample:
    """What one process held at one time. `age_s`: of the process, at `at_s`."""

    at_s: float
    age_s: float
    role: str
    pid: int
    values: Mapping[str, float]


def growth(
    samples: Sequence[Sample], role: str, name: str, *, warm_up_s: float
) -> tuple[Slope | None, Slope | None]:
    """Of one figure of a role: growth while a process lives, and from process to process.

    The first: the common slope of all processes of the role, each from the age of `warm_up_s` on.
    The second: of the first sample of each at that age, over the time of the run: a replacement
    that begins larger than the one before shows a leak outside of the process. Processes that were
    older when the samples began have no value at that age. None: too few.
    """
    by_pid: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.role == role and sample.age_s >= warm_up_s and name in sample.values:
            by_pid[sample.pid].append(sample)
    series = [[(each.at_s, each.values[name]) for each in mine] for mine in by_pid.values()]
    at_age = [
        (first.at_s, first.values[name])
        for first in (mine[0] for mine in by_pid.values())
        if first.age_s < warm_up_s + SAME_AGE_S
    ]
    return slope(series), slope([at_age])


def level(samples: Sequence[Sample], role: str, name: str) -> float | None:
    """The median of a figure over all samples of a role."""
    values = [each.values[name] for each in samples if each.role == role and name in each.values]
    return quantile(values, 0.5)
