"""The Gaussian grid as a room, and the few workers that are looked at of many."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.deployments.gate.forecast.gaussian import HORIZONS
from penstock.deployments.gate.ledger import Ledger
from penstock.deployments.gate.placement import WorkerShortlist
from penstock.deployments.gate.types import Demand, GateSettings, Report, Running, WorkerSpec
from penstock.deployments.prediction.distribution import LengthDistribution, cumulative_hazard
from penstock.deployments.prediction.hazards import length_prior

PRIOR = cumulative_hazard(length_prior())


def demand(name, prompt=100, max_tokens=2000, seed=0):
    rng = np.random.default_rng([seed, len(name), ord(name[-1])])
    u = (rng.permutation(64) + rng.random(64)) / 64
    return Demand(name, prompt, LengthDistribution(PRIOR, max_tokens), u)


def ledger_of(num, capacity=20_000, slots=99):
    ledger = Ledger(WorkerSpec("w", 1, capacity, 16, slots), step_s=0.1)
    for i in range(num):
        ledger.lease(demand(f"r{i:02d}", 50 + 10 * i, seed=i), 1e9)
    return ledger


def test_both_rules_see_about_the_same_peak():
    """The largest quantile over time is less than the quantile of the largest use: more so where
    few answers with long tails run. With many of them both come together."""
    shares = []
    for num in (5, 20, 60):
        candidate = demand("new").candidate(16)
        sampled = ledger_of(num).forecast(0.0, 0.95, 64).peak_with(candidate)
        shares.append(ledger_of(num).forecast(0.0, 0.95, 64, 1.645).peak_with(candidate) / sampled)
    assert 0.5 < shares[0] < shares[-1] < 1.05
    assert shares[-1] > 0.85


def test_the_grid_room_joins_and_waits_like_a_room():
    ledger, candidate = ledger_of(12, capacity=9000), demand("new", 6900).candidate(16)
    forecast = ledger.forecast(0.0, 0.95, 64, 1.645)
    assert not forecast.admits(candidate) and forecast.peak_with(candidate) > forecast.limit
    steps = forecast.fits_after(candidate)
    assert steps is not None and steps > 0 and steps in HORIZONS
    assert forecast.admits_after(steps, candidate)
    joined = forecast.joined_by(demand("new", 10).candidate(16))
    assert (joined.num, joined.slots) == (forecast.num + 1, forecast.slots - 1)
    assert joined.peak_with(candidate) > forecast.peak_with(candidate)
    assert forecast.fits_after(demand("huge", 8000).candidate(16)) is None  # 8,000 + 2,000 > 9,000


def test_an_empty_worker_takes_any_request_that_fits_at_its_longest():
    forecast = ledger_of(0, capacity=2112).forecast(0.0, 0.95, 64, 1.645)
    assert forecast.admits(demand("a", 100).candidate(16))
    assert not forecast.admits(demand("a", 120).candidate(16))
    assert (
        ledger_of(3, slots=3).forecast(0.0, 0.95, 64, 1.645).fits_after(demand("a").candidate(16))
        > 0
    )


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


def test_the_load_is_what_answers_are_expected_to_hold():
    ledger = ledger_of(0)
    ledger.lease(demand("a", 100), 1.0)
    alone = ledger.load
    assert alone == pytest.approx((100 + LengthDistribution(PRIOR, 2000).mean) / 20_000, rel=0.01)
    ledger.lease(demand("b", 300), 1.0)
    ledger.ended("a", 0.5)
    assert ledger.load == pytest.approx(alone + 200 / 20_000)
    assert ledger.expire(1.0) == ["b"] and ledger.load == pytest.approx(0.0, abs=1e-12)


def test_a_report_renews_what_answers_are_expected_to_hold():
    long, short = ledger_of(0), ledger_of(0)
    for ledger in (long, short):
        ledger.lease(demand("a", 100), 1.0)
    admitted = long.load
    long.report(Report(1, 1, (Running("a", 1800, 100, 2000),), 0.1), 1.0, {})
    short.report(Report(1, 1, (Running("a", 5, 100, 2000),), 0.1), 1.0, {})
    assert short.load == pytest.approx(admitted, rel=0.25)  # as expected when it was admitted
    assert 1900 / 20_000 < long.load <= 2100 / 20_000  # what it holds by now, and its limit
    long.ended("a", 2.0)
    assert long.load == pytest.approx(0.0, abs=1e-12)


def test_workers_whose_answers_became_long_are_not_evaluated_first():
    """By lengths as predicted on admission, all 30 would be alike."""
    ledgers = {f"w{i}": ledger_of(0) for i in range(30)}
    for i, ledger in enumerate(ledgers.values()):
        ledger.lease(demand(f"r{i}", 100), 1.0)
        out = 10 if i in (7, 19, 23) else 1800
        ledger.report(Report(1, 1, (Running(f"r{i}", out, 100, 2000),), 0.1), 1.0, {})
    shortlist = WorkerShortlist(ledgers, GateSettings(max_choices=3), 1.0)
    assert sorted(shortlist.workers_for(demand("new"))) == ["w19", "w23", "w7"]
