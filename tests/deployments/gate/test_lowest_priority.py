"""Requests of the lowest priority, as those of batches, leave room for those that arrive later."""

from __future__ import annotations

from penstock.deployments.gate.types import LOWEST_PRIORITY, Ticket
from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.core.call import MAX_PRIORITY
from penstock.deployments.ingress.dispatch.credits import Credits
from penstock.deployments.prediction.features import Features
from penstock.workers.request import Request
from tests.deployments.gate.test_controller import ask, certain, gate_with


def admitted(gate, now):
    return [each.request_id for each in gate.tick(now) if isinstance(each, Ticket)]


def offer_batch(gate, count, length=90, now=0.0):
    for i in range(count):
        request = ask(f"batch-{i}", priority=LOWEST_PRIORITY, tenant="batch")
        assert gate.offer(request, certain(length), now) is None


def test_slots_stay_free_for_other_requests():
    gate = gate_with(100_000, slots=16, lease_s=1e6)
    offer_batch(gate, 40)
    assert len(admitted(gate, 0.0)) == 14
    assert admitted(gate, 100.0) == []  # however long they wait
    for i in range(3):
        gate.offer(ask(f"other-{i}"), certain(90), 100.0)
    assert admitted(gate, 100.0) == ["other-0", "other-1"]


def test_memory_stays_free_for_other_requests():
    gate = gate_with(1000)
    offer_batch(gate, 40)
    assert len(admitted(gate, 0.0)) == 8  # of 10 that fit: 8 take 800 tokens, 9 over 875
    gate.offer(ask("other"), certain(90), 1.0)
    assert admitted(gate, 1.0) == ["other"]


def test_a_large_one_runs_on_a_worker_that_holds_nothing():
    gate = gate_with(1000)
    offer_batch(gate, 2, length=950)
    (first,) = admitted(gate, 0.0)
    assert admitted(gate, 1.0) == []
    gate.finished(first, 950, 2.0)
    assert len(admitted(gate, 2.0)) == 1


def test_a_worker_of_one_slot_serves_them():
    gate = gate_with(1000, slots=1)
    offer_batch(gate, 2)
    first = admitted(gate, 0.0)
    assert len(first) == 1
    gate.finished(first[0], 90, 1.0)
    assert len(admitted(gate, 1.0)) == 1


def test_none_is_admitted_without_a_look_at_the_room_that_is_left():
    gate = gate_with(1000)
    assert gate.admit(ask("batch", priority=LOWEST_PRIORITY), 10, 0.0) is None
    assert gate.admit(ask("other"), 10, 0.0) is not None
    credits = Credits()
    credits.renew(0, {7: (1000, 8)}, 0.0)
    features = Features("m", prompt_tokens=1, max_tokens=4)
    for priority, epoch in ((MAX_PRIORITY, None), (0, 7)):
        request = AdmissionRequest(Request("r", (1,), priority=priority), features=features)
        assert credits.take(request, [7], 1, 0.0) == epoch
