"""Hazards counted, not fitted: Kaplan-Meier on bins, each group shrunk towards the wider one.

Each group counts how many answers reached each bin and how many ended there. Groups form a path
from the widest (all traffic) to the narrowest (one template of one tenant); a narrow group with few
observations follows the other requests of its parent, bin by bin:
h = (events + 8 h_others) / (at_risk + 8). "The others" and not "the parent": where all traffic is
one group, its answers would count twice, and the prediction would follow their noise (6.78 nats
against 6.76 in the benchmark). Old counts fade by 0.999 a completion, a half-life of about 700.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.deployments.prediction.distribution import (
    KNOTS,
    MAX_HAZARD,
    MAX_LENGTH,
    MIN_HAZARD,
    NUM_BINS,
    WIDTHS,
    Floats,
    cumulative_hazard,
)

DECAY = 0.999
# Weight of the other requests' hazard in each bin, in answers; it adds up over bins. For a template
# of 900-token answers among short ones the predicted median after 150 answers was 563 with 20, 753
# with 8 and 810 with 4; for Azure's and PPL's requests together 8 predicted best.
SHRINKAGE = 8.0
PRIOR_WEIGHT = 2.0  # and the prior's, at the top
PRIOR_MEDIAN, PRIOR_SIGMA = 150.0, 1.2  # log-normal: chat traffic, broadly
PRIOR_CANCEL = 1e-3  # cancelled per bin, before anything is known
MAX_GROUPS = 8192  # of 1 kB each
MAX_CACHED = 4096  # paths whose hazards are cached until counts change, of up to 2 kB each
_KNOT_LIST: list[int] = KNOTS.tolist()


@dataclass(frozen=True, slots=True)
class Exposure:
    """One answer's evidence about one way of ending: exposure, and the event if any.

    Only of the bins from `first` on that were watched: what a running answer adds lies in a few.
    """

    first: int
    at_risk: Floats  # [m] 0..1: share of each bin in which the end could have been seen
    event: int | None  # the bin in which it came; None: something else ended the watch first

    @property
    def bins(self) -> slice:
        """The bins that were watched."""
        return slice(self.first, self.first + len(self.at_risk))


def exposure(start: int, end: int, event: bool, limit: int | None = None) -> Exposure:
    """The watch from token `start` (exclusive) to token `end`, with the end itself if `event`.

    `start` is above 0 where the end was impossible at first (min_tokens). `limit` is how far the
    answer could have been watched at all (max_tokens): in the limit's own bin an ending counts
    with the same share as a cut does, or the ones that ended would weigh too much.
    """
    end = min(max(end, 1 if event else 0), MAX_LENGTH)
    last = max(bisect_left(_KNOT_LIST, end) - 1, 0)  # as bin_of
    first = min(max(bisect_right(_KNOT_LIST, start) - 1, 0), last)
    watched = [1.0] * (last + 1 - first)
    watched[-1] = _reached(last, end)
    place = None
    if event:
        place = last
        reach = MAX_LENGTH if limit is None else max(limit, end)
        watched[-1] = _reached(place, reach)
    if start > 0:
        watched[0] = max(watched[0] - _reached(first, start), 0.0)
        if place == first and watched[0] <= 0.0:
            place = None  # ended before min_tokens by a limit that others enforce: no evidence
    return Exposure(first, np.array(watched), place)


def exposures(starts: Sequence[int], ends: Sequence[int]) -> Floats:
    """[n, bins] `at_risk` of several answers that go on, of all bins."""
    reached = np.array((ends, starts))[..., None]  # [2, n, 1]
    shares = np.minimum(np.maximum((reached - KNOTS[:-1]) / WIDTHS, 0.0), 1.0)
    seen: Floats = shares[0] - shares[1]
    return seen


def _reached(place: int, length: int) -> float:
    """The share of a bin that lies below `length`."""
    low = _KNOT_LIST[place]
    return min(max((length - low) / (_KNOT_LIST[place + 1] - low), 0.0), 1.0)


@dataclass(slots=True)
class Counts:
    """Answers that reached each bin, and those that ended in it; both fade."""

    both: Floats = field(default_factory=lambda: np.zeros((2, NUM_BINS)))

    @property
    def events(self) -> Floats:
        return self.both[0]

    @property
    def at_risk(self) -> Floats:
        return self.both[1]

    def watch(self, seen: Exposure) -> None:
        """Add exposure of an answer that still runs: nothing fades, as none has ended."""
        self.both[1, seen.bins] += seen.at_risk

    def add(self, seen: Exposure) -> None:
        """Add the rest of the exposure of an answer that has ended."""
        self.both *= DECAY
        self.watch(seen)
        if seen.event is not None:
            self.both[0, seen.event] += 1.0


class HazardTree:
    """Hazards by group, for one way of ending. Holds at most `max_groups`, the newest used."""

    def __init__(self, prior: Floats, max_groups: int = MAX_GROUPS):
        self.prior = prior  # [bins]
        self.groups: OrderedDict[Hashable, Counts] = OrderedDict()
        self._max_groups = max_groups
        # Hazards since counts changed last, by path: many requests come between two changes.
        self._cached: dict[Hashable, tuple[Floats, ...]] = {}

    def hazards(self, path: Sequence[Hashable]) -> Floats:
        """[bins] for the last group of `path`, which goes from the widest to the narrowest."""
        return self._of_path(tuple(path))[0]

    def cumulative(self, path: Sequence[Hashable]) -> Floats:
        """[bins + 1] of `hazards(path)`, as `cumulative_hazard` has it. Not to be written to."""
        key = ("cumulative", *path)
        if key not in self._cached:
            self._cached[key] = (cumulative_hazard(self.hazards(path)),)
        return self._cached[key][0]

    def hazards_and_finer(self, path: Sequence[Hashable], finer: Hashable) -> Floats:
        """[2, bins]: `hazards(path)` and `hazards([*path, finer])`, the shared part done once."""
        return self.hazards_of([(path, finer)])[0]

    def hazards_of(self, answers: Iterable[tuple[Sequence[Hashable], Hashable]]) -> Floats:
        """[n, 2, bins]: `hazards_and_finer` of each."""
        found = []
        for path, finer in answers:
            shared = tuple(path)
            found += [self._of_path(shared)[0], self._finer(shared, finer)]
        return np.array(found).reshape(-1, 2, NUM_BINS)

    def _of_path(self, path: tuple[Hashable, ...]) -> tuple[Floats, ...]:
        """[bins] its hazards; [2, bins] counts of its last group; [bins] hazards of the groups
        above that one, and the weight with which it shrinks towards them."""
        if (found := self._cached.get(path)) is None:
            if len(self._cached) >= MAX_CACHED:
                self._cached.clear()
            *above, last = self._own_counts(path) or [_NOTHING]
            h, weight = _borrowing(self.prior, PRIOR_WEIGHT, above)
            own = _within(_borrowing(h, weight, [last])[0])
            found = self._cached[path] = own, last, h, np.asarray(weight)
        return found

    def _finer(self, path: tuple[Hashable, ...], finer: Hashable) -> Floats:
        """[bins] for the group `finer`, within the last one of `path`."""
        own, last, h, weight = self._of_path(path)
        if (counts := self.groups.get(finer)) is None:
            return own
        key = (path, finer)
        if key not in self._cached:
            pair = [_others(last, counts.both), counts.both]
            self._cached[key] = (_within(_borrowing(h, weight, pair)[0]),)
        return self._cached[key][0]

    def weights(self, path: Sequence[Hashable], place: int) -> list[float]:
        """What prior and groups contribute to the hazard of one bin; sums up to 1.

        A group's share is that of its answers which are in no narrower group of the path.
        """
        shares, weight = [1.0], PRIOR_WEIGHT
        for counts in self._own_counts(path):
            reached = float(counts[1][place]) + weight
            own = 1.0 - weight / reached
            shares = [(1.0 - own) * share for share in shares] + [own]
            weight = min(reached, SHRINKAGE)
        return shares + [0.0] * (1 + len(path) - len(shares))

    def _own_counts(self, path: Sequence[Hashable]) -> list[Floats]:
        """[2, bins] of each known group: its counts without those of the next one in the path."""
        known = [counts.both for key in path if (counts := self.groups.get(key))]
        if len(known) < 2:
            return known
        groups = np.array(known)
        return [*_others(groups[:-1], groups[1:]), known[-1]]

    def watch(self, path: Sequence[Hashable], seen: Exposure) -> None:
        """Count exposure of an answer that still runs."""
        for counts in self._used(path):
            counts.watch(seen)

    def watch_sums(self, groups: Iterable[Hashable], at_risk: Floats) -> None:
        """The same of several answers: [groups, bins] what the answers of each group add."""
        for counts, added in zip(self._used(groups), at_risk):
            counts.both[1] += added

    def add(self, path: Sequence[Hashable], seen: Exposure) -> None:
        """Count the end; `seen` leaves out what `watch` has counted."""
        for counts in self._used(path):
            counts.add(seen)

    def _used(self, groups: Iterable[Hashable]) -> list[Counts]:
        """The counts of each of these groups, which change; made if missing. Drops the least
        recently used."""
        self._cached.clear()
        used = []
        for key in groups:
            counts = self.groups.get(key)
            if counts is None:
                counts = self.groups[key] = Counts()
            else:
                self.groups.move_to_end(key)
            used.append(counts)
        while len(self.groups) > self._max_groups:
            self.groups.popitem(last=False)
        return used


_NOTHING = np.zeros((2, NUM_BINS))


def _within(h: Floats) -> Floats:
    return np.minimum(np.maximum(h, MIN_HAZARD), MAX_HAZARD)


def _others(parent: Floats, child: Floats) -> Floats:
    """[..., 2, bins] what the parent counted in addition to the child.

    Counts fade at different rates, so a child may have more than its parent: then there are none.
    """
    left = np.maximum(parent - child, 0.0)
    np.maximum(left[..., 1, :], left[..., 0, :], out=left[..., 1, :])
    return left


def _borrowing(
    h: Floats, weight: Floats | float, counts: Sequence[Floats]
) -> tuple[Floats, Floats | float]:
    """Hazards after each of `counts` has shrunk to the ones before, and what those are worth."""
    for events, at_risk in counts:
        reached = at_risk + weight
        h = (events + weight * h) / reached
        weight = np.minimum(reached, SHRINKAGE)
    return h, weight


def length_prior() -> Floats:
    """[bins] hazards of the log-normal prior, used until answers are observed."""
    alive = [1.0] + [
        0.5 * math.erfc((math.log(knot / PRIOR_MEDIAN)) / (PRIOR_SIGMA * math.sqrt(2.0)))
        for knot in KNOTS[1:].tolist()
    ]
    survival = np.array(alive)
    return np.clip(1.0 - survival[1:] / survival[:-1], MIN_HAZARD, MAX_HAZARD)


def cancel_prior() -> Floats:
    """[bins] prior hazards of the client leaving."""
    return np.full(NUM_BINS, PRIOR_CANCEL)
