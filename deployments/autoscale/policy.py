"""The autoscaling policy: from the gate's figures to a number of workers, with its reason.

Adding a worker takes minutes, so the policy looks ahead by one start-up time: it adds workers where
a wait is foreseen for the moment at which they would be ready, never for a backlog that is served
by then. It removes a worker once the load of the last minutes could have been served without
it. Pure: no Ray, no clock; every decision returns the state that the next one takes.

Units: work in worker-seconds (what one worker does in a second under full load), rates in workers
(worker-seconds per second), times in seconds on the caller's clock.
"""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.deployments.autoscale.capacity import Arrival, backlog_after
from penstock.deployments.autoscale.record import (
    down_window,
    learn_window,
    longest_window,
    observe,
    shortest_window,
)
from penstock.deployments.autoscale.types import Decision, Kind, PolicyConfig, PolicyState, Signals


def decide(
    signals: Signals | None, state: PolicyState | None, now: float, config: PolicyConfig
) -> Decision:
    """The number of workers that there should be now.

    signals: None where figures are missing or stale: the last number is held.
    state: of the last decision; None at the first, or after a restart of the caller.
    now: seconds, on a clock that never goes back.
    """
    if signals is None:
        number = config.min_workers if state is None else state.number
        number = _bounded(number, config)
        state = PolicyState(number) if state is None else replace(state, number=number)
        return Decision(number, "hold", f"no figures from the gate: holds {number}", state)
    before = None if state is None else state.bucket_from
    state = learn_window(observe(signals, state, now, config), signals, now, config)
    if state.bucket_from != before:
        wanted, keep, _ = _wanted(signals, state, now, config)
        reach = now - max(longest_window(signals, config), config.cancel_s)
        old = state.history
        old = old[1:] if old and old[0][0] < reach else old
        history = (*old, (now, keep, wanted))
        after = now - down_window(signals, state, config)
        kept = max(keep for at, keep, _ in history if at > after)
        state = replace(state, history=history, kept=kept)
    kind, number, reason = _choose(signals, state, now, config)
    current = signals.ready + signals.starting
    bounded = _bounded(number, config)
    if bounded != number:
        which = "max_workers" if bounded < number else "min_workers"
        reason += f"; {which} is {bounded}"
        kind = "hold" if bounded == current else "up" if bounded > current else "down"
    if bounded > current:
        window_s = down_window(signals, state, config)
        if state.last_up < state.last_down and now - state.last_down <= window_s:
            state = replace(state, window_s=2.0 * window_s, window_at=now)
        state = replace(state, last_up=now)
    elif bounded < current:
        state = replace(state, last_down=now)
    return Decision(bounded, kind, reason, replace(state, number=bounded))


def _choose(
    signals: Signals, state: PolicyState, now: float, config: PolicyConfig
) -> tuple[Kind, int, str]:
    current = signals.ready + signals.starting
    if state.idle_since is not None:
        return _idle(signals, state, now, config)
    wanted, _, reason = _wanted(signals, state, now, config)
    if current == 0:
        wanted = max(1, wanted)
        work = f"{signals.num_waiting} requests ({signals.backlog_s:.0f} worker-seconds) wait"
        return "wake", wanted, f"{work} and no worker runs: starts {wanted}"
    if wanted > current:
        if signals.failed_starts >= config.max_failed_starts:
            return (
                "hold",
                current,
                f"{signals.failed_starts} starts failed in the last 10 minutes: holds {current} "
                f"although {wanted} are wanted ({reason})",
            )
        return "up", wanted, f"{current} to {wanted}: {reason}"
    return _lower(signals, state, now, config, wanted)


def _idle(
    signals: Signals, state: PolicyState, now: float, config: PolicyConfig
) -> tuple[Kind, int, str]:
    current = signals.ready + signals.starting
    if current == 0:
        return "hold", 0, "nothing to do: no worker"
    assert state.idle_since is not None
    idle_s = now - state.idle_since
    after_s = max(config.zero_after_s, 3.0 * signals.start_s)
    if config.min_workers == 0 and idle_s >= after_s:
        return "sleep", 0, f"{current} to 0: no work for {idle_s:.0f} s"
    if current > 1:
        return _lower(signals, state, now, config, 0)
    return "hold", current, f"no work for {idle_s:.0f} s (to zero after {after_s:.0f} s)"


