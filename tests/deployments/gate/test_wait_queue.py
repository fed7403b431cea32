"""The order of the waiting against a naive choice of the next one, fairness, bounds."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.deployments.gate.types import LOWEST_PRIORITY, Demand, QueueSettings
from penstock.deployments.gate.wait_queue import GateQueue, TenantCounters, Waiting
from penstock.deployments.prediction.distribution import LengthDistribution, cumulative_hazard
from penstock.deployments.prediction.hazards import length_prior

LENGTH = LengthDistribution(cumulative_hazard(length_prior()), 100)
MAX_WAIT_S = 30.0


def waiting(number, tenant="t", **changes):
    prompt = changes.pop("prompt", 10)
    demand = Demand(f"r{number}", prompt, LENGTH, np.full(2, 0.5))
    values = {"priority": 0, "arrived": 0.0, "expected": 5.0, "area": 1.0, **changes}
    return Waiting(demand=demand, tenant=tenant, number=number, **values)


def queue_of(entries, **changes):
    queue = GateQueue(QueueSettings(max_wait_s=MAX_WAIT_S, **changes))
    for entry in entries:
        queue.add(entry)
    return queue


entry = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from("abc"),
        "priority": st.sampled_from([LOWEST_PRIORITY, 0, 1, 2]),
        "arrived": st.integers(0, 60).map(float),
        "area": st.integers(0, 5).map(float),
        "expected": st.integers(1, 40).map(float),
        "deadline": st.none() | st.integers(100, 103).map(float),
        "returned": st.booleans(),
    }
)
entries = st.lists(entry, max_size=9).map(
    lambda rows: [waiting(number, **row) for number, row in enumerate(rows)]
)


def naive_order(queue, entries, now):
    """One after another, by the rules as they are written down."""
    counters = {tenant: queue.counters[tenant] for tenant in "abc"}
    left, order = list(entries), []
    top = max((e.priority for e in entries), default=0)

    def overdue(e):
        return e.returned or now - e.arrived >= MAX_WAIT_S

    def rank(e):
        return top if overdue(e) and e.priority > LOWEST_PRIORITY else e.priority

    def loan(e):
        is_urgent = e.deadline is not None and e.deadline - now <= now - e.arrived
        return queue.settings.deadline_loan if is_urgent else 0.0

    while left:
        tenants = []
        for tenant in "abc":
            line = [e for e in left if e.tenant == tenant]
            if not line:
                continue
            line = [e for e in line if rank(e) == max(map(rank, line))]
            for wanted in ([e for e in line if e.returned], [e for e in line if overdue(e)]):
                if wanted:
                    tenants.append(min(wanted, key=lambda e: e.number))
                    break
            else:
                due = [e for e in line if e.deadline is not None]
                if due:
                    first = min(e.deadline for e in due)
                    line = [e for e in due if e.deadline == first]
                # The least area, less what it is worth that it waits.
                tenants.append(min(line, key=lambda e: (e.area + 0.05 * e.arrived, e.number)))
        best = max(map(rank, tenants))
        tenants = [e for e in tenants if rank(e) == best]
        chosen = min(tenants, key=lambda e: (counters[e.tenant] - loan(e), e.number))
        counters[chosen.tenant] += 1.0 * 10 + 2.0 * chosen.expected
        left.remove(chosen)
        order.append(chosen)
    return order


@settings(max_examples=300, deadline=None)
@given(
    entries,
    st.integers(60, 99),
    st.lists(st.integers(0, 90), min_size=3, max_size=3),
    st.sampled_from([0.0, 30.0, 2000.0]),
)
def test_order(entries, now, served, loan):
    queue = queue_of(entries, deadline_loan=loan)
    for tenant, tokens in zip("abc", served):
        queue.counters.charge(tenant, float(tokens))
    got = [e.request_id for e in queue.order(float(now))]
    assert got == [e.request_id for e in naive_order(queue, entries, float(now))]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 999), st.sampled_from([1.0, 3.0]))
def test_tenants_that_always_wait_are_served_alike(seed, weight):
    """With true lengths the counters of backlogged tenants are never a charge apart."""
    rng = random.Random(seed)
    queue = queue_of([])
    weights = {"a": weight, "b": 1.0, "c": 1.0}
    number = 0
    service = dict.fromkeys("abc", 0.0)
    for _ in range(300):
        for tenant in "abc":
            waits = [e for e in queue.order(0.0) if e.tenant == tenant]
            while len(waits) < 2:
                number += 1
                long = 10 if tenant == "b" else 1  # b asks for far more each time
                expected = float(rng.randint(1, 20) * long)
                new = waiting(number, tenant, expected=expected, weight=weights[tenant])
                queue.add(new)
                waits.append(new)
        first = next(queue.order(0.0))
        queue.remove(first.request_id)
        queue.counters.charge(first.tenant, queue.charge_of(first))
        service[first.tenant] += 10 + 2 * first.expected
        scaled = [service["a"] / weight, service["b"], service["c"]]
        assert max(scaled) - min(scaled) <= 10 + 2 * 200


def test_a_near_deadline_goes_before_other_tenants_requests():
    """Once half of its time has passed; and its tenant pays for it."""
    late, other = waiting(1, "a", arrived=0.0, deadline=20.0), waiting(2, "b", arrived=0.0)
    queue = queue_of([late, other])
    queue.counters.charge("a", 500.0)
    assert [e.number for e in queue.order(9.9)] == [2, 1]
    assert [e.number for e in queue.order(10.0)] == [1, 2]
    queue.counters.charge("a", 1600.0)  # more than the loan ahead
    assert [e.number for e in queue.order(10.0)] == [2, 1]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.sampled_from([0.0, 300.0, 2000.0]))
def test_deadlines_gain_a_tenant_the_loan_once(seed, loan):
    """a's requests are always urgent, b's and c's never: a runs ahead by the loan, and a charge."""
    rng = random.Random(seed)
    queue, number, service = queue_of([], deadline_loan=loan), 0, dict.fromkeys("abc", 0.0)
    for _ in range(300):
        for tenant in "abc":
            while sum(e.tenant == tenant for e in queue.order(50.0)) < 2:
                number += 1
                deadline = 50.5 if tenant == "a" else None
                expected = float(rng.randint(1, 40))
                queue.add(waiting(number, tenant, expected=expected, deadline=deadline))
        first = next(queue.order(50.0))
        queue.remove(first.request_id)
        queue.counters.charge(first.tenant, queue.charge_of(first))
        service[first.tenant] += 10 + 2 * first.expected
        ahead = service["a"] - min(service.values())
        assert -90 <= ahead - min(loan, ahead) <= 90
        assert max(service["b"], service["c"]) - min(service["b"], service["c"]) <= 90
    assert loan - 90 <= service["a"] - service["b"] <= loan + 90


