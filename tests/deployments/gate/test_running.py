"""The register of running requests, where workers report what they were not chosen for."""

from __future__ import annotations

import pytest

from penstock.deployments.gate.controller import Gate
from penstock.deployments.gate.running import State
from penstock.deployments.gate.types import GateRequest, Report, Running, Ticket
from tests.deployments.gate.test_controller import ask, certain, gate_with

ANSWER = 10  # tokens, of prompt and of answer


def lists(gate: Gate, worker: str, sequence: int, *names: str, now: float, epoch: int = 1) -> None:
    """That worker reports that it runs `names`."""
    rows = tuple(Running(name, 1, ANSWER, ANSWER) for name in names)
    gate.report(worker, Report(epoch, sequence, rows, 0.03), now)


def held(gate: Gate) -> dict[str, int]:
    return {name: len(ledger) for name, ledger in gate.ledgers.items()}


def admitted(gate: Gate, request: GateRequest) -> None:
    """With a ticket, on w0: the other worker may hold less."""
    gate.offer(request, certain(ANSWER), 0.0)
    [ticket] = gate.tick(0.0)
    assert isinstance(ticket, Ticket) and ticket.worker == "w0"


@pytest.mark.parametrize("leaves", ["lease", "no longer listed", "worker gone", "both listed"])
def test_a_request_that_moved_to_another_worker_stays_registered_there(leaves):
    """Its ingress lost w0 and sent it to w1: whatever becomes of w0, it runs on w1."""
    gate = gate_with(100, 50)
    admitted(gate, ask("a", ANSWER, tenant="t"))
    charged = gate.queue.counters["t"]
    if leaves != "lease":
        gate.started("a", 0.0)
        lists(gate, "w0", 1, "a", now=0.1)
    lists(gate, "w1", 1, "a", now=0.2)
    assert held(gate) == {"w0": 1, "w1": 1}
    if leaves == "lease":
        gate.tick(3.0)
    elif leaves == "no longer listed":
        lists(gate, "w0", 2, now=0.3)
    elif leaves == "worker gone":
        assert gate.remove_worker("w0") == []  # it is not lost
    if leaves != "both listed":
        assert gate.running["a"].worker == "w1" and gate.running["a"].state is State.RUNNING
    assert gate.queue.counters["t"] == charged, "it is served, and not refunded"
    with pytest.raises(ValueError, match="'a' is already waiting or running"):
        gate.offer(ask("a"), certain(ANSWER), 0.4)
    gate.finished("a", 4, 0.5)
    assert "a" not in gate.running and not any(held(gate).values())
    assert gate.queue.counters["t"] == ANSWER + 2 * 4  # trued up at its end


def test_a_request_that_another_worker_listed_for_a_while_keeps_its_lease():
    gate = gate_with(100, 50)
    admitted(gate, ask("a", ANSWER))
    lists(gate, "w1", 1, "a", now=0.1)
    lists(gate, "w1", 2, now=0.2)  # no longer
    assert held(gate) == {"w0": 1, "w1": 0}
    record = gate.running["a"]
    assert (record.worker, record.state, record.is_elsewhere) == ("w0", State.ADMITTED, False)


def test_a_request_on_credit_that_moved_is_freed_on_both_workers():
    """The other worker lists it before its prediction is there, which is for the first one."""
    gate = gate_with(100, 50)
    assert gate.admit_on_credit(ask("a", ANSWER), ANSWER, "w0", 0.0)
    lists(gate, "w1", 1, "a", now=0.1)
    gate.confirm(ask("a", ANSWER), certain(ANSWER), "w0", 0.2)
    assert held(gate) == {"w0": 1, "w1": 1}
    gate.finished("a", ANSWER, 0.3)
    assert held(gate) == {"w0": 0, "w1": 0}


def test_a_request_on_credit_that_moved_outlives_its_lease():
    gate = gate_with(100, 50)
    assert gate.admit_on_credit(ask("a", ANSWER), ANSWER, "w0", 0.0)
    lists(gate, "w1", 1, "a", now=0.1)
    gate.tick(3.0)
    assert held(gate) == {"w0": 0, "w1": 1} and gate.running.is_provisional("a")
    gate.finished("a", ANSWER, 3.1)
    assert held(gate) == {"w0": 0, "w1": 0}


@pytest.mark.parametrize(("sequence", "epoch"), [(4, 1), (5, 2)])
def test_a_late_report_registers_nothing(sequence, epoch):
    """Neither one that was overtaken, nor one of another epoch."""
    gate = gate_with(100)
    lists(gate, "w0", 4, now=0.0)
    lists(gate, "w0", sequence, "a", now=0.1, epoch=epoch)
    assert "a" not in gate.running and held(gate) == {"w0": 0}
    assert gate.offer(ask("a", ANSWER), certain(ANSWER), 0.2) is None


@pytest.mark.parametrize("moves", [False, True])
def test_a_completion_counts_once_on_the_worker_where_the_request_ended(moves):
    """The headroom of a worker follows from its preemptions per completion."""
    gate = gate_with(100, 50)
    admitted(gate, ask("a", ANSWER))
    lists(gate, "w0", 1, "a", now=0.1)
    if moves:
        lists(gate, "w1", 1, "a", now=0.2)
    gate.finished("a", 4, 0.3)
    counted = {name: ledger.headroom.completions for name, ledger in gate.ledgers.items()}
    assert counted == {"w0": int(not moves), "w1": int(moves)}
