"""The ledger of a worker: leases, progress between reports, late reports, headroom, and its load,
by which few of many workers are looked at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.deployments.gate.forecast.headroom import Headroom
from penstock.deployments.gate.ledger import Ledger
from penstock.deployments.gate.placement import WorkerShortlist
from penstock.deployments.gate.types import Demand, GateSettings, Report, Running, WorkerSpec
from penstock.deployments.prediction.distribution import LengthDistribution, cumulative_hazard
from penstock.deployments.prediction.hazards import length_prior

PRIOR = cumulative_hazard(length_prior())
UNIFORMS = (np.arange(8) + 0.5) / 8


def demand(name="a", prompt=100, max_tokens=50, ceiling=None):
    return Demand(name, prompt, LengthDistribution(PRIOR, max_tokens), UNIFORMS, ceiling)


def make_ledger(**changes):
    return Ledger(WorkerSpec("w", 1, 1000, **changes), step_s=0.1)


def report(sequence, *running, epoch=1, step_s=0.1, preemptions=0):
    rows = tuple(Running(name, generated, 100, 50) for name, generated in running)
    return Report(epoch, sequence, rows, step_s, preemptions)


def forecast(ledger, now):
    return ledger.forecast(now, 0.95, len(UNIFORMS))


@given(
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(1, 40),
    st.none() | st.integers(1, 20),
)
def test_a_demand_is_never_less_than_its_blocks(prompt, generated, block_size, blocks):
    ceiling = None if blocks is None else blocks * block_size
    each = Demand("a", prompt, LengthDistribution(PRIOR, 301), UNIFORMS, ceiling)
    held = -(-(prompt + generated) // block_size) * block_size
    most = -(-(prompt + 301) // block_size) * block_size
    if ceiling is not None:
        held, most = min(held, ceiling), min(most, ceiling)
    assert held <= each.used(generated, block_size) < held + block_size
    assert each.longest(block_size) == most


def test_a_lease_holds_room_and_runs_out():
    ledger = make_ledger()
    ledger.lease(demand("a"), until=2.0)
    ledger.lease(demand("b"), until=5.0)
    assert forecast(ledger, 1.0).used.tolist() == [115, 115]
    with pytest.raises(ValueError, match="'a' already"):
        ledger.lease(demand("a"), until=3.0)
    ledger.started("b", 1.0)
    assert ledger.expire(1.9) == []
    assert ledger.expire(2.0) == ["a"]
    assert ledger.expire(99.0) == [] and "b" in ledger


def test_progress_is_reckoned_between_reports():
    ledger = make_ledger()
    ledger.lease(demand("a"), until=2.0)
    ledger.started("a", 0.0)
    assert ledger.generated(9.0).tolist() == [0]  # its prompt is under way
    ledger.report(report(1, ("a", 1)), 1.0, {})
    assert ledger.generated(1.0).tolist() == [1]
    assert ledger.generated(1.55).tolist() == [6]
    assert ledger.generated(0.5).tolist() == [1]  # never back
    early, late = forecast(ledger, 1.0), forecast(ledger, 3.0)
    assert (early.remaining >= late.remaining).all()
    assert late.used.tolist() == [100 + 1 + 20 + 15]
    # It ends at its limit at the latest, and holds its memory until that was heard.
    assert ledger.generated(1e6).tolist() == [49] and (forecast(ledger, 1e6).remaining == 1).all()
    ledger.report(report(2, ("a", 50)), 1.0, {})
    assert ledger.generated(1.0).tolist() == [50] and (forecast(ledger, 1.0).remaining == 1).all()


def test_reports_correct_the_ledger():
    ledger = make_ledger()
    for name in ("a", "b", "c"):
        ledger.lease(demand(name), until=2.0)
    ledger.started("a", 0.0)
    ledger.started("b", 0.0)
    assert ledger.report(report(1, ("a", 3)), 0.1, {}) == []  # older than the start of b, perhaps
    assert ledger.report(report(2, ("a", 4), ("b", 1)), 0.2, {}) == []
    assert ledger.report(report(3, ("a", 5)), 0.3, {}) == ["b"]  # it was listed, and is no more
    assert "c" in ledger  # promised; only time takes that back
    assert ledger.report(report(3), 0.4, {}) == [] and "a" in ledger  # late
    assert ledger.report(report(9, epoch=0), 0.4, {}) == [] and "a" in ledger  # of an earlier life


def test_what_ended_does_not_come_back_with_a_late_report():
    ledger = make_ledger()
    ledger.lease(demand("a"), until=2.0)
    assert ledger.ended("a", 0.5) and not ledger.ended("a", 0.5)
    late = report(1, ("a", 7))
    assert ledger.unknown(late) == []
    ledger.report(late, 0.6, {})
    assert len(ledger) == 0
    ledger.expire(0.5 + Ledger.REMEMBER_S)
    assert [each.request_id for each in ledger.unknown(report(2, ("a", 8)))] == ["a"]


def test_a_ledger_that_was_lost_is_rebuilt_from_a_report():
    ledger = make_ledger()
    heard = report(4, ("x", 20), ("y", 0))
    names = [each.request_id for each in ledger.unknown(heard)]
    assert names == ["x", "y"]
    ledger.report(heard, 10.0, {name: demand(name) for name in names})
    assert forecast(ledger, 10.0).used.tolist() == [135, 115]
    assert ledger.expire(1e9) == []


def test_no_slots_for_a_worker_that_refused():
    ledger = make_ledger(slots=2)
    assert forecast(ledger, 0.0).slots == 2
    ledger.is_open = False
    assert forecast(ledger, 0.0).slots == 0
    ledger.report(report(1, ("x", 1)), 0.1, {"x": demand("x")})
    assert forecast(ledger, 0.1).slots == 1


def test_headroom_follows_preemptions():
    ledger = make_ledger()
    for sequence in range(1, 51):  # 4 preemptions in 100 completions, 50 times
        ledger.report(report(sequence, preemptions=4 * sequence), 0.0, {})
        ledger.headroom.count(completions=Headroom.WINDOW)
    assert ledger.headroom.share == pytest.approx(Headroom.LARGEST)
    assert forecast(ledger, 0.0).limit == 700
    for _ in range(10):
        ledger.headroom.count(completions=99, preemptions=1)
        ledger.headroom.count(completions=1)
    assert ledger.headroom.share == pytest.approx(Headroom.LARGEST - 10 * Headroom.DOWN)
    for _ in range(200):
        ledger.headroom.count(completions=100)
    assert ledger.headroom.share == 0.0


@pytest.mark.parametrize("name", ["capacity", "block_size", "slots"])
def test_a_worker_has_something(name):
    values: dict[str, Any] = {"capacity": 10, "block_size": 1, "slots": 1, name: 0}
    with pytest.raises(ValueError, match=name):
        WorkerSpec("w", 1, **values)


def long_demand(name, prompt=100):
    return demand(name, prompt, max_tokens=2000)


def roomy_ledger():
    return Ledger(WorkerSpec("w", 1, 20_000, 16, 99), step_s=0.1)


def test_of_many_workers_the_least_loaded_are_looked_at():
    ledgers = {}
    for i in range(30):
        ledgers[f"w{i}"] = Ledger(WorkerSpec(f"w{i}", 1, 4000 if i else 40_000, 16, 99))
        for j in range(30 - i if i else 90):
            ledgers[f"w{i}"].lease(long_demand(f"{i}-{j:02d}"), 1e9)
    choice = WorkerShortlist(ledgers, GateSettings(max_choices=3), 0.0)
    assert sorted(choice.workers_for(long_demand("new"))) == ["w27", "w28", "w29"]
    assert "w0" in choice.workers_for(
        long_demand("big", 10_000)
    )  # no other worker could ever take it
    ledgers["w29"].is_open = False
    assert "w29" not in WorkerShortlist(ledgers, GateSettings(max_choices=3), 0.0).workers_for(
        long_demand("new")
    )
    new = long_demand("new")
    for _ in range(4):  # each one that goes there makes it less attractive
        name = choice.workers_for(new)[0]
        ledgers[name].lease(new, 1e9)
        choice.grant(name, new.candidate(16))
        new = long_demand(f"new{_}")
    assert len(WorkerShortlist({"a": ledgers["w1"]}, GateSettings(), 0.0).workers_for(new)) == 1


def test_workers_whose_answers_became_long_are_not_evaluated_first():
    """By lengths as predicted on admission, all 30 would be alike."""
    ledgers = {f"w{i}": roomy_ledger() for i in range(30)}
    for i, ledger in enumerate(ledgers.values()):
        ledger.lease(long_demand(f"r{i}", 100), 1.0)
        out = 10 if i in (7, 19, 23) else 1800
        ledger.report(Report(1, 1, (Running(f"r{i}", out, 100, 2000),), 0.1), 1.0, {})
    shortlist = WorkerShortlist(ledgers, GateSettings(max_choices=3), 1.0)
    assert sorted(shortlist.workers_for(long_demand("new"))) == ["w19", "w23", "w7"]


def test_the_load_is_what_answers_are_expected_to_hold():
    ledger = roomy_ledger()
    ledger.lease(long_demand("a", 100), 1.0)
    alone = ledger.load
    assert alone == pytest.approx((100 + LengthDistribution(PRIOR, 2000).mean) / 20_000, rel=0.01)
    ledger.lease(long_demand("b", 300), 1.0)
    ledger.ended("a", 0.5)
    assert ledger.load == pytest.approx(alone + 200 / 20_000)
    assert ledger.expire(1.0) == ["b"] and ledger.load == pytest.approx(0.0, abs=1e-12)


def test_a_report_renews_what_answers_are_expected_to_hold():
    long, short = roomy_ledger(), roomy_ledger()
    for ledger in (long, short):
        ledger.lease(long_demand("a", 100), 1.0)
    admitted = long.load
    long.report(Report(1, 1, (Running("a", 1800, 100, 2000),), 0.1), 1.0, {})
    short.report(Report(1, 1, (Running("a", 5, 100, 2000),), 0.1), 1.0, {})
    assert short.load == pytest.approx(admitted, rel=0.25)  # as expected when it was admitted
    assert 1900 / 20_000 < long.load <= 2100 / 20_000  # what it holds by now, and its limit
    long.ended("a", 2.0)
    assert long.load == pytest.approx(0.0, abs=1e-12)
