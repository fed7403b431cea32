"""Length distributions against their own probabilities, written out token by token."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.deployments.prediction.distribution import (
    KNOTS,
    MAX_LENGTH,
    NUM_BINS,
    WIDTHS,
    LengthDistribution,
    bin_of,
    cumulative_hazard,
)

LAST = 18  # the random distributions end in this bin, so that all their lengths can be written out


def brute_probabilities(hazards):
    """P(L = 1), P(L = 2) ... by walking the bins."""
    alive, each = 1.0, []
    for k in range(LAST + 1):
        each += [alive * hazards[k] / WIDTHS[k]] * int(WIDTHS[k])
        alive *= 1.0 - hazards[k]
    return np.array(each) / sum(each)


def brute_law(hazards, max_tokens, generated, min_tokens):
    """[lengths] and [probabilities] of the answer, cut, conditioned, and not ended too early."""
    p = brute_probabilities(hazards)
    lengths = np.arange(1, len(p) + 1)
    p = np.where(lengths > max(generated, min_tokens), p, 0.0)
    if max_tokens is not None:
        lengths = np.maximum(np.minimum(lengths, max_tokens), generated)
    return lengths, p / p.sum()


@st.composite
def cases(draw):
    hazards = np.full(NUM_BINS, 1.0 - 1e-7)
    hazards[:LAST] = draw(
        st.lists(st.floats(0.001, 0.95), min_size=LAST, max_size=LAST).map(np.array)
    )
    top = int(KNOTS[LAST])
    generated = draw(st.integers(0, top - 1))
    min_tokens = draw(st.one_of(st.just(0), st.integers(0, top - 1)))
    low = max(generated, min_tokens, 1)
    max_tokens = draw(st.one_of(st.none(), st.integers(low, 2 * top)))
    return hazards, max_tokens, generated, min_tokens


def law_of(hazards, max_tokens, generated, min_tokens):
    distribution = LengthDistribution(cumulative_hazard(hazards), max_tokens, min_tokens=min_tokens)
    return distribution.given(generated)


def test_bins_cover_all_lengths():
    assert KNOTS[0] == 0 and KNOTS[-1] == MAX_LENGTH and (WIDTHS > 0).all()
    for length in [1, 2, 7, 8, 9, 63, 64, 65, 500, MAX_LENGTH]:
        k = bin_of(length)
        assert KNOTS[k] < length <= KNOTS[k + 1]
    assert bin_of(0) == 0 and bin_of(10 * MAX_LENGTH) == NUM_BINS - 1


@settings(max_examples=80, deadline=None)
@given(cases())
def test_distribution_equals_written_out_probabilities(case):
    distribution = law_of(*case)
    lengths, p = brute_law(*case)
    assert distribution.mean == pytest.approx(float(lengths @ p), rel=1e-5)
    for length in [0, case[2], case[2] + 1, 40, 77, int(lengths[-1]) - 1]:
        assert distribution.survival(length) == pytest.approx(
            float(p[lengths > length].sum()), abs=2e-6
        )
    for level in [0.003, 0.1, 0.5, 0.9, 0.98]:
        got = distribution.quantile(level)
        # The smallest length with P(L <= length) >= level, up to rounding of the probabilities.
        assert p[lengths <= got].sum() >= level - 1e-5
        assert p[lengths < got].sum() <= level + 1e-5


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 2**32 - 1))
def test_several_samples_equal_single_ones(case, seed):
    distribution = law_of(*case)
    u = np.random.default_rng(seed).random(7)
    remaining = distribution.sample_remaining(distribution.generated, u)
    assert remaining.tolist() == [distribution.sample(v) - distribution.generated for v in u]


def test_sampled_futures_have_the_distribution():
    hazards = np.full(NUM_BINS, 1.0 - 1e-7)
    hazards[:LAST] = 0.2
    lengths, p = brute_law(hazards, 60, 10, 0)
    u = (np.arange(20_000) + 0.5) / 20_000
    drawn = 10 + law_of(hazards, 60, 10, 0).sample_remaining(10, u)
    for length in range(11, 61):
        assert np.mean(drawn == length) == pytest.approx(p[lengths == length].sum(), abs=2e-4)


def test_same_uniforms_make_futures_that_only_shrink():
    hazards = np.random.default_rng(1).uniform(0.02, 0.4, NUM_BINS)
    distribution = LengthDistribution(cumulative_hazard(hazards), 5000)
    u = np.random.default_rng(2).random(64)
    ends = [t + distribution.sample_remaining(t, u) for t in range(0, 400, 7)]
    assert all((later >= earlier).all() for earlier, later in itertools.pairwise(ends))


def test_far_tail_is_exact():
    """An answer that outlives all that was foreseen still has a conditional distribution."""
    hazards = np.full(NUM_BINS, 0.9)
    distribution = LengthDistribution(cumulative_hazard(hazards)).given(int(KNOTS[60]))
    assert distribution.survival(int(KNOTS[61])) == pytest.approx(0.1, rel=1e-9)
    half = (KNOTS[60] + KNOTS[61]) / 2  # 0.45 of the 0.9 that end in the bin
    assert distribution.quantile(0.45) == pytest.approx(half, abs=1)
    assert distribution.given(3 * MAX_LENGTH).quantile(0.5) >= MAX_LENGTH


def test_limits():
    distribution = LengthDistribution(cumulative_hazard(np.full(NUM_BINS, 0.01)), max_tokens=50)
    assert (
        distribution.quantile(1.0) == 50
        and distribution.quantile(0.999) == 50
        and distribution.ceiling == 50
    )
    at_limit = distribution.given(50)
    assert at_limit.mean == 50.0 and at_limit.quantile(0.5) == 50 and at_limit.survival(50) == 0.0
    assert distribution.sample_remaining(50, np.array([0.0, 0.9])).tolist() == [0, 0]
    assert distribution.sample_remaining(49, np.array([0.0, 0.9])).tolist() == [1, 1]
    assert distribution.quantile(0.0) == 1
    assert distribution.sample_remaining(0, np.zeros(0)).shape == (0,)


def test_bad_questions():
    distribution = LengthDistribution(cumulative_hazard(np.full(NUM_BINS, 0.1)))
    with pytest.raises(ValueError, match=r"between 0 and 1, not 1\.5"):
        distribution.quantile(1.5)
    with pytest.raises(ValueError, match="generated must be 0 or more"):
        distribution.given(-1)
