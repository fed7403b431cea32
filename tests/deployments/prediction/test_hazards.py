"""Counted hazards against Kaplan-Meier written as a loop, and against known distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.deployments.prediction.distribution import (
    KNOTS,
    NUM_BINS,
    WIDTHS,
    LengthDistribution,
    bin_of,
    cumulative_hazard,
)
from penstock.deployments.prediction.hazards import (
    DECAY,
    PRIOR_MEDIAN,
    PRIOR_SIGMA,
    SHRINKAGE,
    HazardTree,
    exposure,
    length_prior,
)


def test_equals_kaplan_meier_of_textbooks():
    """Cuts at the ends of bins, where no share of a bin is left to argue about."""
    rng = np.random.default_rng(3)
    lengths = rng.lognormal(4.0, 1.0, 200).astype(int) + 1
    cuts = rng.choice(KNOTS[10:40], 200)
    tree = HazardTree(np.full(NUM_BINS, 0.3))
    for length, cut in zip(lengths.tolist(), cuts.tolist()):
        tree.add([()], exposure(0, min(length, cut), length <= cut, cut))
    for k in range(45):
        age = DECAY ** np.arange(199, -1, -1.0)
        reached = (lengths > KNOTS[k]) & (cuts > KNOTS[k])
        ended = reached & (lengths <= KNOTS[k + 1]) & (lengths <= cuts)
        expected = (age[ended].sum() + 2.0 * 0.3) / (age[reached].sum() + 2.0)
        assert tree.hazards([()])[k] == pytest.approx(min(expected, 1 - 1e-7), rel=1e-9)


@pytest.mark.parametrize("how", ["limit", "cancel", "min_tokens"])
def test_inside_a_bin_nothing_is_lost(how):
    """A watch that always begins or ends inside one bin leaves the hazard unbiased."""
    rng = np.random.default_rng(4)
    k = bin_of(600)
    low, width, true = int(KNOTS[k]), int(WIDTHS[k]), 0.4
    tree = HazardTree(np.full(NUM_BINS, true / 2))
    for _ in range(6000):
        length = low + (int(rng.integers(1, width + 1)) if rng.random() < true else 10 * width)
        if how == "limit":
            cut = low + width // 3
            seen = exposure(0, min(length, cut), length <= cut, cut)
        elif how == "cancel":
            left = low + int(rng.integers(1, 3 * width))
            seen = exposure(0, min(length, left), length <= left)
        else:
            start = low + width // 2
            if length <= start:
                continue
            seen = exposure(start, length, length <= low + width)
        tree.add([()], seen)
    # In the last case the hazard of the bin's second half is wanted: 0.2 of 0.8 in half a bin.
    expected = {"limit": true, "cancel": true, "min_tokens": 2 * 0.2 / 0.8}[how]
    assert tree.hazards([()])[k] == pytest.approx(expected, abs=0.05)


def test_shrinks_towards_the_others():
    """Written out for one bin: prior, then the others of each level, then the group's own."""
    tree = HazardTree(np.full(NUM_BINS, 0.1))
    for _ in range(50):
        tree.add([(), ("m",)], exposure(0, 30, True))
    for _ in range(10):
        tree.add([(), ("m",), ("m", "t")], exposure(0, 200, True))
    path = [(), ("m",), ("m", "t"), ("m", "t", "unseen")]
    k = bin_of(30)
    old, new = sum(DECAY**age for age in range(10, 60)), sum(DECAY**age for age in range(10))
    # `all` has nothing in addition to `m`; `m` has 50 in addition to `t`.
    model = (old + 2.0 * 0.1) / (old + 2.0)
    expected = (0.0 + SHRINKAGE * model) / (new + SHRINKAGE)
    assert tree.hazards(path)[k] == pytest.approx(expected)
    assert tree.hazards(path)[bin_of(200)] > 0.3
    weights = tree.weights(path, k)
    own = new / (new + SHRINKAGE)
    rest = 2.0 / (old + 2.0)
    assert weights == pytest.approx([(1 - own) * rest, 0.0, (1 - own) * (1 - rest), own, 0.0])