def test_idleness_saves_up_nothing():
    counters = TenantCounters()
    counters.joins("busy")
    counters.charge("busy", 500.0)
    counters.joins("back")
    assert counters["back"] == 500.0
    counters.leaves("back")
    counters.charge("busy", -100.0)
    counters.joins("back")
    assert counters["back"] == 500.0  # nor does it forget


def test_idle_tenants_are_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr(TenantCounters, "MAX_IDLE", 3)
    counters = TenantCounters()
    counters.joins("stays")
    for i in range(9):
        counters.joins(f"t{i}")
        counters.charge(f"t{i}", 5.0)
        counters.leaves(f"t{i}")
    assert len(counters._counts) <= 5


@settings(max_examples=200, deadline=None)
@given(entries, entry)
def test_more_in_the_queue_is_never_less_ahead(entries, row):
    """The area ahead of a request does not shrink, whichever requests are added or queried."""
    row = {**row, "returned": False, "arrived": 60.0}
    newcomer = waiting(99, **row)
    queue = queue_of([])
    before = queue.area_ahead(newcomer, 60.0)
    assert before == 0.0
    for each in entries:
        queue.add(each)
        ahead = queue.area_ahead(newcomer, 60.0)
        assert ahead >= before
        before = ahead
    assert before <= sum(e.area for e in entries)


