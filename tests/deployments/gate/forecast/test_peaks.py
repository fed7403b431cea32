"""Peaks of futures against a walk through time, step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.deployments.gate.forecast.peaks import (
    NUM_HORIZONS,
    empty_grid,
    held_peaks,
    horizons_of,
    index_of,
    sampled_peaks,
    swept_peak,
)
from penstock.deployments.prediction.distribution import (
    NUM_BINS,
    LengthDistribution,
    cumulative_hazard,
    stack,
)
from penstock.deployments.prediction.hazards import length_prior

FOREVER = 10**9


def walked_peak(answers):
    """The most ever in use, step by step: (used, remaining, delay, ceiling) of each answer."""
    last = max((delay + remaining for _, remaining, delay, _ in answers), default=0)
    peak = 0
    for now in range(last + 1):
        use = 0
        for used, remaining, delay, ceiling in answers:
            if now <= delay + remaining:
                use += max(used, min(used + max(0, now - delay), ceiling))
        peak = max(peak, use)
    return peak


answer = st.tuples(
    st.integers(0, 40),
    st.integers(0, 30),
    st.integers(0, 12),
    st.integers(0, 60) | st.just(FOREVER),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), max_size=8), st.integers(0, 999))
def test_sampled_peaks(pairs, seed):
    used = np.array([a for a, _ in pairs], np.int64)
    rng = np.random.default_rng(seed)
    remaining = rng.integers(0, 30, (len(pairs), 3))
    if pairs:
        remaining[:, 0] = [r for _, r in pairs]
    expected = [
        walked_peak([(a, r, 0, FOREVER) for a, r in zip(used.tolist(), column)])
        for column in remaining.T.tolist()
    ]
    assert sampled_peaks(used, remaining).tolist() == expected


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=8),
    st.integers(0, 40),
    st.integers(0, 999),
)
def test_one_more_answer_costs_no_new_sort(pairs, used, seed):
    """Small numbers on purpose: equal ends are where an index goes wrong."""
    rng = np.random.default_rng(seed)
    running = np.array([a for a, _ in pairs], np.int64)
    remaining = rng.integers(0, 12, (len(pairs), 5))
    candidate = rng.integers(0, 13, 5)
    expected = sampled_peaks(np.append(running, used), np.vstack([remaining, candidate]))
    got = index_of(running, remaining).peaks_with(used, candidate)
    assert got.tolist() == expected.tolist()


@settings(max_examples=200, deadline=None)
@given(st.lists(answer, max_size=7))
def test_swept_peak(answers):
    columns = [np.array(column, np.int64) for column in zip(*answers)] or [
        np.zeros(0, np.int64)
    ] * 4
    assert swept_peak(*columns) == walked_peak(answers)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(answer, min_size=3, max_size=3), max_size=7), st.integers(0, 60))
def test_peaks_of_answers_that_stop_growing(rows, ceiling):
    """Three futures at once; an answer's ceiling is the same in all of them."""
    used = np.array([[a for a, *_ in row] for row in rows], np.int64).reshape(-1, 3)
    remaining = np.array([[r for _, r, *_ in row] for row in rows], np.int64).reshape(-1, 3)
    ceilings = np.array([row[0][3] if i % 2 else ceiling for i, row in enumerate(rows)], np.int64)
    expected = [
        walked_peak(list(zip(used[:, s], remaining[:, s], [0] * len(rows), ceilings)))
        for s in range(3)
    ]
    assert held_peaks(used, remaining, ceilings).tolist() == expected


def test_sweep_is_the_formula_where_nothing_waits_or_rolls():
    rng = np.random.default_rng(0)
    used, remaining = rng.integers(0, 3000, 63), rng.integers(0, 900, (63, 1))
    swept = swept_peak(used, remaining[:, 0], np.zeros(63, int), np.full(63, FOREVER))
    assert swept == sampled_peaks(used, remaining)[0]


def test_grid_has_the_moments_of_sampled_futures():
    """Mean and variance at each horizon against 20,000 drawn futures of the same distributions."""
    rng = np.random.default_rng(1)
    distributions = [
        LengthDistribution(cumulative_hazard(rng.uniform(0.01, 0.2, NUM_BINS)), limit)
        for limit in (60, 300, 5000)
    ]
    used, ceilings, generated = [100, 40, 7], [None, 64, None], np.array([20, 0, 130])
    horizons = horizons_of(4000)
    table = stack(distributions)
    # Still there at step h: the answer's end is at h or later, so more than h - 1 tokens come.
    alive = table.survival_after(generated, horizons - 1)
    assert (alive[:, horizons == 0] == 1.0).all()
    grid = empty_grid(horizons)
    for i in range(3):
        grid = grid.adding(used[i], alive[i], ceilings[i])
    remaining = table.sample_remaining(generated, rng.random((3, 20_000)))
    for g, h in enumerate(horizons.tolist()):
        use = np.zeros(20_000)
        for i in range(3):
            holds = used[i] + h if ceilings[i] is None else min(used[i] + h, ceilings[i])
            use += np.where(remaining[i] >= h, holds, 0)
        assert grid.mean[g] == pytest.approx(use.mean(), rel=0.05, abs=1.0)
        assert np.sqrt(grid.variance[g]) == pytest.approx(use.std(), rel=0.08, abs=2.0)
    for i in range(3):
        grid = grid.removing(used[i], alive[i], ceilings[i])
    assert np.allclose(grid.mean, 0.0, atol=1e-9) and np.allclose(grid.variance, 0.0, atol=1e-6)


def test_grid_peak_is_the_largest_quantile_over_time():
    """A sum of many answers is nearly Gaussian; the quantile of the peak itself is above it."""
    rng = np.random.default_rng(2)
    distribution = LengthDistribution(cumulative_hazard(length_prior()), 1500)
    generated, used = rng.integers(0, 200, 120), rng.integers(5, 60, 120)
    table = stack([distribution] * 120)
    horizons = horizons_of(1500)
    grid = empty_grid(horizons)
    for a, alive in zip(used.tolist(), table.survival_after(generated, horizons - 1)):
        grid = grid.adding(a, alive)
    remaining = table.sample_remaining(generated, rng.random((120, 4000)))
    at_horizons = [
        np.quantile(np.where(remaining >= h, used[:, None] + h, 0).sum(0), 0.95)
        for h in horizons.tolist()
    ]
    assert grid.peak(1.645) == pytest.approx(max(at_horizons), rel=0.02)
    of_peaks = np.quantile(sampled_peaks(used, remaining), 0.95)
    assert 0.85 * of_peaks < grid.peak(1.645) < 1.02 * of_peaks
    assert grid.peak(0.0) < grid.peak(1.0) < grid.peak(3.0)


def test_horizons():
    for longest in (1, 23, 24, 1000, 1_000_000):
        horizons = horizons_of(longest)
        assert len(horizons) == NUM_HORIZONS and horizons[0] == 0
        assert (np.diff(horizons) > 0).all() and horizons[-1] == max(longest, NUM_HORIZONS)
    assert empty_grid(horizons_of(100)).peak(1.645) == 0.0
