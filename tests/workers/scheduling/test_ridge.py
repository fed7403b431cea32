"""The ridge on machines that are made up."""

from __future__ import annotations

import random
from statistics import median

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workers.errors import ConfigError
from penstock.workers.scheduling.ridge import SLACK, RidgeMeasurement, measure_ridge

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


def test_warming_up_leaves_time_to_measure():
    """The first run of each size takes longer; larger sizes are left out before all of them are."""
    seen = set()

    def cost(m, _):
        is_first = m not in seen
        seen.add(m)
        return 0.015 * max(1, m / 8) + 0.015 * is_first

    found = Machine(cost).measure((2, 3, 4, 6, 8, 12, 16, 24), limit_s=0.6)
    assert found.source == "measured" and {1, 2, 3, 4} <= set(found.seconds)


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
