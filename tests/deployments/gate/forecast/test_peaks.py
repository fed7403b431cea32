"""Peaks of futures against a walk through time, step by step."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.deployments.gate.forecast.peaks import (
    held_peaks,
    index_of,
    sampled_peaks,
)

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
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=8),
    st.integers(0, 40),
    st.integers(0, 14),
    st.integers(0, 999),
)
def test_an_answer_that_comes_later_meets_what_runs_then(pairs, used, after, seed):
    rng = np.random.default_rng(seed)
    running = np.array([a for a, _ in pairs], np.int64)
    remaining, candidate = rng.integers(0, 12, (len(pairs), 5)), rng.integers(0, 13, 5)
    index = index_of(running, remaining)
    expected = []
    for column, own in zip(remaining.T.tolist(), candidate.tolist(), strict=True):
        still = [(a + after, r - after) for a, r in zip(running.tolist(), column) if r > after]
        expected.append(walked_peak([(a, r, 0, FOREVER) for a, r in [*still, (used, own)]]))
    assert index.peaks_with(used, candidate, after).tolist() == expected
    num_after = (remaining > after).sum(axis=0)
    assert index.num_after(np.array([after])).tolist() == [num_after.tolist()]


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
