"""How long starts take, from what Serve shows at each turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.deployments.autoscale.starts import PRIOR_S, StartTimes


def observed(*turns: tuple[float, int, int]) -> StartTimes:
    """After turns of (time, target, ready)."""
    starts = StartTimes()
    for now, target, ready in turns:
        starts.observe(target, ready, now)
    return starts


def test_a_start_lasts_from_the_order_until_ready():
    starts = observed((0, 1, 1), (10, 3, 1), (15, 3, 1), (40, 3, 2), (50, 3, 3))
    assert starts.start_s == pytest.approx(30 + 0.9 * 10)  # 30 s and 40 s


def test_before_a_start_was_seen_it_is_the_prior():
    assert observed().start_s == PRIOR_S
    assert observed((0, 3, 1), (5, 3, 3)).start_s == PRIOR_S  # ordered at an unknown time


def test_an_order_that_is_taken_back_does_not_count():
    starts = observed((0, 1, 1), (10, 3, 1), (20, 1, 1), (300, 2, 1), (320, 2, 2))
    assert starts.start_s == pytest.approx(20)


def test_a_worker_that_died_is_ordered_when_it_is_missed():
    assert observed((0, 2, 2), (100, 2, 1), (112, 2, 2)).start_s == pytest.approx(12)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=60))
def test_a_time_is_never_negative(turns):
    starts = StartTimes()
    for now, (target, ready) in enumerate(turns):
        starts.observe(target, ready, float(now))
        assert starts.start_s >= 0