def test_a_single_group_is_believed_once():
    """However many levels hold the same answers, the distribution is that of one level."""
    deep, flat = HazardTree(length_prior()), HazardTree(length_prior())
    for length in (5, 80, 300, 41, 7):
        deep.add([(), ("m",), ("m", "t")], exposure(0, length, True))
        flat.add([()], exposure(0, length, True))
    assert np.allclose(deep.hazards([(), ("m",), ("m", "t")]), flat.hazards([()]))


def test_finer_group_in_parallel_is_the_same_as_alone():
    tree = HazardTree(length_prior())
    path, finer = [(), ("m",), ("m", "t")], ("m", "t", "", "6")

    def check():
        both = tree.hazards_and_finer(path, finer)
        assert np.array_equal(both[0], tree.hazards(path))
        assert np.array_equal(both[1], tree.hazards([*path, finer]))

    check()
    for length in (5, 80, 300, 41, 7):
        tree.add([(), ("m",)], exposure(0, 2 * length, True))
        check()
        tree.add(path, exposure(0, 3 * length, True))
        tree.add([*path, finer], exposure(0, length, True))
        check()


def test_old_traffic_is_forgotten():
    tree = HazardTree(length_prior())
    for _ in range(2000):
        tree.add([()], exposure(0, 20, True))
    for _ in range(2000):
        tree.add([()], exposure(0, 300, True))
    distribution = LengthDistribution(cumulative_hazard(tree.hazards([()])))
    assert distribution.quantile(0.5) > 250
    assert tree.groups[()].at_risk[0] < 1 / (1 - DECAY)


def test_conditional_distribution_is_the_true_one():
    """P(L > t + s | L > t) of a log-normal world, averaged: one tree forgets after some 1,000."""
    rng = np.random.default_rng(7)
    tree = HazardTree(length_prior())

    def alive(length):
        return 1.0 if length <= 0 else 0.5 * math.erfc(math.log(length / 150) / 0.7 / math.sqrt(2))

    questions = [(t, t + more) for t in (0, 50, 150, 300) for more in (20, 80, 200)]
    got = []
    for i, length in enumerate(np.ceil(rng.lognormal(math.log(150), 0.7, 20_000)).tolist()):
        tree.add([()], exposure(0, int(length), True))
        if i % 500 == 499 and i > 2000:
            distribution = LengthDistribution(cumulative_hazard(tree.hazards([()])))
            got.append([distribution.given(t).survival(later) for t, later in questions])
    expected = [alive(later) / alive(t) for t, later in questions]
    assert np.mean(got, 0) == pytest.approx(expected, abs=0.02)


def test_prior_is_the_log_normal():
    distribution = LengthDistribution(cumulative_hazard(length_prior()))
    for length in [1, 3, 20, 150, 1000, 30_000]:
        z = math.log(length / PRIOR_MEDIAN) / PRIOR_SIGMA
        # Inside a bin the distribution is linear, so it agrees exactly at the bins' ends alone.
        assert distribution.survival(length) == pytest.approx(
            0.5 * math.erfc(z / math.sqrt(2)), rel=0.02 if length < 1e4 else 0.3
        )


def test_number_of_groups_is_bounded():
    tree = HazardTree(length_prior(), max_groups=10)
    for i in range(100):
        tree.add([(), ("m",), ("m", f"t{i}")], exposure(0, 5, True))
    assert len(tree.groups) == 10
    assert () in tree.groups and ("m",) in tree.groups and ("m", "t99") in tree.groups
    assert ("m", "t5") not in tree.groups


def test_an_end_where_none_could_be_tells_nothing():
    seen = exposure(100, 40, True)  # min_tokens was 100, and yet it stopped
    assert seen.event is None and not seen.at_risk.any()
    assert not exposure(0, 0, False).at_risk.any()
