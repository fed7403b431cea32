"""The ridge on machines that are made up, and the commit rule against the idea it comes from."""

from __future__ import annotations

import random
from statistics import median

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workers.errors import ConfigError
from penstock.workers.planning.hardware import DEVICES
from penstock.workers.planning.roofline import Roofline
from penstock.workers.planning.shapes import SHAPES
from penstock.workers.scheduling.ridge import SLACK, CommitRule, RidgeMeasurement, measure_ridge

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Machine:
    """A clock that goes on by `cost(m, num_runs)` seconds when m rows run."""

    def __init__(self, cost):
        self.cost, self.now_s, self.runs = cost, 0.0, []

    def run(self, m):
        self.now_s += self.cost(m, len(self.runs))
        self.runs.append(m)

    def measure(self, sizes=SIZES, **more):
        more = {"fallback": 206.7} | more
        return measure_ridge(self.run, sizes, clock=lambda: self.now_s, **more)


def test_a_roofline_has_its_ridge():
    found = Machine(lambda m, _: 1e-4 * max(1, m / 100)).measure()
    assert (found.ridge_tokens, found.source, found.is_lower_bound) == (64, "measured", False)
    assert found.seconds[64] == pytest.approx(1e-4) and found.seconds[128] > SLACK * 1e-4
    assert 1024 not in found.seconds  # 512 rows were hopeless already
    assert "ridge 64 tokens, 9 rounds" in str(found)


def test_ten_per_cent_is_the_limit():
    found = Machine(lambda m, _: 1.0 + 0.1 * (m > 8) * 0.99 + 0.1 * (m > 32)).measure(limit_s=1e3)
    assert found.ridge_tokens == 32


def test_outliers_and_a_machine_that_slows_down_change_nothing():
    chance = random.Random(3)

    def cost(m, num_runs):
        slower = 1 + num_runs / 300
        return 1e-4 * max(1, m / 100) * slower * (10 if chance.random() < 0.1 else 1)

    found = Machine(cost).measure()
    assert (found.ridge_tokens, found.is_lower_bound) == (64, False)
    # Interleaved: rounds of all sizes, not one size after another.
    machine = Machine(lambda m, _: 1e-3)
    machine.measure((1, 3, 9))
    assert machine.runs == [1, 1, 3, 3, 9, 9] + [1, 3, 9] * 9


def test_a_machine_without_a_ridge():
    found = Machine(lambda m, _: 1e-4 * m).measure()
    assert found.ridge_tokens == 1 and found.source == "measured"


def test_all_sizes_free_is_a_lower_bound():
    found = Machine(lambda m, _: 1e-4).measure((7, 21))
    assert (found.ridge_tokens, found.is_lower_bound) == (21, True)
    assert set(found.seconds) == {1, 7, 21}
    assert "at least 21" in str(found)


def test_the_formula_where_there_is_no_time():
    found = Machine(lambda m, _: 0.3).measure()
    assert found == RidgeMeasurement(206, "formula", {}, 0)
    assert "by the formula" in str(found)
    assert Machine(lambda m, _: 5.0).measure(fallback=0.4).ridge_tokens == 1


@settings(max_examples=200, deadline=None)
@given(
    base_s=st.floats(1e-5, 2.0),
    knee=st.floats(0.5, 1000),
    limit_s=st.floats(1e-3, 3.0),
    sizes=st.lists(st.integers(1, 600), min_size=1, max_size=8),
)
def test_bounded_in_time_and_never_above_the_truth(base_s, knee, limit_s, sizes):
    def cost(m, _):
        return base_s * max(1.0, m / knee)

    machine = Machine(cost)
    found = machine.measure(sizes, limit_s=limit_s, fallback=5)
    assert machine.now_s <= max(limit_s, 2 * cost(1, 0)) * (1 + 1e-9)
    free = [m for m in {1, *sizes} if cost(m, 0) <= SLACK * cost(1, 0)]
    if found.source == "measured":
        assert found.ridge_tokens in free
        if not found.is_lower_bound:
            assert found.ridge_tokens == max(free)
        times = {m: median([cost(m, 0)]) for m in found.seconds}
        assert found.seconds == pytest.approx(times)


