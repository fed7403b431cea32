"""Requests whose tokenizer no worker has: they wait, or are told why, and hold up nobody."""

from __future__ import annotations

import pytest

from penstock.deployments.gate.types import Refusal, Report, WorkerSpec
from tests.deployments.gate.test_controller import ask, certain, gate_with
from tests.deployments.gate.test_drain import tickets

CAPACITY = 200


def add(gate, name, tokenizer, now=0.0, capacity=CAPACITY):
    gate.add_worker(WorkerSpec(name, 1, capacity, 1, 64, tokenizer))
    gate.report(name, Report(1, 1, (), 1.0), now)


def test_requests_of_a_new_ingress_wait_for_their_worker_and_others_go_on():
    gate = gate_with()
    add(gate, "old", "old")
    assert gate.offer(ask("early", tokenizer="new"), certain(40), 0.0) is None
    assert gate.offer(ask("other", tokenizer="old"), certain(40), 1.0) is None
    assert tickets(gate.tick(1.0)) == {"other": "old"}
    (wait,) = gate.explain(2.0)
    assert (wait.request_id, wait.reason) == ("early", "no_worker")
    add(gate, "new", "new", 30.0)
    assert tickets(gate.tick(30.0)) == {"early": "new"}


@pytest.mark.parametrize("longest_wait_s", [float("inf"), 20.0])
def test_a_worker_that_does_not_come_is_named_with_the_remedy(longest_wait_s):
    gate = gate_with(start_s=10.0, longest_wait_s=longest_wait_s)
    add(gate, "w", "aa11")
    assert gate.offer(ask("a", tokenizer="bb22"), certain(40), 0.0) is None
    patience_s = min(30.0, longest_wait_s)
    assert gate.tick(patience_s - 0.1) == []
    (refusal,) = gate.tick(patience_s + 0.1)
    assert isinstance(refusal, Refusal) and refusal.reason == "no_worker"
    assert "digest bb22, not aa11" in refusal.message
    assert "compare them" in refusal.message and "KV tokens" not in refusal.message
    assert refusal.retry_after_s == pytest.approx(10.0)
    assert len(gate.queue) == 0


def test_requests_of_an_old_ingress_return_once_their_workers_drain_and_hold_up_no_other():
    gate = gate_with()
    for name in ("old", "new"):
        add(gate, name, name)
    gate.report("old", Report(1, 2, (), 1.0, is_draining=True), 1.0)
    assert gate.offer(ask("late", tokenizer="old"), certain(40), 1.0) is None
    assert gate.offer(ask("next", tokenizer="new"), certain(40), 1.0) is None
    refusal, ticket = gate.tick(1.0)
    assert (refusal.request_id, refusal.reason) == ("late", "no_worker")
    assert refusal.retry_after_s == pytest.approx(1.0)
    assert ticket.request_id == "next"


def test_a_request_that_is_too_long_is_measured_by_workers_of_its_tokenizer():
    gate = gate_with()
    add(gate, "small", "a", capacity=64)
    add(gate, "large", "b", capacity=400)
    refusal = gate.offer(ask("r", 60, tokenizer="a"), certain(40), 0.0)
    assert refusal is not None and refusal.reason == "never_fits"
    assert "exceed the 64 KV tokens" in refusal.message
