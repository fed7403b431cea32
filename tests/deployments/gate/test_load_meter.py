"""The load that the autoscaler reads: work offered, waiting and running, and a worker's rate."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.deployments.gate import load_meter
from penstock.deployments.gate.forecast.full_rate import PROMPT_UNIT, StepCosts
from penstock.deployments.gate.load_meter import PRIOR_RATE, LoadMeter
from penstock.deployments.gate.types import LOWEST_PRIORITY, GateRequest, Running, WorkerSpec

SPEC = WorkerSpec("a", 1, capacity=10_000, slots=8)


def offer(meter: LoadMeter, name: str, prompt: int, answer: float, priority: int = 0) -> None:
    meter.offered(GateRequest(name, prompt, priority=priority), answer, SPEC.capacity)


def test_offered_work_is_in_seconds_of_a_worker():
    meter = LoadMeter(0.0)
    offer(meter, "a", 500, 900)
    load = meter.load(7, {"a": 1.0}, now=3.0)
    units = PROMPT_UNIT * 500 + 900
    assert load.gate_epoch == 7
    assert load.offered_work_s == load.backlog_s == pytest.approx(units / PRIOR_RATE)
    assert (load.num_waiting, load.num_running, load.oldest_wait_s) == (1, 0, 2.0)


def test_a_request_that_is_offered_again_counts_once():
    meter = LoadMeter(0.0)
    for _ in range(3):
        offer(meter, "a", 100, 100)
    assert meter.load(1, {}, 0.0).offered_work_s == pytest.approx(120 / PRIOR_RATE)


def offered_s(meter: LoadMeter) -> float:
    return meter.load(1, {}, 0.0).offered_work_s


def test_a_refused_request_that_comes_again_counts_once():
    meter = LoadMeter(0.0)
    for attempt in range(4):  # under a new id each time, as clients do
        now = 10.0 * attempt
        meter.offered(GateRequest(f"{attempt}", 100), 80, SPEC.capacity, now, "its mark")
        meter.refused(f"{attempt}", 8.0, now)
    assert offered_s(meter) == pytest.approx(100 / PRIOR_RATE)
    meter.offered(GateRequest("other", 100), 80, SPEC.capacity, 40.0, "another mark")
    assert offered_s(meter) == pytest.approx(200 / PRIOR_RATE)
    meter.offered(GateRequest("last", 100), 80, SPEC.capacity, 40.0, "its mark")
    meter.offered(GateRequest("new", 100), 80, SPEC.capacity, 41.0, "its mark")
    assert offered_s(meter) == pytest.approx(300 / PRIOR_RATE)  # one of the two


def test_a_refused_request_is_not_expected_for_ever_and_never_if_it_need_not_return():
    meter = LoadMeter(0.0)
    for number, (retry_after_s, later_s) in enumerate([(8.0, 60.0), (None, 1.0)]):
        mark = f"mark {number}"
        meter.offered(GateRequest(f"a{number}", 100), 80, SPEC.capacity, 0.0, mark)
        meter.refused(f"a{number}", retry_after_s, 0.0)
        meter.offered(GateRequest(f"b{number}", 100), 80, SPEC.capacity, later_s, mark)
    assert offered_s(meter) == pytest.approx(400 / PRIOR_RATE)


def test_the_number_of_refused_requests_that_are_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(load_meter, "MAX_REFUSED", 3)
    meter = LoadMeter(0.0)
    for i in range(5):
        meter.offered(GateRequest(f"{i}", 100), 80, SPEC.capacity, 0.0, i)
        meter.refused(f"{i}", 8.0, 0.0)
    before = offered_s(meter)
    for i in range(5):
        meter.offered(GateRequest(f"again {i}", 100), 80, SPEC.capacity, 1.0, i)
    assert offered_s(meter) - before == pytest.approx(2 * 100 / PRIOR_RATE)


def test_running_work_shrinks_with_each_report():
    meter = LoadMeter(0.0)
    offer(meter, "a", 100, 50)
    left = []
    for generated in (0, 10, 40, 60):
        meter.reported(SPEC, [Running("a", generated, 100)], step_s=0.0)
        left.append(meter.load(1, {}, 0.0).running_s * PRIOR_RATE)
    assert left == pytest.approx([50, 40, 10, 0])  # an answer longer than expected: never negative
    meter.ended("a", 61)
    assert meter.load(1, {}, 0.0).num_running == 0


def test_the_rate_is_measured_while_all_workers_are_full():
    meter = LoadMeter(0.0)
    offer(meter, "a", 0, 10_000)
    for second in range(1, 6):
        meter.reported(SPEC, [Running("a", 300 * second, 0)], step_s=0.01)
        meter.measure(float(second), num_workers=2, is_full=True)
    assert meter.rate == pytest.approx(150)


def test_before_a_measurement_the_rate_is_slots_over_the_time_of_a_step():
    meter = LoadMeter(0.0)
    assert meter.rate == PRIOR_RATE
    meter.reported(SPEC, [], step_s=0.02)
    assert meter.rate == pytest.approx(8 / 0.02)


def test_before_a_measurement_the_rate_is_that_of_a_full_worker_by_what_its_steps_cost():
    """By hand: eight rows of 100 + 40 / 2 tokens, and 20 prompt tokens a step for them."""
    costs = StepCosts(step=0.01, row=0.001, cached_token=1e-6, prompt_token=1e-4)
    meter = LoadMeter(0.0)
    for number in range(3):
        offer(meter, str(number), 100, 40)
    meter.reported(SPEC, [], step_s=0.011, costs=costs)
    step_s = 0.01 + 8 * 0.001 + 8 * 120 * 1e-6 + 20 * 1e-4
    assert meter.rate == pytest.approx((8 + PROMPT_UNIT * 20) / step_s)
    small = dataclasses.replace(SPEC, capacity=480)  # four such requests
    meter.reported(small, [], step_s=0.011, costs=costs)
    step_s = 0.01 + 4 * 0.001 + 4 * 120 * 1e-6 + 10 * 1e-4
    assert meter.rate == pytest.approx((4 + PROMPT_UNIT * 10) / step_s)
    meter.reported(SPEC, [], step_s=0.5, costs=costs)  # no shorter than steps are now
    assert meter.rate == pytest.approx((8 + PROMPT_UNIT * 20) / 0.5)


def test_costs_that_are_no_numbers_are_not_believed():
    assert StepCosts.of(()) is None
    assert StepCosts.of((0.01, float("nan"), 0.0, 0.0)) is None
    assert StepCosts.of((0.01, 0.001, 0.0, 0.0)) == StepCosts(0.01, 0.001, 0.0, 0.0)


def test_workers_that_are_not_full_lower_no_rate_but_may_raise_it():
    meter = LoadMeter(0.0)
    offer(meter, "a", 0, 1e6)
    generated = 0
    rates = []
    for second, (step, full) in enumerate(
        [(500, True), (500, True), (10, False), (900, False)], start=1
    ):
        generated += step
        meter.reported(SPEC, [Running("a", generated, 0)], step_s=0.01)
        meter.measure(float(second), num_workers=1, is_full=full)
        rates.append(meter.rate)
    assert rates[1:] == pytest.approx([500, 500, 900])


def test_a_request_of_before_a_restart_counts_from_its_first_report():
    meter = LoadMeter(0.0)
    meter.reported(SPEC, [Running("old", 700, 100)], step_s=0.0)
    meter.measure(1.0, 1, is_full=True)
    meter.reported(SPEC, [Running("old", 800, 100)], step_s=0.0)
    meter.measure(2.0, 1, is_full=True)
    assert meter.rate == pytest.approx(100)
    assert meter.load(1, {}, 2.0).offered_work_s == 0


def test_kv_work_is_what_a_request_holds_for_as_long_as_it_runs():
    meter = LoadMeter(0.0)
    meter.reported(SPEC, [], step_s=0.01)
    offer(meter, "a", 1000, 200)
    held = (1000 + 100) * 200 * 0.01 / 10_000
    assert meter.load(1, {}, 0.0).offered_kv_s == pytest.approx(held)


def test_batches_are_in_a_figure_of_their_own():
    meter = LoadMeter(0.0)
    offer(meter, "batch", 100, 500, priority=LOWEST_PRIORITY)
    offer(meter, "chat", 100, 80)
    waiting = {"batch": 0.0, "chat": 4.0}
    load = meter.load(1, waiting, now=5.0)
    assert (load.num_waiting, load.oldest_wait_s) == (1, 1.0)
    assert load.backlog_s == load.offered_work_s == pytest.approx(100 / PRIOR_RATE)
    assert load.batch_work_s == pytest.approx(520 / PRIOR_RATE)
    meter.reported(SPEC, [Running("batch", 300, 100)], step_s=0.0)
    load = meter.load(1, {"chat": 4.0}, now=5.0)
    assert load.batch_work_s == pytest.approx(200 / PRIOR_RATE)
    assert load.num_running == 0
    meter.ended("batch", 310)
    assert meter.load(1, {}, now=5.0).batch_work_s == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["offered", "reported", "ended", "measure"]),
            st.integers(0, 5),
            st.integers(0, 300),
        ),
        max_size=60,
    )
)
def test_totals_never_fall_and_no_figure_is_negative(events):
    meter, now, before = LoadMeter(0.0), 0.0, (0.0, 0.0)
    for kind, number, tokens in events:
        now += 0.7
        name = str(number)
        if kind == "offered":
            offer(meter, name, tokens, tokens / 2)
        elif kind == "reported":
            meter.reported(SPEC, [Running(name, tokens, 10)], step_s=tokens / 1000)
        elif kind == "ended":
            meter.ended(name, tokens)
        else:
            meter.measure(now, number, is_full=tokens > 100)
        load = meter.load(1, {"0": 0.0}, now)
        assert min(load.backlog_s, load.running_s, load.oldest_wait_s) >= 0
        assert load.rate > 0
        totals = (load.offered_work_s, load.offered_kv_s)
        assert all(new >= old for new, old in zip(totals, before))
        before = totals
