"""A batch is raised only while its window is at risk."""

from __future__ import annotations

import pytest

from penstock.deployments.batch.urgency import Urgency


def follow(urgency, lines_per_s, *, until_s, total=3600, step_s=5):
    """Whether it was at risk at each step of a steady pace; the lines done at the end."""
    seen, now_s = [], 0.0
    while now_s < until_s:
        now_s += step_s
        done = min(int(lines_per_s * now_s), total)
        seen.append(urgency.update(now_s, done, total - done))
    return seen


def test_a_pace_that_is_fast_enough_is_never_at_risk():
    assert not any(follow(Urgency(0, 3600, 0), 2.0, until_s=1790))


def test_a_pace_that_is_too_slow_is_at_risk_as_soon_as_it_is_known():
    seen = follow(Urgency(0, 3600, 0), 0.5, until_s=1000)
    assert not any(seen[:5])
    assert all(seen[6:])


def test_a_run_that_is_starved_is_at_risk_and_one_that_recovers_is_lowered():
    urgency = Urgency(0, 3600, 0)
    assert not urgency.update(10, 0, 3600)
    assert urgency.update(40, 0, 3600)
    done = 0
    for now_s in range(45, 800, 5):
        done += 50  # ten a second
        high = urgency.update(now_s, done, max(3600 - done, 0))
    assert not high


@pytest.mark.parametrize("window_s", [5.0, 60.0])
def test_a_short_window_is_judged_early(window_s):
    urgency = Urgency(0, window_s, 0)
    assert urgency.update(0.15 * window_s, 0, 10)


def test_between_the_two_margins_it_stays_as_it_was():
    low, high = Urgency(0, 3600, 0), Urgency(0, 3600, 0)
    high.is_high = True
    # 2000 s are left, and 1000 s are needed.
    for urgency, expected in ((low, False), (high, True)):
        assert urgency.update(1600, 1600, 1000) is expected


def test_a_run_that_is_done_is_at_no_risk():
    assert not Urgency(0, 100, 0).update(99, 10, 0)
