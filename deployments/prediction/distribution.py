"""The predicted length of an answer as a distribution: survival over log-spaced bins.

Gives quantiles, means and sampled futures, also conditioned on the `generated` tokens that an
answer already has.

Bin k holds the lengths KNOTS[k] < L <= KNOTS[k + 1]; inside a bin all lengths are equally likely.
A distribution is kept as its cumulative hazard -ln P(L > KNOTS), which stays exact in the far tail,
where long-running answers are: P(L > t + s | L > t) is a difference of two of its values.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_LENGTH = 1 << 20
GROWTH = 1.22
MIN_HAZARD, MAX_HAZARD = 1e-7, 1.0 - 1e-7
_TINY = 1e-300
_SLACK = 1e-6  # of a token: rounding must not push a quantile to the next length


def _make_knots() -> Ints:
    knots = [0, 1]
    while knots[-1] < MAX_LENGTH:
        knots.append(min(MAX_LENGTH, max(knots[-1] + 1, round(GROWTH * knots[-1]))))
    return np.array(knots, np.int64)


KNOTS = _make_knots()  # [bins + 1]
WIDTHS = np.diff(KNOTS)  # [bins]
NUM_BINS = len(WIDTHS)
_KNOTS = KNOTS.astype(np.float64)
_WIDTHS = WIDTHS.astype(np.float64)
_FIRST = np.zeros((1, 1), np.int64)
_KNOT_LIST: list[int] = KNOTS.tolist()  # single look-ups are faster in plain numbers


def _width(k: int) -> int:
    return _KNOT_LIST[k + 1] - _KNOT_LIST[k]


def bin_of(length: int) -> int:
    """The bin whose lengths include `length`; lengths outside of 1..MAX_LENGTH go to the ends."""
    return int(np.searchsorted(KNOTS, min(max(length, 1), MAX_LENGTH), side="left")) - 1


def cumulative_hazard(hazards: Floats) -> Floats:
    """[..., bins] hazards P(L in bin | L reaches it) -> [..., bins + 1], 0 at the left end."""
    total = np.zeros((*hazards.shape[:-1], NUM_BINS + 1))
    steps = total[..., 1:]
    np.minimum(np.maximum(hazards, MIN_HAZARD), MAX_HAZARD, out=steps)
    np.negative(np.log1p(np.negative(steps, out=steps), out=steps), out=steps)
    np.cumsum(steps, axis=-1, out=steps)
    return total


@dataclass(frozen=True)
class LengthDistribution:
    """Distribution of one answer's length in tokens, known to exceed `generated`.

    Lengths are of the whole answer, including what is generated already. With `max_tokens` it is
    the distribution of min(L, max_tokens); up to `min_tokens` no answer ends. Immutable: `given`
    makes a new one.
    """

    cumulative: Floats  # [bins + 1] of the natural length, neither cut nor conditioned
    max_tokens: int | None = None
    generated: int = 0
    min_tokens: int = 0

    def given(self, generated: int) -> LengthDistribution:
        """Conditioned on an answer that has `generated` tokens and has not ended."""
        if generated < 0:
            raise ValueError(f"generated must be 0 or more, not {generated}")
        return replace(self, generated=generated)

    def survival(self, length: int) -> float:
        """P(answer longer than `length`)."""
        if length < max(self.generated, self.min_tokens):
            return 1.0
        if self.max_tokens is not None and length >= self.max_tokens:
            return 0.0
        return math.exp(self._hazard_at(self._now) - self._hazard_at(min(length, MAX_LENGTH)))

    def quantile(self, level: float) -> int:
        """The smallest length that the answer stays within with probability `level` (0 to 1)."""
        if not 0.0 <= level <= 1.0:
            raise ValueError(f"the level of a quantile is between 0 and 1, not {level}")
        return self.ceiling if level == 1.0 else self.sample(level)

    def sample(self, uniform: float) -> int:
        """The length that inverse transform gives for a uniform number in [0, 1)."""
        target = self._hazard_at(self._now) - math.log1p(-uniform)
        k = int(self.cumulative.searchsorted(target, side="right")) - 1
        k = min(max(k, 0), NUM_BINS - 1)
        low, died = self._bin(k)
        share = min(-math.expm1(low - target) / max(died, _TINY), 1.0)
        length = math.ceil(_KNOT_LIST[k] + share * _width(k) - _SLACK)
        return max(min(max(length, self._now + 1), self.ceiling), self.generated)

    def sample_remaining(self, generated: int, uniforms: Floats) -> Ints:
        """Tokens still to come: inverse transform of P(L > t + s | L > t).

        uniforms [samples] in [0, 1) -> [samples] whole tokens, at least 1 for an answer below its
        limit and 0 at it. With the same `uniforms` at every call futures only shrink as tokens come
        (common random numbers).
        """
        now = min(max(generated, self.min_tokens), MAX_LENGTH)
        target = -np.log1p(-uniforms)
        if now > 0:
            target += hazards_at(self.cumulative, _FIRST, np.array([[now]]))[0]
        k = places_of(self.cumulative, _FIRST, target)[0]
        low = self.cumulative[k]
        length = lengths_in(k, low, -np.expm1(low - self.cumulative[k + 1]), target)
        most = MAX_LENGTH if self.max_tokens is None else self.max_tokens
        return np.maximum(np.minimum(np.maximum(length, now + 1), most) - generated, 0)

    @property
    def ceiling(self) -> int:
        """No answer is longer than this."""
        bound = MAX_LENGTH if self.max_tokens is None else self.max_tokens
        return max(bound, self.generated)

    @cached_property
    def mean(self) -> float:
        """The expected length."""
        if self.ceiling == self.generated:
            return float(self.generated)
        start, end = min(max(self.generated, self.min_tokens), self.ceiling), self.ceiling
        first, last = bisect_right(_KNOT_LIST, start), bisect_left(_KNOT_LIST, end)
        now = self._hazard_at(self._now)
        left = math.exp(now - self._hazard_at(min(end, MAX_LENGTH)))
        # Sum of P(L > s) over whole s, which is linear between knots.
        total = start + (1.0 - left) / 2
        if first >= last:
            return total + (end - start) * (1.0 + left) / 2
        alive = np.exp(now - self.cumulative[first:last])
        before, after = _KNOT_LIST[first] - start, end - _KNOT_LIST[last - 1]
        outer = before * (1.0 + float(alive[0])) + after * (float(alive[-1]) + left)
        inner = float((_WIDTHS[first : last - 1] * (alive[:-1] + alive[1:])).sum())
        return total + (outer + inner) / 2

    @property
    def _now(self) -> int:
        """The length up to which it is certain that the answer goes on."""
        return min(max(self.generated, self.min_tokens), MAX_LENGTH)

    def _bin(self, k: int) -> tuple[float, float]:
        """Cumulative hazard at the bin's left end, and P(ends in it | reaches it)."""
        low = float(self.cumulative[k])
        return low, -math.expm1(low - float(self.cumulative[k + 1]))

    def _hazard_at(self, length: int) -> float:
        if length == 0:
            return 0.0
        k = min(bisect_right(_KNOT_LIST, length) - 1, NUM_BINS - 1)
        low, died = self._bin(k)
        share = (length - _KNOT_LIST[k]) / _width(k)
        return low - math.log1p(-min(share * died, MAX_HAZARD))


