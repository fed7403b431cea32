"""The autoscaling policy: when it adds, when it removes, when it holds, and what it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.deployments.autoscale.forecast import ForecastConfig
from penstock.deployments.autoscale.policy import decide
from penstock.deployments.autoscale.types import Decision, PolicyConfig, Signals

CONFIG = PolicyConfig(min_workers=1, max_workers=16)
START_S = 180.0


def signals(**changed: Any) -> Signals:
    """Two ready workers without work; `changed` fields instead."""
    plain = Signals(
        gate_epoch=1,
        offered_work_s=0.0,
        offered_kv_s=0.0,
        backlog_s=0.0,
        num_waiting=0,
        num_running=0,
        oldest_wait_s=0.0,
        ready=2,
        starting=0,
        start_s=START_S,
    )
    return replace(plain, **changed)


def steady(
    rate: float, seconds: int, config: PolicyConfig = CONFIG, begin: float = 0.0, **changed: float
) -> Decision:
    """The last decision after `seconds` of a constant rate, in workers, one decision a second."""
    decision = None
    for second in range(seconds):
        now = begin + second
        decision = decide(
            signals(offered_work_s=rate * now, num_running=4, **changed),
            None if decision is None else decision.state,
            now,
            config,
        )
    assert decision is not None
    return decision


def test_a_load_that_fits_is_held() -> None:
    decision = steady(1.5, 900)
    assert (decision.number, decision.kind) == (2, "hold")


def test_a_load_above_the_workers_adds_workers() -> None:
    decision = steady(3.2, 120)
    assert decision.kind == "up" and 4 <= decision.number <= 6
    assert "2 to" in decision.reason and "180 s" in decision.reason


def test_workers_that_start_are_not_ordered_again() -> None:
    ordered = steady(3.2, 120)
    again = steady(3.2, 120, starting=ordered.number - 2)
    assert again.number == ordered.number


def test_a_worker_too_many_goes_after_the_window_and_not_before() -> None:
    assert steady(0.9, 269, ready=4).number == 4
    assert steady(0.9, 275, ready=4).number == 3


def test_kv_memory_counts_where_it_is_scarcer_than_work() -> None:
    decision = None
    for second in range(120):
        decision = decide(
            signals(offered_work_s=0.5 * second, offered_kv_s=4.0 * second, num_running=4),
            None if decision is None else decision.state,
            float(second),
            CONFIG,
        )
    assert decision is not None and decision.number >= 4


def test_missing_figures_hold_the_last_number() -> None:
    before = steady(3.2, 120)
    decision = decide(None, before.state, 121.0, CONFIG)
    assert decision.number == before.number
    assert decision.kind == "hold" and "no figures" in decision.reason


def test_the_first_decision_without_figures_is_the_minimum() -> None:
    assert decide(None, None, 0.0, replace(CONFIG, min_workers=3)).number == 3


def test_a_restarted_gate_starts_the_record_anew() -> None:
    before = steady(0.9, 260, ready=4)
    after = decide(signals(gate_epoch=2, ready=4, num_running=4), before.state, 270.0, CONFIG)
    assert after.number == before.number and after.state.buckets == ()


def test_three_failed_starts_stop_raises() -> None:
    decision = steady(3.2, 120, failed_starts=3)
    assert (decision.number, decision.kind) == (2, "hold")
    assert "3 starts failed" in decision.reason


def test_to_zero_after_the_idle_time_and_back_at_the_first_request() -> None:
    config = replace(CONFIG, min_workers=0, zero_after_s=600.0)
    decision = steady(0.5, 300, config)
    for second in range(300, 2000):
        decision = decide(
            signals(offered_work_s=150.0, ready=decision.number), decision.state, second, config
        )
        if decision.number == 0:
            break
    assert decision.kind == "sleep" and second >= 300 + 600
    waiting = signals(offered_work_s=151.0, backlog_s=1.0, num_waiting=1, ready=0)
    decision = decide(waiting, decision.state, second + 1.0, config)
    assert decision.kind == "wake" and decision.number >= 1


def test_a_running_request_keeps_the_last_worker() -> None:
    config = replace(CONFIG, min_workers=0)
    decision = None
    for second in range(1500):
        state = None if decision is None else decision.state
        decision = decide(signals(ready=1, num_running=1), state, float(second), config)
    assert decision is not None and decision.number == 1


def test_batch_work_counts_by_the_rate_that_its_window_requires() -> None:
    tight = steady(0.5, 60, batch_work_s=3600.0, batch_due_s=START_S + 900.0)
    assert tight.number >= 4 and "batch" in tight.reason
    assert steady(0.5, 60, batch_work_s=3600.0, batch_due_s=86_400.0).number == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_workers", -1),
        ("max_workers", 0),
        ("target_wait_s", 0.0),
        ("clear_s", float("inf")),
        ("bucket_s", float("nan")),
        ("usable", 1.5),
        ("quantile", 0.0),
        ("down_share", 0.0),
        ("late_share", 1.0),
        ("down_window_s", -1.0),
        ("zero_after_s", float("inf")),
        ("max_failed_starts", 0),
    ],
)
def test_a_bad_setting_is_named(field: str, value: float) -> None:
    changed: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=field):
        replace(CONFIG, **changed)


def test_an_order_is_kept_for_a_minute_where_the_windows_are_shorter() -> None:
    """A load that is 3 workers' at times and 1.5 workers' between, while a third one starts."""
    config = PolicyConfig(
        max_workers=16,
        down_window_s=2.0,
        down_window_starts=0.0,
        max_down_window_s=2.0,
        forecast=ForecastConfig(level_s=2.0, slope_s=4.0, damping_s=4.0),
    )
    decision, work, ordered = None, 0.0, 2
    numbers = []
    for second in range(600):
        work += 3.0 if second % 40 < 20 else 1.5
        starting = ordered - 2
        decision = decide(
            signals(offered_work_s=work, num_running=4, starting=starting, start_s=30.0),
            None if decision is None else decision.state,
            float(second),
            config,
        )
        ordered = max(2, decision.number)
        numbers.append(ordered)
    raised = next(at for at, number in enumerate(numbers) if number > 2)
    assert all(number > 2 for number in numbers[raised:])


def test_workers_ordered_for_a_backlog_are_not_cancelled_since_they_will_have_served_it() -> None:
    """60 requests at once: within the same bucket, the backlog is one that the ordered workers
    will have served by the time an order of now is ready."""
    config = replace(CONFIG, max_workers=3, target_wait_s=1.0, down_window_s=5.0)
    work, decision = 0.0, None
    for second in range(62):
        now = float(second)
        waiting = 0 if second < 57 else 60
        work += 73.0 if second == 57 else 0.0
        decision = decide(
            signals(
                offered_work_s=work,
                backlog_s={57: 73.0}.get(second, 8.0 if second > 57 else 0.0),
                num_waiting=waiting,
                num_running=4 if waiting else 0,
                ready=1,
                starting=2 if second > 57 else 0,
                start_s=5.0,
            ),
            None if decision is None else decision.state,
            now,
            config,
        )
        assert decision.number == (1 if second < 57 else 3), (second, decision.reason)
