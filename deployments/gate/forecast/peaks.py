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
FARTHEST = 1 << 22  # steps: no answer has more to go (twice the longest that is predicted)
USED_BITS = 40  # of the tokens that an answer uses, beside the steps in one number


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
    """Sampled futures of the running answers, sorted once, to be asked about many candidates.

    In each row the answers of one future, the one that runs longest first.
    """

    places: Ints  # [samples * n] how soon each ends, each row plus an offset: sorted
    offset: Ints  # [samples] the place of an end that is now
    base: Ints  # [samples] where a row of `places` begins
    sums: Ints  # [samples, n + 1] tokens used by the first k
    before: Ints  # [samples, n + 1] peak at the first k ends in this order; column 0: none
    joint: Ints  # [samples, n + 1] use at each end, were one empty answer more there; then LEAST
    tail: Ints  # [samples, n + 1] the largest of `joint` from the k-th on

    def peaks_with(self, used: int, remaining: Ints, after: int | None = None) -> Ints:
        """Peaks if one more answer ran: remaining [samples] -> [samples]. See `peaks_of`."""
        start = np.array([-1 if after is None else after])
        return self.peaks_of(np.array([used]), remaining[None, :], start)[0]

    def peaks_of(
        self, used: Ints, remaining: Ints, after: Ints, num_after: Ints | None = None
    ) -> Ints:
        """Peaks for each of several answers, were it the one more.

        used [c], remaining [c or 1, samples], after [c] -> [c, samples]. Ends up to its own find
        the candidate there, with `used` and a token a step; later ends do not know of it; and its
        own end is a new place where the peak may be. If it only comes `after` that many steps, it
        does not meet what has ended by then, and the peaks are those from there on; -1: it comes
        now. `num_after`: what the method says of `after`, if it was asked. A search for each future
        of each candidate, nothing is sorted.
        """
        start = np.maximum(after, 0)[:, None]
        used = used[:, None]
        end = start + remaining
        longer = self._num_longer(end)  # answers that end after the candidate
        at = np.arange(remaining.shape[1])
        later = self.before[at, longer]
        own = self.sums[at, longer] + used + longer * end + remaining
        first = start - used
        if after.max() < 0:
            earlier = self.tail[at, longer]
        else:
            last = self.num_after(after) if num_after is None else num_after
            earlier = self._most_between(longer, last)
        peaks: Ints = np.maximum(np.maximum(later, own), np.maximum(earlier, first) - first)
        return peaks

    def num_after(self, steps: Ints) -> Ints:
        """steps [c] -> [c, samples] answers that still run after that many steps."""
        return self._num_longer(steps[:, None])

    def _num_longer(self, steps: Ints) -> Ints:
        """[c, samples or 1] -> [c, samples] answers of each future with more steps to go."""
        found: Ints = self.places.searchsorted(self.offset - steps)
        return found - self.base

    def _most_between(self, first: Ints, last: Ints) -> Ints:
        """[c, samples] the largest of `joint` from the `first` on, without `last`; LEAST: none."""
        row = np.arange(len(self.base)) * self.joint.shape[1]
        bounds = np.empty((*first.shape, 2), np.int64)
        np.add(first, row, out=bounds[..., 0])
        np.add(last, row, out=bounds[..., 1])
        most = np.maximum.reduceat(self.joint.ravel(), bounds.ravel())[::2]
        return np.where(last > first, most.reshape(first.shape), LEAST)


def index_of(used: Ints, remaining: Ints) -> PeakIndex:
    """Sort the running answers: used [n], remaining [n, samples]. O(n log n) a sample.

    Each is one number while they are sorted: how soon it ends, then what it uses.
    """
    num, samples = remaining.shape
    keys = ((FARTHEST - remaining.T) << USED_BITS) | used
    keys.sort(axis=1)
    soon = keys >> USED_BITS
    sums = np.zeros((samples, num + 1), np.int64)
    np.cumsum(keys & ((1 << USED_BITS) - 1), axis=1, out=sums[:, 1:])
    ends = FARTHEST - soon
    at_end = sums[:, 1:] + np.arange(1, num + 1) * ends
    before = np.zeros((samples, num + 1), np.int64)
    np.maximum.accumulate(at_end, axis=1, out=before[:, 1:])
    joint = np.full((samples, num + 1), LEAST)
    np.add(at_end, ends, out=joint[:, :-1])
    tail: Ints = np.maximum.accumulate(joint[:, ::-1], axis=1)[:, ::-1]
    row = np.arange(samples)
    offset = (2 * FARTHEST) * row
    places = (soon + offset[:, None]).ravel()
    return PeakIndex(places, offset + FARTHEST, num * row, sums, before, joint, tail)


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
    # for all columns: each has a larger offset than the one before.
    offset = (int(remaining.max()) + 1) * np.arange(samples)
    rising = np.sort(grown, axis=0)
    stopped = np.searchsorted((rising + offset).T.ravel(), (ends + offset).ravel(), side="left")
    stopped = stopped.reshape(num, samples) - num * np.arange(samples)
    sums = np.concatenate((np.zeros((1, samples), np.int64), np.cumsum(rising, axis=0)))
    to_come = (sums[-1] - np.take_along_axis(sums, stopped, 0)) - (num - stopped) * ends
    peaks: Ints = (held - to_come).max(axis=0)
    return peaks