def hazards_at(flat: Floats, first: Ints, lengths: Ints) -> Floats:
    """[n, m] whole lengths up to MAX_LENGTH -> [n, m] their cumulative hazards, as `flat` has them.

    flat: the cumulative hazards of several distributions, one after another, each with an offset
    that keeps the whole sorted. first [n, 1]: where each distribution begins in it.
    """
    k = np.minimum(np.searchsorted(KNOTS, lengths, side="right") - 1, NUM_BINS - 1)
    place = k + first
    low = flat[place]
    died = -np.expm1(low - flat[place + 1])
    share = (lengths - _KNOTS[k]) / _WIDTHS[k]
    return low - np.log1p(-np.minimum(share * died, MAX_HAZARD))


def places_of(flat: Floats, first: Ints, target: Floats) -> Ints:
    """[n, m] cumulative hazards with row offsets -> [n, m] the bin in `flat` of each."""
    place = np.searchsorted(flat, target.ravel(), side="right").reshape(target.shape) - 1
    return np.minimum(np.maximum(place, first), first + NUM_BINS - 1)


def lengths_in(k: Ints, low: Floats, died: Floats, target: Floats) -> Ints:
    """[n, m] the length at which the cumulative hazard is `target`, in bin k, which begins at
    `low` and in which a share `died` of those ends that reach it."""
    share = np.minimum(-np.expm1(low - target) / np.maximum(died, _TINY), 1.0)
    return np.ceil(_KNOTS[k] + share * _WIDTHS[k] - _SLACK).astype(np.int64)