def test_errors_come_through():
    def fails(m):
        raise MemoryError("m")

    with pytest.raises(MemoryError):
        measure_ridge(fails, SIZES, fallback=1)
    with pytest.raises(ConfigError, match="must be positive; got 0"):
        measure_ridge(lambda m: None, (0, 1), fallback=1)


def test_a_real_product():
    weight = torch.randn(512, 512)
    found = measure_ridge(
        lambda m: torch.mm(torch.ones(m, 512), weight), (1, 4, 400), fallback=3, limit_s=0.2
    )
    assert found.ridge_tokens in (1, 4, 400) and found.source == "measured"


# -- the rule


def rule_of(model="Llama-2-7B", device="H200", **more):
    bound = Roofline(SHAPES[model], DEVICES[device])
    return CommitRule(bound.ridge_tokens, bound.read_s_per_token, bound.compute_s_per_token, **more)


def test_the_pressure_valve_of_the_research():
    """H200, Llama-2-7B, 64 sequences of 2048: 142 pending tokens are free, 1235 hidden at best."""
    rule = rule_of(max_per_sequence=10**6)
    assert rule.free_tokens(64) == 142
    assert rule.decide(142, num_scheduled=64).branch == "free"
    beyond = rule.decide(143, num_scheduled=64, num_cached=64 * 2048)
    assert (beyond.stays, beyond.branch) == (False, "commit")
    assert beyond.compute_s == pytest.approx(13.1e-6, rel=0.1)
    assert -(-142 // 16) == 9  # blocks of grace
    overlapping = rule_of(max_per_sequence=10**6, overlap=True)
    assert overlapping.budget(64, 64 * 2048) == pytest.approx(1235, abs=2)
    hidden = overlapping.decide(143, num_scheduled=64, num_cached=64 * 2048)
    assert (hidden.stays, hidden.branch) == (True, "hidden")
    assert "overlaps with reading" in str(hidden)


@settings(max_examples=300, deadline=None)
@given(
    nt=st.floats(1, 500),
    read_us=st.floats(0, 10),
    compute_us=st.floats(0.01, 100),
    pending=st.integers(1, 300),
    scheduled=st.integers(0, 400),
    cached=st.integers(0, 10**5),
    overlap=st.booleans(),
    limit=st.integers(0, 200),
)
def test_what_stays_makes_no_step_longer(
    nt, read_us, compute_us, pending, scheduled, cached, overlap, limit
):
    """Against the step's time: linear layers flat below the ridge, then td a row; attention after
    them, or, with overlap, beside them."""
    rule = CommitRule(nt, read_us * 1e-6, compute_us * 1e-6, limit, overlap)

    def step_us(rows):
        over = max(0.0, rows - nt) * compute_us
        return max(over, cached * read_us) if overlap else over + cached * read_us

    decision = rule.decide(pending, num_scheduled=scheduled, num_cached=cached)
    without, with_them = step_us(scheduled), step_us(scheduled + pending)
    if decision.stays:
        assert pending <= limit
        assert with_them <= without + 1e-6 * max(1.0, without)
    elif decision.branch == "commit" and pending <= limit:
        over_us = (scheduled + pending - nt) * compute_us
        assert over_us > 0, "would have been free"
        if overlap:
            assert over_us > cached * read_us * (1 - 1e-6) - 1e-6, "would have been hidden"
    assert decision.stays == (decision.branch in ("free", "hidden"))
    assert (decision.branch == "limit") == (pending > limit)
    assert str(pending) in str(decision)


def test_one_budget_for_the_whole_batch():
    """Granting each sequence what the ones before it left never exceeds the ridge."""
    rule = CommitRule(100, 1e-7, 1e-5, max_per_sequence=30)
    scheduled, granted = 40, []
    for _ in range(10):
        decision = rule.decide(25, num_scheduled=scheduled)
        granted.append(decision.stays)
        scheduled += 25 * decision.stays
    assert granted == [True, True] + [False] * 8
    assert rule.decide(31, num_scheduled=0).branch == "limit"


def test_bad_rules():
    with pytest.raises(ConfigError, match="ridge_tokens must be at least 1"):
        CommitRule(0, 1, 1)
    with pytest.raises(ConfigError, match="compute_s_per_token must be positive"):
        CommitRule(10, 1, 0)
