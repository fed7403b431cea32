"""The few workers that are looked at of many, and what their answers are expected to hold."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.deployments.gate.ledger import Ledger
from penstock.deployments.gate.placement import WorkerShortlist
from penstock.deployments.gate.types import Demand, GateSettings, Report, Running, WorkerSpec
from penstock.deployments.prediction.distribution import LengthDistribution, cumulative_hazard
from penstock.deployments.prediction.hazards import length_prior

PRIOR = cumulative_hazard(length_prior())
UNIFORMS = (np.arange(32) + 0.5) / 32


def demand(name, prompt=100, max_tokens=2000):
    return Demand(name, prompt, LengthDistribution(PRIOR, max_tokens), UNIFORMS)


def empty_ledger():
    return Ledger(WorkerSpec("w", 1, 20_000, 16, 99), step_s=0.1)


def test_of_many_workers_the_least_loaded_are_looked_at():
    ledgers = {}
    for i in range(30):
        ledgers[f"w{i}"] = Ledger(WorkerSpec(f"w{i}", 1, 4000 if i else 40_000, 16, 99))
        for j in range(30 - i if i else 90):
            ledgers[f"w{i}"].lease(demand(f"{i}-{j:02d}"), 1e9)
    choice = WorkerShortlist(ledgers, GateSettings(max_choices=3), 0.0)
    assert sorted(choice.workers_for(demand("new"))) == ["w27", "w28", "w29"]
    assert "w0" in choice.workers_for(demand("big", 10_000))  # no other worker could ever take it
    ledgers["w29"].is_open = False
    assert "w29" not in WorkerShortlist(ledgers, GateSettings(max_choices=3), 0.0).workers_for(
        demand("new")
    )
    new = demand("new")
    for _ in range(4):  # each one that goes there makes it less attractive
        name = choice.workers_for(new)[0]
        ledgers[name].lease(new, 1e9)
        choice.grant(name, new.candidate(16))
        new = demand(f"new{_}")
    assert len(WorkerShortlist({"a": ledgers["w1"]}, GateSettings(), 0.0).workers_for(new)) == 1


def test_workers_whose_answers_became_long_are_not_evaluated_first():
    """By lengths as predicted on admission, all 30 would be alike."""
    ledgers = {f"w{i}": empty_ledger() for i in range(30)}
    for i, ledger in enumerate(ledgers.values()):
        ledger.lease(demand(f"r{i}", 100), 1.0)
        out = 10 if i in (7, 19, 23) else 1800
        ledger.report(Report(1, 1, (Running(f"r{i}", out, 100, 2000),), 0.1), 1.0, {})
    shortlist = WorkerShortlist(ledgers, GateSettings(max_choices=3), 1.0)
    assert sorted(shortlist.workers_for(demand("new"))) == ["w19", "w23", "w7"]


def test_the_load_is_what_answers_are_expected_to_hold():
    ledger = empty_ledger()
    ledger.lease(demand("a", 100), 1.0)
    alone = ledger.load
    assert alone == pytest.approx((100 + LengthDistribution(PRIOR, 2000).mean) / 20_000, rel=0.01)
    ledger.lease(demand("b", 300), 1.0)
    ledger.ended("a", 0.5)
    assert ledger.load == pytest.approx(alone + 200 / 20_000)
    assert ledger.expire(1.0) == ["b"] and ledger.load == pytest.approx(0.0, abs=1e-12)


def test_a_report_renews_what_answers_are_expected_to_hold():
    long, short = empty_ledger(), empty_ledger()
    for ledger in (long, short):
        ledger.lease(demand("a", 100), 1.0)
    admitted = long.load
    long.report(Report(1, 1, (Running("a", 1800, 100, 2000),), 0.1), 1.0, {})
    short.report(Report(1, 1, (Running("a", 5, 100, 2000),), 0.1), 1.0, {})
    assert short.load == pytest.approx(admitted, rel=0.25)  # as expected when it was admitted
    assert 1900 / 20_000 < long.load <= 2100 / 20_000  # what it holds by now, and its limit
    long.ended("a", 2.0)
    assert long.load == pytest.approx(0.0, abs=1e-12)
