"""Properties of the autoscaling policy, for any figures; the clock is the test's."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.deployments.autoscale.policy import decide
from penstock.deployments.autoscale.types import Decision, PolicyConfig, PolicyState, Signals

numbers = st.floats(0.0, 500.0)
counts = st.integers(0, 20)
any_signals = st.builds(
    Signals,
    gate_epoch=st.integers(1, 2),
    offered_work_s=numbers,
    offered_kv_s=numbers,
    backlog_s=numbers,
    num_waiting=counts,
    num_running=counts,
    oldest_wait_s=numbers,
    ready=counts,
    starting=counts,
    start_s=st.floats(0.0, 900.0),
    failed_starts=st.integers(0, 5),
    batch_work_s=numbers,
    batch_due_s=st.one_of(st.just(math.inf), st.floats(0.0, 1e5)),
)
bounds = st.tuples(st.integers(0, 5), st.integers(1, 12)).map(lambda pair: (pair[0], sum(pair)))


def at_rate(rate: float, now: float, **changed: Any) -> Signals:
    """Figures of a cluster on which `rate` workers' work arrives steadily and none waits."""
    plain = Signals(
        gate_epoch=1,
        offered_work_s=rate * now,
        offered_kv_s=0.0,
        backlog_s=0.0,
        num_waiting=0,
        num_running=4,
        oldest_wait_s=0.0,
        ready=4,
        starting=0,
        start_s=180.0,
    )
    return replace(plain, **changed)


def after(rate: float, seconds: int, config: PolicyConfig, **changed: Any) -> PolicyState:
    """The state after a steady load."""
    decision: Decision | None = None
    for now in range(0, seconds, 5):
        state = None if decision is None else decision.state
        decision = decide(at_rate(rate, now, **changed), state, float(now), config)
    assert decision is not None
    return decision.state


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(st.none(), any_signals), min_size=1, max_size=20), bounds)
def test_the_number_stays_within_its_bounds_and_has_a_reason(
    seen: list[Signals | None], limits: tuple[int, int]
) -> None:
    config = PolicyConfig(min_workers=limits[0], max_workers=limits[1])
    state = None
    for second, signals in enumerate(seen):
        decision = decide(signals, state, 7.0 * second, config)
        state = decision.state
        assert limits[0] <= decision.number <= limits[1]
        assert decision.reason and "\n" not in decision.reason
        assert state.number == decision.number


@settings(max_examples=40, deadline=None)
@given(st.lists(any_signals, min_size=1, max_size=20))
def test_missing_figures_hold_the_number(seen: list[Signals]) -> None:
    config = PolicyConfig(min_workers=0, max_workers=30)
    state = None
    for second, signals in enumerate(seen):
        decision = decide(signals, state, 7.0 * second, config)
        held = decide(None, decision.state, 7.0 * second + 3.0, config)
        assert held.number == decision.number and held.kind == "hold"
        state = held.state


@settings(max_examples=20, deadline=None)
@given(st.floats(0.2, 3.0), st.floats(0.0, 1.0), st.sampled_from([30.0, 180.0, 600.0]))
def test_a_backlog_that_is_gone_before_help_arrives_adds_no_worker(
    rate: float, share: float, start_s: float
) -> None:
    config = PolicyConfig(min_workers=1, max_workers=30)
    state = after(rate, 900, config, start_s=start_s)
    backlog = share * 0.8 * (4.0 - rate) * start_s  # four workers clear it within start_s
    signals = at_rate(
        rate, 900.0, backlog_s=backlog, num_waiting=9, start_s=start_s, oldest_wait_s=20.0
    )
    assert decide(signals, state, 900.0, config).number <= 4


@settings(max_examples=20, deadline=None)
@given(st.floats(0.2, 6.0), numbers, numbers)
def test_a_larger_backlog_never_gives_fewer_workers(rate: float, one: float, other: float) -> None:
    config = PolicyConfig(min_workers=1, max_workers=30)
    state = after(rate, 600, config)
    few, many = sorted((one, other))
    chosen = [
        decide(at_rate(rate, 600.0, backlog_s=each, num_waiting=3), state, 600.0, config).number
        for each in (few, many)
    ]
    assert chosen[0] <= chosen[1]


@settings(max_examples=12, deadline=None)
@given(st.floats(0.0, 8.0), st.floats(0.0, 8.0))
def test_a_higher_rate_never_gives_fewer_workers(one: float, other: float) -> None:
    config = PolicyConfig(min_workers=1, max_workers=30)
    low, high = sorted((one, other))
    chosen = [
        decide(at_rate(each, 900.0), after(each, 900, config), 900.0, config).number
        for each in (low, high)
    ]
    assert chosen[0] <= chosen[1]


@settings(max_examples=8, deadline=None)
@given(st.floats(0.0, 12.0), st.integers(1, 14), st.sampled_from([30.0, 180.0, 600.0]))
def test_on_a_constant_load_the_number_settles(rate: float, ready: int, start_s: float) -> None:
    """No removal is followed by a raise: orders are ready after start_s, and the load is even."""
    config = PolicyConfig(min_workers=1, max_workers=20)
    state, backlog = None, 0.0
    starting: list[float] = []
    kinds: list[tuple[int, bool]] = []
    for now in range(0, 7200, 5):
        ready += sum(at <= now for at in starting)
        starting = [at for at in starting if at > now]
        backlog = max(0.0, backlog + 5.0 * (rate - ready))
        signals = at_rate(
            rate,
            float(now),
            backlog_s=backlog,
            num_waiting=math.ceil(backlog),
            ready=ready,
            starting=len(starting),
            start_s=start_s,
        )
        decision = decide(signals, state, float(now), config)
        state = decision.state
        change = decision.number - ready - len(starting)
        if change:
            kinds.append((now, change > 0))
        starting += [now + start_s] * change
        if change < 0:
            cancelled = min(-change, len(starting))
            starting = starting[: len(starting) - cancelled]
            ready -= -change - cancelled
    assert ready >= rate * 0.999
    late = [is_up for at, is_up in kinds if at > 3600]
    ups_after_downs = sum(a is False and b is True for a, b in pairwise(late))
    assert ups_after_downs == 0


@settings(max_examples=40, deadline=None)
@given(any_signals)
def test_a_restart_removes_no_worker_at_once(signals: Signals) -> None:
    config = PolicyConfig(min_workers=0, max_workers=60)
    current = signals.ready + signals.starting
    assert decide(signals, None, 1000.0, config).number >= current


@settings(max_examples=40, deadline=None)
@given(any_signals, st.integers(0, 10**6))
def test_the_clock_has_no_origin(signals: Signals, origin: int) -> None:
    config = PolicyConfig(min_workers=0, max_workers=60)
    chosen = []
    for begin in (0.0, float(origin)):
        state = None
        for second in range(0, 60, 5):
            decision = decide(signals, state, begin + second, config)
            state = decision.state
        chosen.append(decision.number)
    assert chosen[0] == chosen[1]
