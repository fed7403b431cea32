"""The rule of admission against a walk through every step of every future."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.deployments.gate.forecast.sampled import (
    UNBOUNDED,
    Candidate,
    SampledForecast,
    order_statistic,
)

SAMPLES = 4
LEVELS = (0.5, 0.75, 0.95, 1.0)


def walked(answers):
    """The most ever in use: (used, remaining, ceiling) of each answer, step by step."""
    peak = 0
    for now in range(max((r for _, r, _ in answers), default=0) + 1):
        held = [max(a, min(a + now, c)) for a, r, c in answers if now <= r and r > 0]
        peak = max(peak, sum(held))
    return peak


def quantile(values, level):
    """The smallest value that at least this number of them do not exceed."""
    return next(
        v for v in sorted(values) if sum(w <= v for w in values) >= level * len(values) - 1e-9
    )


def futures_of(forecast, candidate, steps=0):
    """Per sample, what is left of all answers after `steps`, and the candidate."""
    for s in range(SAMPLES):
        answers = []
        for a, r, c in zip(
            forecast.used.tolist(), forecast.remaining[:, s].tolist(), forecast.ceilings
        ):
            if r > steps:
                answers.append((max(a, min(a + steps, int(c))), r - steps, int(c)))
        yield answers, (candidate.used, int(candidate.remaining[s]), candidate.ceiling)


@st.composite
def shortlist(draw):
    num = draw(st.integers(0, 5))
    rolling = draw(st.booleans())
    ceiling = st.integers(1, 40) | st.just(UNBOUNDED) if rolling else st.just(UNBOUNDED)
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    capacity = draw(st.integers(20, 150))
    return SampledForecast(
        capacity=capacity,
        limit=capacity - draw(st.integers(0, 10)),
        level=draw(st.sampled_from(LEVELS)),
        slots=draw(st.integers(0, 2)),
        used=rng.integers(1, 30, num),
        remaining=rng.integers(1, 12, (num, SAMPLES)),
        ceilings=np.array([draw(ceiling) for _ in range(num)], np.int64),
    )


@st.composite
def candidates(draw):
    remaining = np.array(draw(st.lists(st.integers(1, 15), min_size=SAMPLES, max_size=SAMPLES)))
    used = draw(st.integers(1, 40))
    ceiling = draw(st.just(UNBOUNDED) | st.integers(used, 60))
    return Candidate(used, remaining, ceiling, longest=min(used + 15, ceiling))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_order_statistic(values, level):
    assert order_statistic(np.array(values), level) == quantile(values, level)


@settings(max_examples=300, deadline=None)
@given(shortlist(), candidates())
def test_admits_by_a_walk_through_all_futures(forecast, candidate):
    peaks = [walked([*answers, own]) for answers, own in futures_of(forecast, candidate)]
    assert forecast.peak_with(candidate) == quantile(peaks, forecast.level)
    fits = quantile(peaks, forecast.level) <= forecast.limit or len(forecast.used) == 0
    assert forecast.admits(candidate) == (
        fits and forecast.slots > 0 and candidate.longest <= forecast.capacity
    )
    joined = forecast.joined_by(candidate)
    again = [walked([*answers, own, own]) for answers, own in futures_of(forecast, candidate)]
    assert joined.peak_with(candidate) == quantile(again, forecast.level)
    assert joined.slots == forecast.slots - 1 and len(joined.used) == len(forecast.used) + 1


@settings(max_examples=300, deadline=None)
@given(shortlist(), candidates(), st.integers(1, 14))
def test_admits_after_by_a_walk_through_what_is_left(forecast, candidate, steps):
    left = list(futures_of(forecast, candidate, steps))
    peaks = [walked([*answers, own]) for answers, own in left]
    free = [len(forecast.used) + forecast.slots - len(answers) for answers, _ in left]
    expected = candidate.longest <= forecast.capacity
    if all(not answers for answers, _ in left):
        expected = expected and len(forecast.used) + forecast.slots > 0
    else:
        has_slot = sum(each >= 1 for each in free) >= forecast.level * SAMPLES - 1e-9
        expected = expected and has_slot and quantile(peaks, forecast.level) <= forecast.limit
    assert forecast.admits_after(steps, candidate) == expected


@settings(max_examples=200, deadline=None)
@given(shortlist(), candidates())
def test_the_time_until_it_fits(forecast, candidate):
    steps = forecast.fits_after(candidate)
    if candidate.longest > forecast.capacity or len(forecast.used) + forecast.slots == 0:
        assert steps is None
    elif forecast.admits(candidate):
        assert steps == 0
    else:
        assert steps in forecast.remaining
        assert forecast.admits_after(steps, candidate)


def test_many_ends_are_probed_at_a_few():
    """300 answers, 200 steps apart each: found by bisection over 64 of the ends."""
    ends = np.arange(1, 301)[:, None] * 200 + np.zeros((1, SAMPLES), np.int64)
    ones = np.full(300, 10)
    forecast = SampledForecast(10**6, 10**6, 0.95, 1, ones, ends, np.full(300, UNBOUNDED))
    big = Candidate(950_000, np.full(SAMPLES, 10), longest=960_000)
    steps = forecast.fits_after(big)
    assert steps is not None and forecast.admits_after(steps, big)
    first = next(e for e in ends[:, 0].tolist() if forecast.admits_after(e, big))
    assert first <= steps <= first + 200 * math.ceil(300 / 63)
