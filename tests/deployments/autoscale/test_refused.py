"""Refused requests that come again, in simulation: they order no more workers than there is work.

The real meter and the real policy; workers take a minute to start, and a request that would wait
longer than LIMIT_S is refused, with a Retry-After that its client keeps to.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import pytest

from penstock.deployments.autoscale.policy import decide
from penstock.deployments.autoscale.types import PolicyConfig, PolicyState, Signals
from penstock.deployments.gate.load_meter import PRIOR_RATE, LoadMeter
from penstock.deployments.gate.types import GateRequest

CONFIG = PolicyConfig(min_workers=1, max_workers=60)
START_S, LIMIT_S = 60.0, 5.0
WORK_S = 0.5  # of a request
STEP_S, END_S = 600, 1500  # the load rises; the run ends
LOW, HIGH = 0.7, 5.0  # workers' work a second


@dataclass
class Cluster:
    """`most_returns`: how often a client comes again. `marks`: "own", "same" or "none"."""

    most_returns: int
    marks: str
    seed: int = 0
    orders: list[tuple[int, int]] = field(default_factory=list)  # time, workers wanted
    num_refused: list[int] = field(default_factory=list)  # each second
    num_given_up: int = 0

    def run(self) -> Cluster:
        rng = np.random.default_rng(self.seed)
        meter, state = LoadMeter(0.0), None
        returns: list[tuple[float, int, int]] = []  # when, whose, how often before
        ready_at, queued, number = [0.0], 0.0, 0
        for second in range(END_S):
            rate = (LOW if second < STEP_S else HIGH) / WORK_S
            fresh = [(number + i, 0) for i in range(rng.poisson(rate))]
            number += len(fresh)
            while returns and returns[0][0] <= second:
                _, client, before = heapq.heappop(returns)
                fresh.append((client, before))
            num_ready = sum(at <= second for at in ready_at)
            refused = 0
            for client, before in fresh:
                name = f"{client}-{before}"
                mark = {"own": client, "same": 0, "none": None}[self.marks]
                request = GateRequest(name, 0)
                meter.offered(request, WORK_S * PRIOR_RATE, 0, float(second), mark)
                wait_s = queued / num_ready
                if wait_s <= LIMIT_S:
                    queued += WORK_S
                    meter.ended(name)
                    continue
                refused += 1
                after_s = max(1.0, wait_s - LIMIT_S / 2)
                meter.refused(name, after_s, float(second))
                if before < self.most_returns:
                    at = second + after_s * rng.uniform(1.0, 1.5)
                    heapq.heappush(returns, (at, client, before + 1))
                else:
                    self.num_given_up += 1
            self.num_refused.append(refused)
            queued = max(0.0, queued - num_ready)
            state = self._scale(meter, state, second, ready_at, queued)
        return self

    def _scale(
        self,
        meter: LoadMeter,
        state: PolicyState | None,
        second: int,
        ready_at: list[float],
        queued: float,
    ) -> PolicyState:
        load = meter.load(1, {}, float(second))
        num_ready = sum(at <= second for at in ready_at)
        signals = Signals(
            gate_epoch=1,
            offered_work_s=load.offered_work_s,
            offered_kv_s=0.0,
            backlog_s=queued,
            num_waiting=round(queued / WORK_S),
            num_running=num_ready,
            oldest_wait_s=queued / num_ready,
            ready=num_ready,
            starting=len(ready_at) - num_ready,
            start_s=START_S,
        )
        decision = decide(signals, state, float(second), CONFIG)
        while len(ready_at) < decision.number:
            ready_at.append(second + START_S)
        del ready_at[decision.number :]
        self.orders.append((second, decision.number))
        return decision.state

    def most(self) -> int:
        return max(number for _, number in self.orders)


@pytest.mark.parametrize("most_returns", [2, 10])
def test_retries_of_refused_requests_order_no_workers(most_returns: int) -> None:
    without = Cluster(0, "own").run()
    cluster = Cluster(most_returns, "own").run()
    assert sum(cluster.num_refused) > 2 * sum(without.num_refused)  # there were retries
    assert cluster.most() <= without.most() + 1
    assert max(cluster.num_refused[-300:]) == 0
    blind = Cluster(most_returns, "none").run()
    assert blind.most() > 1.5 * cluster.most(), "nothing to recognise: the test shows nothing"


@pytest.mark.parametrize("most_returns", [0, 2])
def test_requests_that_all_look_the_same_get_their_workers_later_but_get_them(
    most_returns: int,
) -> None:
    """Each refusal lets another client's request pass uncounted: a bound from below is left."""
    cluster = Cluster(most_returns, "same").run()
    assert HIGH < cluster.orders[-1][1] <= cluster.most() <= 10
    assert next(at for at, number in cluster.orders if number > HIGH) < STEP_S + 5 * START_S
    assert max(cluster.num_refused[-300:]) == 0
