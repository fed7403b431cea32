"""Adaptive conformal calibration: corrects predicted quantiles until they cover what they promise.

Gibbs & Candes, "Adaptive Conformal Inference Under Distribution Shift" (NeurIPS 2021): the level at
which a quantile is read goes up after a miss and down after a hit. Three levels are tracked, and
the distribution is stretched between them, so that sampled futures are calibrated as well as the
quantiles.
"""

from __future__ import annotations

import math

import numpy as np

from penstock.deployments.prediction.distribution import Floats, LengthDistribution

LEVELS = (0.5, 0.9, 0.99)
# One miss must not throw a level out of its neighbourhood: the step shrinks with the tail.
STEPS = (0.01, 0.01, 0.0011)
_LOW, _HIGH, _GAP = 1e-3, 1.0 - 1e-4, 1e-5
_SURVIVAL = np.array([0.0, *(1.0 - level for level in reversed(LEVELS)), 1.0])


def fresh_levels() -> Floats:
    """The levels before any observation: the distribution is used as predicted."""
    return np.array(LEVELS)


def calibrate(cumulative: Floats, tracked: Floats) -> Floats:
    """The distribution whose quantile at LEVELS[i] is the given one's at tracked[i].

    cumulative [bins + 1] of the natural length -> the same shape. Survival is mapped piecewise
    linearly, with 0 and 1 fixed, so the far tail keeps its shape.
    """
    xs = np.concatenate(([0.0], 1.0 - tracked[::-1], [1.0]))
    mapped = np.interp(np.exp(-cumulative), xs, _SURVIVAL)
    if cumulative[-1] < 600.0:
        return -np.log(mapped)
    # Survival underflows long before the hazard does: out there the tail's factor is added.
    tail = math.log(_SURVIVAL[1] / xs[1])
    return np.where(cumulative < 600.0, -np.log(np.maximum(mapped, 1e-300)), cumulative - tail)


def coverage(
    distribution: LengthDistribution, length: int, is_end: bool, left_early: bool
) -> list[float | None]:
    """[levels] Whether each level's quantile held, for an answer of `length` tokens.

    `distribution` is of the natural length, not cut. `is_end`: the answer ended by itself. None:
    undecided. A quantile is judged only where it lies within max_tokens, which then always decides;
    judging only what happens to be decided would drop hits and keep misses. Where the client left
    early, the predicted conditional probability replaces the unknown outcome. An answer exactly as
    long as its quantile counts in part: short lengths are coarse, their quantiles hold more often
    than promised, and a model's long answers would pay for it.
    """
    natural = _natural(distribution)
    held: list[float | None] = []
    for level, bound in zip(LEVELS, _bounds(distribution, natural)):
        if bound is None:
            held.append(None)
        elif is_end:
            held.append(_held(natural, level, bound, length))
        elif not left_early or length >= bound:
            held.append(0.0)
        else:
            held.append(_will_hold(level, natural.survival(length)))
    return held


def surprise(
    distribution: LengthDistribution,
    start: int,
    now: int,
    *,
    is_end: bool = False,
    is_cut: bool = False,
) -> list[float | None]:
    """[levels] How tokens `start` to `now` of an answer changed P(each quantile holds).

    None: undecided, as in `coverage`. Neither `is_end` nor `is_cut`: the answer still runs, or its
    client left. If the distribution is right, the expectation is 0 at any time: an undecided
    quantile counts with its remaining probability, so that running answers are included (early
    ends are all of short answers: hits). Summed over an answer it is `coverage` minus the level.
    """
    natural = _natural(distribution)
    alive = natural.survival(start)
    alive_now = natural.survival(now)
    moves: list[float | None] = []
    for level, bound in zip(LEVELS, _bounds(distribution, natural)):
        if bound is None:
            moves.append(None)
            continue
        if is_end:
            held = _held(natural, level, bound, now)
        else:
            held = 0.0 if is_cut or now >= bound else _will_hold(level, alive_now)
        moves.append(held - (0.0 if start >= bound else _will_hold(level, alive)))
    return moves


def _natural(distribution: LengthDistribution) -> LengthDistribution:
    return LengthDistribution(distribution.cumulative, min_tokens=distribution.min_tokens)


def _bounds(distribution: LengthDistribution, natural: LengthDistribution) -> list[int | None]:
    """The quantile of each level; None where max_tokens would cut it."""
    bounds = map(natural.quantile, LEVELS)
    return [
        None if distribution.max_tokens is not None and b >= distribution.max_tokens else b
        for b in bounds
    ]


def _will_hold(level: float, alive: float) -> float:
    """The probability that an answer which goes on ends within its quantile; `alive`: the one that
    it gets as far as it is, which is short of the quantile."""
    return max(0.0, 1.0 - (1.0 - level) / alive)


def _held(distribution: LengthDistribution, level: float, bound: int, length: int) -> float:
    """Whether an ended answer kept within its quantile: 1 or 0, a fraction at the bound itself."""
    if length != bound:
        return float(length < bound)
    # At the bound itself: what makes the expectation `level` exactly.
    over, at_least = distribution.survival(bound), distribution.survival(bound - 1)
    return min(max((level - 1.0 + at_least) / max(at_least - over, 1e-12), 0.0), 1.0)


def adapted(tracked: Floats, moves: list[float | None]) -> Floats:
    """The levels after `moves` as of `surprise`: lower after a hit, higher after a miss."""
    moved, floor = [], _LOW
    for i, (now, step, move) in enumerate(zip(tracked.tolist(), STEPS, moves)):
        if move is not None:
            now -= step * move
        room = _HIGH - _GAP * (len(LEVELS) - 1 - i)  # levels stay apart and in order
        floor = min(max(now, floor + _GAP), room)
        moved.append(floor)
    return np.array(moved)
