"""A worker that drains, as the gate sees it: it keeps what it has, and is granted nothing more."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from penstock.deployments.gate.types import Report, Running, Ticket, WorkerSpec
from penstock.workers.request import FinishReason
from tests.deployments.gate.test_controller import ask, certain, distribution, gate_with
from tests.deployments.gate.test_with_workers import (
    NoCredits,
    Node,
    alone,
    collect,
    house,
    request,
)


def report(sequence: int, *names: str, is_draining: bool) -> Report:
    running = tuple(Running(name, 3) for name in names)
    return Report(1, sequence, running, 1.0, is_draining=is_draining)


def tickets(outcomes: list[Any]) -> dict[str, str]:
    return {each.request_id: each.worker for each in outcomes if isinstance(each, Ticket)}


def test_a_draining_worker_gets_no_ticket_no_credit_and_no_reservation():
    gate = gate_with(200, 200)
    assert gate.offer(ask("early"), certain(40), 0.0) is None
    ((name, leaving),) = tickets(gate.tick(0.0)).items()
    gate.started(name, 0.0)
    gate.report(leaving, report(1, name, is_draining=True), 1.0)
    other = {"w0": "w1", "w1": "w0"}[leaving]
    spare = gate.spare()
    assert spare[leaving] == (0, 0) and spare[other][0] > 0
    for n in range(6):
        assert gate.offer(ask(f"late{n}"), certain(60), 1.0) is None
    granted = tickets(gate.tick(1.0))
    assert set(granted.values()) == {other} and 1 <= len(granted) < 6
    assert gate.ledgers[leaving].used(1.0) > 0  # its running request counts until it ends
    assert gate._placement.first_fits_at is not None
    assert gate._placement._reserved[1] == other
    waits = gate.explain(1.0)
    assert waits[0].worker == other


def test_a_reservation_on_a_worker_that_begins_to_drain_moves():
    gate = gate_with(100, 100)
    for name, prompt, length in (("short", 40, 30), ("long", 10, 80)):
        assert gate.offer(ask(name, prompt), certain(length), 0.0) is None
    where = tickets(gate.tick(0.0))
    assert where["short"] != where["long"]
    for name, worker in where.items():
        gate.started(name, 0.0)
        gate.report(worker, report(1, name, is_draining=False), 0.0)
    assert gate.offer(ask("next", 60), certain(35), 0.0) is None
    gate.tick(0.1)
    assert gate._placement._reserved[1] == where["short"]
    gate.report(where["short"], report(2, "short", is_draining=True), 1.0)
    gate.tick(1.0)
    assert gate._placement._reserved[1] == where["long"]


def test_when_all_workers_drain_requests_wait_and_are_not_called_too_long():
    gate = gate_with(200)
    gate.report("w0", report(1, is_draining=True), 0.0)
    assert gate.offer(ask("a"), distribution(40), 0.0) is None
    assert gate.tick(0.1) == []
    (wait,) = gate.explain(0.2)
    assert wait.reason == "no_worker" and wait.expected_s is None
    assert gate.admit(ask("b"), 8, 0.3) is None
    gate.remove_worker("w0")
    assert gate.tick(0.4) == []
    gate.add_worker(gate_with(200).ledgers["w0"].spec)
    assert tickets(gate.tick(0.5)) == {"a": "w0"}


@pytest.mark.parametrize("on_credit", [True, False])
def test_no_request_fails_when_one_of_two_workers_drains_under_load(model, run, on_credit):
    """More than fit at once, so that some wait at the gate when the drain begins."""
    leaving, staying = Node(model), Node(model)
    asked = [request(n, max_tokens=60 + 10 * (n % 5)) for n in range(24)]

    async def scenario():
        async with house(leaving, staying) as made:
            if not on_credit:
                made.client._credits = NoCredits()
            first = [asyncio.ensure_future(collect(made.pool, each)) for each in asked[:16]]
            async with asyncio.timeout(60):
                while leaving.thread.stats().num_generated_tokens < 3:
                    await asyncio.sleep(0.005)
            leaving.channel.drain()
            second = [asyncio.ensure_future(collect(made.pool, each)) for each in asked[16:]]
            async with asyncio.timeout(60):
                while leaving.channel.num_requests:
                    await asyncio.sleep(0.005)
                leaving.channel.stop()
                answers = await asyncio.gather(*first, *second)
            return answers, made.client.num_fallback

    try:
        answers, num_fallback = run(scenario())
    finally:
        leaving.stop()
        staying.stop()
    for each, (ids, last) in zip(asked, answers):
        assert last.finish_reason is FinishReason.LENGTH, last
        assert ids == alone(model, each)
    assert num_fallback == 0


@pytest.mark.parametrize("num_others", [1, 8])
def test_requests_go_to_workers_with_their_tokenizer_only(num_others):
    """While one model replaces another, ingresses and workers of both share the gate."""
    gate = gate_with(*[200] * num_others, max_choices=4)
    for name, ledger in list(gate.ledgers.items()):
        gate.add_worker(replace(ledger.spec, tokenizer="new"))
        gate.report(name, report(1, is_draining=False), 0.0)
    gate.add_worker(WorkerSpec("old", 1, 200, 1, 64, "old"))
    for n in range(6):
        asked = ask(f"o{n}", tokenizer="old")
        assert gate.offer(asked, certain(60), 0.0) is None
    got = tickets(gate.tick(0.0))
    assert set(got.values()) == {"old"} and len(got) == 2
    assert gate._placement._reserved[1] == "old"
    gate.remove_worker("old")
    gate.add_worker(WorkerSpec("old", 2, 200, 1, 64, "old"))
    assert set(tickets(gate.tick(1.0)).values()) == {"old"}


def test_without_a_worker_of_its_tokenizer_there_is_no_ticket_without_a_prediction_either():
    gate = gate_with(200)
    gate.add_worker(replace(gate.ledgers["w0"].spec, tokenizer="new"))
    assert gate.admit(ask("old", tokenizer="old"), 8, 0.0) is None
    assert gate.admit(ask("new", tokenizer="new"), 8, 0.0) is not None
    assert gate.admit(ask("unknown"), 8, 0.0) is not None
