"""Calibration on distributions that are wrong in a known way."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from penstock.deployments.prediction.conformal import (
    LEVELS,
    adapted,
    calibrate,
    coverage,
    fresh_levels,
    surprise,
)
from penstock.deployments.prediction.distribution import (
    KNOTS,
    MAX_LENGTH,
    NUM_BINS,
    LengthDistribution,
    cumulative_hazard,
)


def geometric(mean):
    return KNOTS / mean  # cumulative hazard of P(L > t) = exp(-t / mean)


def test_reads_quantiles_at_the_tracked_levels():
    distribution = geometric(300.0)
    tracked = np.array([0.4, 0.97, 0.995])
    got = LengthDistribution(calibrate(distribution, tracked))
    for level, at in zip(LEVELS, tracked):
        # Survival is linear inside a bin before and after, so the two meet exactly at knots only.
        assert got.quantile(level) == pytest.approx(
            LengthDistribution(distribution).quantile(at), rel=0.04
        )
    assert np.allclose(calibrate(distribution, fresh_levels()), distribution, rtol=1e-9)


def test_far_tail_keeps_its_shape():
    deep = cumulative_hazard(np.full(NUM_BINS, 1 - 1e-7))
    assert deep[-1] > 700  # where survival itself is below the smallest float
    got = calibrate(deep, np.array([0.5, 0.9, 0.98]))
    assert np.isfinite(got).all() and (np.diff(got) > 0).all()
    assert np.allclose(got[5:] - deep[5:], np.log(0.02 / 0.01))


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("world", ["free", "cut", "leaving"])
def test_coverage_holds_though_the_distribution_is_wrong(factor, world):
    """Lengths are geometric of mean 200; the distribution says `factor` times that."""
    rng = np.random.default_rng(5)
    tracked, hits = fresh_levels(), []
    for i in range(5000):
        length = int(np.ceil(rng.exponential(200.0)))
        cut = int(rng.integers(100, 2500)) if world == "cut" else None
        left = int(np.ceil(rng.exponential(600.0))) if world == "leaving" else MAX_LENGTH
        distribution = LengthDistribution(
            calibrate(geometric(200.0 * factor), tracked), max_tokens=cut
        )
        seen = min(length, left, MAX_LENGTH if cut is None else cut)
        if i >= 2000:  # judged by the true length, which the calibration did not always see
            natural = LengthDistribution(distribution.cumulative)
            hits.append([length <= natural.quantile(level) for level in LEVELS])
        tracked = adapted(
            tracked,
            surprise(
                distribution,
                0,
                seen,
                is_end=seen == length,
                is_cut=cut is not None and seen == cut < length,
            ),
        )
    assert np.mean(hits, 0) == pytest.approx(LEVELS, abs=0.02)


def test_undecided_where_the_limit_comes_first():
    distribution = LengthDistribution(geometric(200.0), max_tokens=300)  # the 0.9 quantile is 461
    assert coverage(distribution, 300, is_end=False, left_early=False) == [0.0, None, None]
    assert coverage(distribution, 10, is_end=True, left_early=False) == [1.0, None, None]
    tracked = adapted(fresh_levels(), surprise(distribution, 0, 10, is_end=True))
    assert tracked[0] < 0.5 and tracked[1:].tolist() == [0.9, 0.99]


def test_an_early_leaver_counts_by_the_conditional_distribution():
    distribution = LengthDistribution(geometric(200.0))
    held = coverage(distribution, 300, is_end=False, left_early=True)
    beyond = distribution.survival(300)
    assert held[0] == 0.0 and held[1] == pytest.approx((0.9 - (1 - beyond)) / beyond)


def test_coarse_lengths_do_not_pull_the_levels():
    """A distribution of one to three tokens, which is right, is left alone."""
    rng = np.random.default_rng(18)
    distribution = LengthDistribution(cumulative_hazard(np.full(NUM_BINS, 0.6)))
    hits = [
        coverage(distribution, int(rng.geometric(0.6)), is_end=True, left_early=False)
        for _ in range(5000)
    ]
    assert np.mean(np.array(hits, float), 0) == pytest.approx(LEVELS, abs=0.02)
    assert distribution.quantile(0.5) == 1 and distribution.survival(1) == pytest.approx(
        0.4
    )  # 0.6 if taken whole


@pytest.mark.parametrize("limit", [None, 250, 600])
@pytest.mark.parametrize(("length", "is_end"), [(90, True), (250, True), (461, True), (900, 0)])
def test_what_is_learnt_on_the_way_adds_up(limit, length, is_end):
    """Piece by piece or at the end: the same in sum, and it is coverage less the level."""
    distribution = LengthDistribution(geometric(200.0), max_tokens=limit)
    if limit is not None and length > limit:
        length, is_end = limit, False
    over = {"is_end": is_end, "is_cut": not is_end}
    whole = surprise(distribution, 0, length, **over)
    stops = [*range(0, length, 70), length]
    pieces = [surprise(distribution, a, b) for a, b in itertools.pairwise(stops[:-1])]
    pieces.append(surprise(distribution, stops[-2], length, **over))
    held = coverage(distribution, length, is_end, left_early=False)
    for level, one, hit, *parts in zip(LEVELS, whole, held, *pieces):
        assert (one is None) == (hit is None)
        if one is not None:
            assert sum(parts) == pytest.approx(one) == pytest.approx(hit - level)


def test_a_look_at_the_running_moves_nothing_on_average():
    """With the true distribution, at any time: answers that have ended and those that run."""
    rng = np.random.default_rng(19)
    distribution = LengthDistribution(geometric(200.0))
    for looked_at in (30, 140, 600):
        lengths = np.ceil(rng.exponential(200.0, 4000)).astype(int).tolist()
        moves = [
            surprise(distribution, 0, min(n, looked_at), is_end=n <= looked_at) for n in lengths
        ]
        assert np.mean(np.array(moves, float), 0) == pytest.approx([0.0, 0.0, 0.0], abs=0.02)
        ended = [move for move, n in zip(moves, lengths) if n <= looked_at]
        if looked_at < 200:  # the mistake: only who has ended
            assert np.mean(np.array(ended, float), 0)[0] > 0.2


def test_levels_stay_in_order():
    cases: tuple[list[float | None], ...] = (
        [-1.0, 1.0, None], [None, None, 1.0], [1.0, 1.0, 1.0], [-1.0, -1.0, -1.0],
    )  # fmt: skip
    for held in cases:
        tracked = fresh_levels()
        for _ in range(20_000):
            tracked = adapted(tracked, held)
        assert (np.diff(tracked) > 0).all() and tracked[0] > 0 and tracked[-1] < 1
