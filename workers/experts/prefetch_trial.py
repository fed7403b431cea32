"""Whether prefetching experts pays, found out by trying: `expert_prefetch: auto`.

It depends on the link, the cache, the router's skew and how well the next layer is predicted, and
on a slow link a wrong prefetch costs more than it saves. So steps are timed in turns with and
without it, in pairs that lie close together. Once the pairs agree, the faster way is kept, for
longer each time that a new trial confirms it: trials then cost little, and traffic that has
changed is noticed.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

TURN_STEPS = 8  # with prefetch, or without
SKIPPED_STEPS = 2  # of a turn: they find what the turn before had cached
LEAST_PAIRS, MOST_PAIRS = 6, 24
SURE = 2.0  # standard errors of the mean
WORTH = 0.01  # of the step: a smaller gain counts as none, and prefetch stays off
FIRST_HOLD, LONGEST_HOLD = 1024, 32_768  # steps until the next trial


@dataclass(slots=True)
class PrefetchTrial:
    """Fed with the time of each step that does not need all experts; `is_on` is for the next."""

    is_on: bool = False
    num_trials: int = 0  # that have ended
    _is_trying: bool = True
    _left: int = TURN_STEPS  # steps of this turn, or until the next trial
    _hold: int = FIRST_HOLD
    _decided: bool = False
    _turn: list[tuple[int, float]] = field(default_factory=list)  # rows and seconds
    _other: dict[int, float] | None = None  # the turn before, of this pair
    _gains: list[float] = field(default_factory=list)  # log of seconds without over with
    _num_pairs: int = 0  # of this trial, those included that cannot be compared

    def observe(self, seconds: float, num_rows: int) -> None:
        """A step with `num_rows` rows took `seconds`."""
        self._left -= 1
        if not self._is_trying:
            if self._left <= 0:
                self._begin()
            return
        if self._left < TURN_STEPS - SKIPPED_STEPS and seconds > 0:
            self._turn.append((num_rows, seconds))
        if self._left <= 0:
            self._end_turn()

    def _begin(self) -> None:
        self._is_trying, self._left = True, TURN_STEPS
        self._gains, self._other, self._turn, self._num_pairs = [], None, [], 0

    def _end_turn(self) -> None:
        """Compare with the turn before, for sizes of steps that both had."""
        mine = _by_rows(self._turn)
        if self._other is None:
            self._other = mine
        else:
            shared = mine.keys() & self._other.keys()
            if shared:
                ratio = statistics.fmean(math.log(self._other[n] / mine[n]) for n in shared)
                # `mine` is the later turn of the pair.
                self._gains.append(ratio if self.is_on else -ratio)
            self._other = None
            self._num_pairs += 1
        self._turn, self._left = [], TURN_STEPS
        # A pair begins with the way that ended the last one: a drift of the machine's speed
        # favours neither.
        if self._other is not None:
            self.is_on = not self.is_on
        elif self._is_over():
            self._decide()

    def _is_over(self) -> bool:
        num = len(self._gains)
        if num < LEAST_PAIRS:
            return self._num_pairs >= MOST_PAIRS
        error = statistics.stdev(self._gains) / math.sqrt(num)
        is_clear = abs(statistics.fmean(self._gains) - WORTH) > SURE * error
        return is_clear or self._num_pairs >= MOST_PAIRS

    def _decide(self) -> None:
        is_known = len(self._gains) >= LEAST_PAIRS
        pays = is_known and statistics.fmean(self._gains) > WORTH
        confirmed = self.num_trials > 0 and pays == self._decided
        self._hold = min(2 * self._hold, LONGEST_HOLD) if confirmed else FIRST_HOLD
        self.is_on = self._decided = pays
        self.num_trials += 1
        self._is_trying, self._left = False, self._hold


def _by_rows(steps: list[tuple[int, float]]) -> dict[int, float]:
    """Median seconds by number of rows, in octaves."""
    found: dict[int, list[float]] = {}
    for rows, seconds in steps:
        found.setdefault(rows.bit_length(), []).append(seconds)
    return {rows: statistics.median(each) for rows, each in found.items()}
