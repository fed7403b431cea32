"""How long a start takes, as the gate learns it from the requests that wait for one."""

from __future__ import annotations

from penstock.deployments.gate.forecast.start_times import GIVEN_UP, OVERDUE, StartTimes


def start(times: StartTimes, began: float, took_s: float) -> None:
    times.asked(began)
    times.ready(began + took_s)


def test_the_prior_until_a_start_was_seen_and_then_the_ninth_decile():
    times = StartTimes(30.0)
    assert times.remaining_s(5.0) == 30.0
    start(times, 0.0, 12.0)
    assert times.predicted_s == 12.0
    for n in range(1, 10):
        start(times, 1000.0 * n, float(n))
    assert times.predicted_s == 9.0  # of ten: 12 and 1 to 9
    for n in range(40):
        start(times, 1e6 + 1000.0 * n, 20.0)
    assert times.predicted_s == 20.0  # early ones are forgotten


def test_a_start_under_way_has_less_to_go_and_a_late_one_is_not_due_at_once():
    times = StartTimes(30.0)
    times.asked(100.0)
    times.asked(109.0)  # others ask, too: it is the same start
    assert times.remaining_s(110.0) == 20.0
    assert times.remaining_s(160.0) == OVERDUE * 60.0
    times.ready(170.0)
    assert times.predicted_s == 70.0
    times.ready(180.0)  # the second worker: no request had waited for it
    assert times.predicted_s == 70.0


def test_a_start_that_nothing_came_of_is_not_learnt_from():
    times = StartTimes(10.0)
    times.asked(0.0)  # its client left, and no worker was started
    later = GIVEN_UP * 10.0 + 1.0
    times.asked(later)
    assert times.remaining_s(later + 4.0) == 6.0
    times.ready(later + 8.0)
    assert times.predicted_s == 8.0
