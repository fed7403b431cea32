"""The admission rule on sampled futures: does one more answer fit a worker?

An answer may join if the peak of all futures together, at a quantile, stays within what the worker
may use ("Past-Future", arXiv 2507.10150, with a quantile instead of a maximum). Also when it will
fit, if not now: the reservation of EASY backfill. A snapshot of one worker, in tokens and steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from penstock.deployments.gate.forecast.peaks import PeakIndex, held_peaks, index_of
from penstock.deployments.prediction.distribution import Ints

UNBOUNDED = 1 << 40  # the ceiling of an answer whose cache does not roll
MAX_PROBES = 64  # ends at which `fits_after` tests the rule
PROBES = 7  # tested at once: each round leaves an eighth


@dataclass(frozen=True, slots=True)
class Candidate:
    """An answer to admit."""

    used: int  # tokens it takes at once: its prompt, and what its last block may leave empty
    remaining: Ints  # [samples] steps to its end
    ceiling: int = UNBOUNDED  # tokens that it never exceeds, prompt included
    longest: int = UNBOUNDED  # tokens that it holds if it becomes as long as it may


def order_statistic(values: Ints, level: float) -> Ints:
    """[..., samples] -> [...]: the smallest that at least a share `level` do not exceed."""
    samples = values.shape[-1]
    place = min(max(math.ceil(level * samples - 1e-9), 1), samples) - 1
    statistic: Ints = np.partition(values, place)[..., place]
    return statistic


@dataclass(frozen=True, slots=True)
class SampledForecast:
    """What a worker's answers hold now, and their remaining steps in each sampled future."""

    capacity: int  # tokens of KV
    limit: int  # tokens that the peak may reach: less than the capacity by the headroom
    level: float  # of the quantile of peaks, such as 0.95
    slots: int  # answers that may still join
    used: Ints  # [n]
    remaining: Ints  # [n, samples]
    ceilings: Ints  # [n]
    _index: list[PeakIndex] = field(default_factory=list)  # made when first asked for
    _plain: list[bool] = field(default_factory=list)  # whether no cache rolls here; likewise

    def peak_with(self, candidate: Candidate) -> int:
        """The quantile of the peaks, were the candidate to join now."""
        if self._is_plain(candidate):
            peaks = self._sorted().peaks_with(candidate.used, candidate.remaining)
        else:
            peaks = held_peaks(*_joined(self._grid(), self.remaining, self.ceilings, candidate))
        return int(order_statistic(peaks, self.level))

    def admits(self, candidate: Candidate) -> bool:
        """The rule; on an empty worker an answer is admitted if its longest fits the capacity."""
        return self.peak_if_admitted(candidate) is not None

    def peak_if_admitted(self, candidate: Candidate) -> int | None:
        """The quantile of the peaks, were it to join now; None: it may not."""
        return self.peaks_if_admitted([candidate])[0]

    def peaks_if_admitted(self, candidates: Sequence[Candidate]) -> list[int | None]:
        """`peak_if_admitted` of each, were it the only one. Cheaper at once than one by one."""
        found: list[int | None] = [None] * len(candidates)
        num, used_now = len(self.used), int(self.used.sum())
        able = [
            i
            for i, each in enumerate(candidates)
            if self.slots > 0
            and each.longest <= self.capacity
            and (num == 0 or used_now + each.used <= self.limit)  # the peak is no less
        ]
        if not able:
            return found
        chosen = [candidates[i] for i in able]
        if all(map(self._is_plain, chosen)):
            used = np.array([each.used for each in chosen], np.int64)
            remaining = np.stack([each.remaining for each in chosen])
            peaks = self._sorted().peaks_of(used, remaining, np.full(len(chosen), -1))
            quantiles = order_statistic(peaks, self.level).tolist()
        else:
            quantiles = [self.peak_with(each) for each in chosen]
        for i, peak in zip(able, quantiles):
            if num == 0 or peak <= self.limit:
                found[i] = peak
        return found

    def joined_by(self, candidate: Candidate) -> SampledForecast:
        """The same worker with the candidate on it."""
        used, remaining, ceilings = _joined(self._grid(), self.remaining, self.ceilings, candidate)
        return replace(
            self,
            slots=self.slots - 1,
            used=used[:, 0],
            remaining=remaining,
            ceilings=ceilings,
            _index=[],
            _plain=[],
        )

    def fits_after(self, candidate: Candidate) -> int | None:
        """Steps until the candidate may join if no other does; None: never.

        A search over the ends of sampled futures, a few at once. The rule is not quite monotone in
        time, so an earlier moment may exist; but at this one it holds.
        """
        if candidate.longest > self.capacity:
            return None
        if self.admits(candidate):
            return 0
        if self.remaining.size == 0:
            return None  # empty and yet not admitted: it has no slots
        ends = self._ends()
        low, high = 0, len(ends) - 1  # after the last end the worker is empty
        while low < high:
            places = _spread(low, high - 1, PROBES)
            holds = self._admits_after(ends[places], candidate)
            if not holds.any():
                low = high if places[-1] == high - 1 else int(places[-1]) + 1
                continue
            first = int(holds.argmax())
            high = int(places[first])
            low = int(places[first - 1]) + 1 if first else low
        return int(ends[high])

    def admits_after(self, steps: int, candidate: Candidate) -> bool:
        """The rule `steps` from now: an answer that ends at that step is gone."""
        return bool(self._admits_after(np.array([steps]), candidate)[0])

    def _admits_after(self, steps: Ints, candidate: Candidate) -> NDArray[np.bool_]:
        """[c] -> [c]."""
        if candidate.longest > self.capacity:
            return np.zeros(len(steps), np.bool_)
        num_alive = self._sorted().num_after(steps)
        is_empty = ~num_alive.any(axis=1)
        if self._is_plain(candidate):
            used = np.array([candidate.used])
            peaks = self._sorted().peaks_of(used, candidate.remaining[None, :], steps, num_alive)
            fits = order_statistic(peaks, self.level) <= self.limit
        else:
            fits = np.array([self._holds_after(each, candidate) for each in steps.tolist()])
        holds: NDArray[np.bool_] = is_empty | fits
        if self.slots < 1:  # at the quantile, too
            free = len(self.used) + self.slots - num_alive
            holds &= order_statistic(-free, self.level) <= -1
        return holds

    def _holds_after(self, steps: int, candidate: Candidate) -> bool:
        """Where caches roll: one moment at a time."""
        alive = self.remaining > steps
        grown = np.maximum(np.minimum(self._grid() + steps, self.ceilings[:, None]), self._grid())
        used = np.where(alive, grown, 0)
        left = np.where(alive, self.remaining - steps, 0)
        peaks = held_peaks(*_joined(used, left, self.ceilings, candidate))
        return bool(order_statistic(peaks, self.level) <= self.limit)

    def _ends(self) -> Ints:
        """Up to MAX_PROBES of the moments at which an answer ends in some future, in order."""
        ends = np.sort(self.remaining, axis=None)
        ends = ends[np.append(True, ends[1:] != ends[:-1])]  # each once
        found: Ints = ends[_spread(0, len(ends) - 1, MAX_PROBES)]
        return found

    def _is_plain(self, candidate: Candidate) -> bool:
        """No answer here has a rolling cache."""
        if not self._plain:
            self._plain.append(bool((self.ceilings == UNBOUNDED).all()))
        return candidate.ceiling == UNBOUNDED and self._plain[0]

    def _sorted(self) -> PeakIndex:
        if not self._index:
            self._index.append(index_of(self.used, self.remaining))
        return self._index[0]

    def _grid(self) -> Ints:
        """[n, samples] of what is used now."""
        return np.broadcast_to(self.used[:, None], self.remaining.shape)


def _spread(first: int, last: int, most: int) -> Ints:
    """Up to `most` whole numbers from `first` to `last`, both included, evenly."""
    num = min(most, last - first + 1)
    if num == 1:
        return np.array([first])
    return first + np.arange(num) * (last - first) // (num - 1)


def _joined(
    used: Ints, remaining: Ints, ceilings: Ints, candidate: Candidate
) -> tuple[Ints, Ints, Ints]:
    own = np.full((1, remaining.shape[1]), candidate.used, np.int64)
    return (
        np.concatenate((used, own)),
        np.concatenate((remaining, candidate.remaining[None, :])),
        np.append(ceilings, candidate.ceiling),
    )
