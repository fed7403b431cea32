"""The record of the autoscaling policy: the load in buckets, orders, and the removal window.

Pure: each function returns a new state.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.deployments.autoscale.capacity import needed_workers
from penstock.deployments.autoscale.types import PolicyConfig, PolicyState, Signals


def down_window(signals: Signals, state: PolicyState, config: PolicyConfig) -> float:
    """Seconds of load that one worker less must have sufficed for, before one is removed."""
    longest_s = longest_window(signals, config)
    return min(max(state.window_s, shortest_window(signals, config)), longest_s)


def shortest_window(signals: Signals, config: PolicyConfig) -> float:
    return max(config.down_window_s, config.down_window_starts * signals.start_s)


def longest_window(signals: Signals, config: PolicyConfig) -> float:
    longest_s = min(config.max_down_window_s, config.max_down_starts * signals.start_s)
    return max(longest_s, shortest_window(signals, config))


def learn_window(
    state: PolicyState, signals: Signals, now: float, config: PolicyConfig
) -> PolicyState:
    """Grow the window if requests wait too long again after a removal, so that workers stay from
    one burst to the next; shrink it if that has not happened for four windows."""
    window_s = down_window(signals, state, config)
    if signals.oldest_wait_s > config.target_wait_s:
        since_s = now - state.late_at
        if state.late_at < state.last_down and since_s <= longest_window(signals, config):
            window_s = max(window_s, 1.25 * since_s)
            state = replace(state, window_s=window_s, window_at=now)
        return replace(state, late_at=now)
    if state.window_s and now - state.window_at > 4.0 * window_s:
        return replace(state, window_s=state.window_s / 2.0, window_at=now)
    return state


def observe(
    signals: Signals, state: PolicyState | None, now: float, config: PolicyConfig
) -> PolicyState:
    """Record the load, the orders, and since when there is no work."""
    totals = (signals.offered_work_s, signals.offered_kv_s)
    if state is None or state.gate_epoch != signals.gate_epoch:
        number = signals.ready + signals.starting if state is None else state.number
        state = PolicyState(
            number=number,
            gate_epoch=signals.gate_epoch,
            since=now,
            bucket_from=now,
            bucket_totals=totals,
            orders=() if state is None else state.orders,
        )
    elif now - state.bucket_from >= config.bucket_s:
        state = _close_bucket(signals, state, now, totals, config)
    is_idle = not (
        signals.num_waiting
        or signals.num_running
        or signals.backlog_s > 0.0
        or signals.batch_work_s > 0.0
    )
    idle_since = (now if state.idle_since is None else state.idle_since) if is_idle else None
    return replace(
        state, orders=_orders(state.orders, signals.starting, now), idle_since=idle_since
    )


def _close_bucket(
    signals: Signals,
    state: PolicyState,
    now: float,
    totals: tuple[float, float],
    config: PolicyConfig,
) -> PolicyState:
    seconds = now - state.bucket_from
    work = max(0.0, *(new - old for new, old in zip(totals, state.bucket_totals)))
    window_s = down_window(signals, state, config)
    buckets = (*state.buckets, (seconds, work))
    while buckets and state.recorded_s + seconds - buckets[0][0] >= longest_window(signals, config):
        state = replace(state, recorded_s=state.recorded_s - buckets[0][0])
        buckets = buckets[1:]
    recent, reach = [], 0.0
    for bucket in reversed(buckets):
        if reach >= window_s:
            break
        recent.append(bucket)
        reach += bucket[0]
    recent.reverse()
    return replace(
        state,
        bucket_from=now,
        bucket_totals=totals,
        buckets=buckets,
        recorded_s=state.recorded_s + seconds,
        forecast=state.forecast.observe(
            work / seconds, now, max(signals.start_s, config.bucket_s), config.forecast
        ),
        needed=needed_workers(
            recent,
            config.target_wait_s,
            config.late_share,
            config.usable,
            config.max_workers,
            state.needed,
        ),
    )


def _orders(
    orders: tuple[tuple[float, int], ...], starting: int, now: float
) -> tuple[tuple[float, int], ...]:
    """The orders that are not ready; assumes that the oldest are ready first."""
    missing = starting - sum(count for _, count in orders)
    if missing > 0:
        return (*orders, (now, missing))
    kept = list(orders)
    while missing < 0:
        at, count = kept.pop(0)
        missing += count
        if missing > 0:
            kept.insert(0, (at, missing))
    return tuple(kept)