def _wanted(
    signals: Signals, state: PolicyState, now: float, config: PolicyConfig
) -> tuple[int, int, str]:
    """Workers wanted when an order of now would be ready, workers to keep, and why."""
    ahead_s = max(signals.start_s, config.bucket_s)
    forecast = state.forecast
    rate = forecast.at(0.0, config.forecast)
    later = forecast.at(ahead_s, config.forecast)
    share = min(config.quantile, ahead_s / (ahead_s + config.reserve_s))
    error = forecast.error(share)
    batch = signals.batch_work_s / max(signals.batch_due_s - ahead_s, config.bucket_s)
    arrivals = _arrivals(signals, state, now)
    soon = signals.ready + sum(count for _, count in arrivals)
    backlog, gone_after = backlog_after(
        signals.backlog_s,
        rate,
        later - rate,
        ahead_s,
        signals.ready,
        arrivals,
    )
    sustained = (later + error) / config.usable + batch
    reason = (
        f"{later:.1f} workers' work a second expected in {ahead_s:.0f} s "
        f"(at most {later + error:.1f} with {100 * share:.0f} %)"
    )
    if batch > 0.0:
        reason += f", {batch:.1f} for batch jobs"
    wanted = math.ceil(sustained - 1e-6)
    if math.isinf(gone_after) and backlog > config.target_wait_s * max(soon, 1):
        clear_s = max(config.clear_s, config.clear_starts * ahead_s)
        clearing = math.ceil(later / config.usable + backlog / clear_s - 1e-6)
        if clearing > wanted:
            wanted = clearing
            reason = (
                f"{backlog:.0f} worker-seconds would wait in {ahead_s:.0f} s, when an order of now "
                f"is ready, {backlog / max(soon, 1):.0f} s with {soon} workers"
            )
    return wanted, math.ceil((later + error) / config.spare + batch - 1e-6), reason


def _lower(
    signals: Signals, state: PolicyState, now: float, config: PolicyConfig, wanted: int
) -> tuple[Kind, int, str]:
    """The decision where no more workers are wanted than there are: hold, or remove some."""
    current = signals.ready + signals.starting
    window_s = down_window(signals, state, config)
    shortest_s = shortest_window(signals, config)
    if now - state.since < shortest_s:
        return (
            "hold",
            current,
            f"{wanted} would suffice, holds {current}: figures reach back "
            f"{now - state.since:.0f} s of the {shortest_s:.0f} s that a removal needs",
        )
    floor = max(wanted, state.needed, state.kept, 1)
    if floor >= current:
        return "hold", current, f"{current} workers fit the load ({state.needed} were needed)"
    if signals.starting:
        # The history has one entry a bucket: an order given within one may not be in it. What is
        # wanted counts workers that start as ready by then, so they look superfluous at once.
        if now - state.last_up < config.cancel_s:
            return "hold", current, f"{floor} would suffice, holds {current}: the order is recent"
        recent = max(
            (each for at, _, each in state.history if at > now - config.cancel_s), default=0
        )
        number = max(floor, recent, signals.ready)
        if number < current:
            return (
                "down",
                number,
                f"{current} to {number}: workers that start are no longer wanted",
            )
        return "hold", current, f"{floor} would suffice, holds {current}: {signals.starting} start"
    if now - state.last_up < shortest_s / 2:
        return "hold", current, f"{floor} would suffice, holds {current}: the last raise is recent"
    number = max(floor, current - max(1, int(config.down_share * current)))
    return (
        "down",
        number,
        f"{current} to {number}: the load of the last {window_s:.0f} s needed {state.needed} and "
        f"{wanted} are wanted",
    )


def _arrivals(signals: Signals, state: PolicyState, now: float) -> list[Arrival]:
    """When the workers that start become ready, without orders older than two start-up times."""
    return [
        (max(0.0, at + signals.start_s - now), count)
        for at, count in state.orders
        if now - at <= 2.0 * signals.start_s
    ]


def _bounded(number: int, config: PolicyConfig) -> int:
    return min(max(number, config.min_workers), config.max_workers)
