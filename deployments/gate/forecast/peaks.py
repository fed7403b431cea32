"""How much memory running answers will need at their worst: peaks of sampled futures.

An answer holds `used` tokens now and one more each step until it ends, `remaining` steps from now;
then all of it is free. The peak over time is what a pool must hold (the rule of "Past-Future",
arXiv 2507.10150, and of LightLLM's router). It has an incremental form for one more candidate. Pure
functions of arrays, in tokens and steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.deployments.prediction.distribution import Ints

LEAST = np.iinfo(np.int64).min


def sampled_peaks(used: Ints, remaining: Ints) -> Ints:
    """Peaks of futures: used [n], remaining [n, samples] -> [samples].

    With answers sorted by `remaining`, longest first, the k-th end finds the first k still there:
    peak = max_k (used_1 + ... + used_k + k * remaining_k). O(n log n) a sample.
    """
    if len(used) == 0:
        return np.zeros(remaining.shape[1], np.int64)
    order = np.argsort(-remaining, axis=0, kind="stable")
    ends = np.take_along_axis(remaining, order, 0)
    alive = np.arange(1, len(used) + 1)[:, None]
    peaks: Ints = (np.cumsum(used[order], axis=0) + alive * ends).max(axis=0)
    return peaks


@dataclass(frozen=True, slots=True)
class PeakIndex:
    """Sampled futures of the running answers, sorted once, to be asked about many candidates."""

    ends: Ints  # [n, samples] remaining steps, longest first
    sums: Ints  # [n + 1, samples] tokens used by the first k
    before: Ints  # [n + 1, samples] peak at the first k ends in this order; row 0: none
    joint: Ints  # [n, samples] use at each end, were one empty answer more there

    def peaks_with(self, used: int, remaining: Ints, after: int | None = None) -> Ints:
        """Peaks if one more answer ran: remaining [samples] -> [samples]. See `peaks_of`."""
        start = np.array([-1 if after is None else after])
        return self.peaks_of(np.array([used]), remaining[None, :], start)[0]

    def peaks_of(self, used: Ints, remaining: Ints, after: Ints) -> Ints:
        """Peaks for each of several answers, were it the one more.

        used [c], remaining [c or 1, samples], after [c] -> [c, samples]. Ends up to its own find
        the candidate there, with `used` and a token a step; later ends do not know of it; and its
        own end is a new place where the peak may be. If it only comes `after` that many steps, it
        does not meet what has ended by then, and the peaks are those from there on; -1: it comes
        now. One pass over [c, n, samples], nothing is sorted.
        """
        start = np.maximum(after, 0)[:, None]
        used = used[:, None]
        end = start + remaining
        is_later = self.ends > end[:, None, :]
        longer = np.count_nonzero(is_later, axis=1)  # answers that end after the candidate
        at = np.arange(remaining.shape[1])
        later = self.before[longer, at]
        own = self.sums[longer, at] + used + longer * end + remaining
        first = start - used
        meets = ~is_later
        if after.max() >= 0:
            meets &= self.ends > after[:, None, None]
        earlier = np.where(meets, self.joint, LEAST)
        earlier = np.maximum(earlier.max(axis=1, initial=LEAST), first)
        peaks: Ints = np.maximum(np.maximum(later, own), earlier - first)
        return peaks

    def num_after(self, steps: Ints) -> Ints:
        """steps [c] -> [c, samples] answers that still run after that many steps."""
        return np.count_nonzero(self.ends > steps[:, None, None], axis=1)


def index_of(used: Ints, remaining: Ints) -> PeakIndex:
    """Sort the running answers: used [n], remaining [n, samples]. O(n log n) a sample."""
    num, samples = remaining.shape
    order = np.argsort(-remaining, axis=0)
    ends: Ints = remaining[order, np.arange(samples)]
    none = np.zeros((1, samples), np.int64)
    sums = np.concatenate((none, np.cumsum(used[order], axis=0)))
    at_end = sums[1:] + np.arange(1, num + 1)[:, None] * ends
    before = np.concatenate((none, np.maximum.accumulate(at_end, axis=0)))
    joint: Ints = np.add(at_end, ends)
    return PeakIndex(ends, sums, before, joint)


def held_peaks(used: Ints, remaining: Ints, ceiling: Ints) -> Ints:
    """Peaks where answers may stop growing: used and remaining [n, samples], ceiling [n].

    An answer never exceeds its ceiling (what is used already stays), so it grows until step g and
    from then on holds what it has. Use at step e = what all that end at e or later will have held,
    less what those that still grow have not yet reached (g - e each). Largest at some end.
    O(n log n) a sample; `used` is per sample, for an answer may be over in one future and not in
    another (then it has 0 and 0).
    """
    num, samples = remaining.shape
    if num == 0:
        return np.zeros(samples, np.int64)
    grown = np.minimum(remaining, np.maximum(ceiling[:, None] - used, 0))
    order = np.argsort(-remaining, axis=0, kind="stable")
    ends = np.take_along_axis(remaining, order, 0)
    held = np.cumsum(np.take_along_axis(used + grown, order, 0), axis=0)
    # Per column: how many still grow at each end, and the sum of where they stop. One sorted array
    # for all columns: each is lifted above the one before.
    lift = (int(remaining.max()) + 1) * np.arange(samples)
    rising = np.sort(grown, axis=0)
    stopped = np.searchsorted((rising + lift).T.ravel(), (ends + lift).ravel(), side="left")
    stopped = stopped.reshape(num, samples) - num * np.arange(samples)
    sums = np.concatenate((np.zeros((1, samples), np.int64), np.cumsum(rising, axis=0)))
    to_come = (sums[-1] - np.take_along_axis(sums, stopped, 0)) - (num - stopped) * ends
    peaks: Ints = (held - to_come).max(axis=0)
    return peaks