def test_a_flood_is_not_ahead_of_other_tenants():
    flood = [waiting(i, "flood") for i in range(100)]
    queue = queue_of(flood)
    assert queue.area_ahead(waiting(200, "flood", arrived=1.0), 1.0) == 100.0
    assert queue.area_ahead(waiting(200, "calm", arrived=1.0), 1.0) == 2.0
    assert next(queue.order(1.0)).tenant == "flood"
    queue.add(waiting(200, "calm", arrived=1.0))
    assert [e.tenant for e in queue.order(1.0)].index("calm") == 1


def test_who_leaves_a_full_queue():
    queue = queue_of([waiting(i, "big", priority=int(i == 3)) for i in range(4)])
    leaves = queue.displaced_by("small")
    assert leaves is not None and leaves.number == 2  # the newest of the lowest priority
    assert queue.displaced_by("big") is None
    for i in range(4, 6):
        queue.add(waiting(i, "small"))
    assert queue.displaced_by("small") is not None  # 3 and 3 afterwards
    queue.add(waiting(6, "small"))
    assert queue.displaced_by("small") is None
    returned = queue_of([replace(waiting(i, "big"), returned=True) for i in range(4)])
    assert returned.displaced_by("small") is None  # they were let in once


def test_weights_count_for_who_leaves_a_full_queue():
    queue = queue_of([waiting(i, "heavy", weight=4.0) for i in range(4)])
    assert queue.displaced_by("light") is None  # 1 of 1 would have more than 3 of 4
    assert queue.displaced_by("other", 4.0).number == 3
    queue.add(waiting(4, "light"))
    queue.add(waiting(5, "light"))
    assert queue.displaced_by("heavy", 4.0) is None  # 5 of 4, and 1 of 1 afterwards
    queue.add(waiting(6, "light"))
    assert queue.displaced_by("heavy", 4.0).number == 6


def test_a_tenant_of_three_times_the_weight_gets_three_times_as_much():
    queue = queue_of(
        [waiting(i, "a", weight=3.0) for i in range(40)]
        + [waiting(100 + i, "b") for i in range(40)]
    )
    first = [each.tenant for each, _ in zip(queue.order(0.0), range(40))]
    assert first.count("a") == 30


def test_expired():
    queue = queue_of([waiting(i, deadline=float(i)) for i in range(1, 4)] + [waiting(9)])
    assert [e.number for e in queue.take_expired(2.0)] == [1, 2]
    assert len(queue) == 2 and "r3" in queue and "r1" not in queue


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_waiting": 0}, "max_waiting"),
        ({"ageing": -1.0}, "ageing"),
        ({"max_wait_s": float("nan")}, "max_wait_s"),
    ],
)
def test_bad_settings(changes, named):
    with pytest.raises(ValueError, match=named):
        QueueSettings(**changes)


def test_requests_of_a_batch_do_not_rise_however_long_they_wait():
    batch = [waiting(i, "batch", priority=LOWEST_PRIORITY, arrived=0.0) for i in range(3)]
    batch.append(waiting(3, "batch", priority=LOWEST_PRIORITY, returned=True))
    queue = queue_of([*batch, waiting(4, arrived=9000.0), waiting(5, priority=-99, arrived=0.0)])
    order = [each.number for each in queue.order(9001.0)]
    assert order == [5, 4, 3, 0, 1, 2]
    assert queue.area_ahead(waiting(6, "new", arrived=9001.0), 9001.0) == 2.0
    for each in (4, 5):
        queue.remove(f"r{each}")
    assert [each.number for each in queue.order(9001.0)] == [3, 0, 1, 2]


def test_no_risk_is_taken_for_requests_of_a_batch():
    queue = queue_of([waiting(0, priority=LOWEST_PRIORITY, arrived=0.0), waiting(1, arrived=50.0)])
    assert queue.longest_wait(60.0) == 10.0
    queue.remove("r1")
    assert queue.longest_wait(60.0) == 0.0
