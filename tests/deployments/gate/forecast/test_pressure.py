"""Pressure by waits and by refusals, and what the gate makes of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.deployments.gate.forecast.pressure import Pressure


def test_rises_while_requests_are_refused_and_falls_after():
    pressure = Pressure(10.0)
    assert pressure.after(0.0, 50.0) == 0.0
    for now in (100.0, 102.0, 104.0):
        pressure.refused(now)
    assert pressure.after(0.0, 106.0) == 6.0
    assert pressure.after(0.0, 106.0) == 6.0, "asking changes nothing"
    assert pressure.after(7.5, 106.0) == 7.5, "the longer of both"
    assert pressure.after(0.0, 111.0) == 9.0 - 2.0, "9 s of refusals, that ended 2 s ago"
    assert pressure.after(0.0, 118.0) == 0.0
    pressure.refused(200.0)
    assert pressure.after(0.0, 200.0) == 0.0


def test_rises_no_higher_than_it_may():
    pressure = Pressure(10.0)
    for now in range(100):
        pressure.refused(float(now))
    assert pressure.after(0.0, 99.0) == 10.0
    assert pressure.after(3.0, 110.0) == pytest.approx(10.0 - 6.0)


@given(st.lists(st.tuples(st.floats(0.0, 9.0), st.booleans()), max_size=40))
def test_does_not_depend_on_how_often_it_is_asked(steps):
    """The same refusals, asked after each moment and only at the end."""
    often, once, now = Pressure(10.0), Pressure(10.0), 0.0
    for seconds, is_refused in steps:
        now += seconds
        if is_refused:
            often.refused(now)
            once.refused(now)
        for part in (0.0, 0.0):
            often.after(part, now)
    assert often.after(0.0, now + 1.0) == pytest.approx(once.after(0.0, now + 1.0))
