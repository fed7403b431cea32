"""Is there room on a worker for one more answer? The rule of admission, on sampled futures.

An answer may join if the peak of all futures together, at a quantile, stays within what the worker
may use ("Past-Future", arXiv 2507.10150, with a quantile instead of a maximum). Also when it could
join, if not now: the reservation of EASY backfill. A still picture of one worker at one moment, in
tokens and steps; knows nothing of who keeps it, of tenants or of queues.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.deployments.future_peak import PeakIndex, held_peaks, index_of
from penstock.deployments.length_distribution import Floats, Ints

UNBOUNDED = 1 << 40  # the ceiling of an answer whose cache does not roll
MAX_PROBES = 64  # ends at which it is asked whether an answer fits


@dataclass(frozen=True, slots=True)
class Candidate:
    """An answer that wants to join."""

    used: int  # tokens it takes at once: its prompt, and what its last block may leave empty
    remaining: Ints  # [samples] steps to its end
    ceiling: int = UNBOUNDED  # tokens that it never exceeds, prompt included
    longest: int = UNBOUNDED  # tokens that it holds if it becomes as long as it may
    survival: list[Floats] = field(default_factory=list, compare=False)  # gate_grid's, once made


def order_statistic(values: Ints, level: float) -> int:
    """The smallest of `values` [samples] that at least a share `level` of them do not exceed."""
    place = min(max(math.ceil(level * len(values) - 1e-9), 1), len(values)) - 1
    return int(np.partition(values, place)[place])


@dataclass(frozen=True, slots=True)
class Room:
    """What a worker's answers hold now and in each sampled future."""

    capacity: int  # tokens of KV
    limit: int  # tokens that the peak may reach: less than the capacity by the headroom
    level: float  # of the quantile of peaks, such as 0.95
    slots: int  # answers that may still join
    used: Ints  # [n]
    remaining: Ints  # [n, samples]
    ceilings: Ints  # [n]
    _index: list[PeakIndex] = field(default_factory=list)  # made when first asked for

    def peak_with(self, candidate: Candidate) -> int:
        """The quantile of the peaks, were the candidate to join now."""
        if self._is_plain(candidate):
            peaks = self._sorted().peaks_with(candidate.used, candidate.remaining)
        else:
            peaks = held_peaks(*_joined(self._grid(), self.remaining, self.ceilings, candidate))
        return order_statistic(peaks, self.level)

    def admits(self, candidate: Candidate) -> bool:
        """The rule. Alone on a worker, all may try that cannot outgrow it: nobody is in danger."""
        return self.peak_if_admitted(candidate) is not None

    def peak_if_admitted(self, candidate: Candidate) -> int | None:
        """The quantile of the peaks, were it to join now; None: it may not."""
        if self.slots < 1 or candidate.longest > self.capacity:
            return None
        peak = self.peak_with(candidate)
        return peak if len(self.used) == 0 or peak <= self.limit else None

    def joined_by(self, candidate: Candidate) -> Room:
        """The same worker with the candidate on it."""
        used, remaining, ceilings = _joined(self._grid(), self.remaining, self.ceilings, candidate)
        return replace(
            self,
            slots=self.slots - 1,
            used=used[:, 0],
            remaining=remaining,
            ceilings=ceilings,
            _index=[],
        )

    def fits_after(self, candidate: Candidate) -> int | None:
        """Steps until the candidate may join if nobody else does; None: never.

        Bisection over the ends of sampled futures. The rule is not quite monotone in time, so an
        earlier moment may exist; but at this one it holds.
        """
        if candidate.longest > self.capacity:
            return None
        if self.admits(candidate):
            return 0
        ends = np.unique(self.remaining)
        if len(ends) == 0:
            return None  # empty and yet not admitted: it has no slots
        ends = ends[np.unique(np.linspace(0, len(ends) - 1, MAX_PROBES).astype(np.int64))]
        low, high = 0, len(ends) - 1  # after the last end the worker is empty
        while low < high:
            middle = (low + high) // 2
            if self.admits_after(int(ends[middle]), candidate):
                high = middle
            else:
                low = middle + 1
        return int(ends[high])

    def admits_after(self, steps: int, candidate: Candidate) -> bool:
        """The rule once so many steps have passed: an answer ending at that step is gone."""
        if candidate.longest > self.capacity:
            return False
        num_alive = self._sorted().num_after(steps)
        free = len(self.used) + self.slots - num_alive
        if order_statistic(-free, self.level) > -1:
            return False  # slots are a matter of the quantile, too
        if not num_alive.any():
            return True
        if self._is_plain(candidate):
            peaks = self._sorted().peaks_with(candidate.used, candidate.remaining, steps)
            return order_statistic(peaks, self.level) <= self.limit
        alive = self.remaining > steps
        grown = np.maximum(np.minimum(self._grid() + steps, self.ceilings[:, None]), self._grid())
        used = np.where(alive, grown, 0)
        left = np.where(alive, self.remaining - steps, 0)
        peaks = held_peaks(*_joined(used, left, self.ceilings, candidate))
        return order_statistic(peaks, self.level) <= self.limit

    def _is_plain(self, candidate: Candidate) -> bool:
        """Nobody's cache rolls."""
        return candidate.ceiling == UNBOUNDED and bool((self.ceilings == UNBOUNDED).all())

    def _sorted(self) -> PeakIndex:
        if not self._index:
            self._index.append(index_of(self.used, self.remaining))
        return self._index[0]

    def _grid(self) -> Ints:
        """[n, samples] of what is used now."""
        return np.broadcast_to(self.used[:, None], self.remaining.shape)


def _joined(
    used: Ints, remaining: Ints, ceilings: Ints, candidate: Candidate
) -> tuple[Ints, Ints, Ints]:
    own = np.full((1, remaining.shape[1]), candidate.used, np.int64)
    return (
        np.concatenate((used, own)),
        np.concatenate((remaining, candidate.remaining[None, :])),
        np.append(ceilings, candidate.ceiling),
    )
