"""Which workers report: epochs, preemptions, silence, and those that a new gate waits for."""

from __future__ import annotations

from penstock.deployments.gate.types import WorkerSpec
from penstock.deployments.gate.workers import REBUILD_S, SILENCE_S, ReportingWorkers


def spec(epoch: int, name: str = "w") -> WorkerSpec:
    return WorkerSpec(name, epoch, capacity=640)


def test_a_later_epoch_at_an_address_replaces_the_earlier_one():
    workers = ReportingWorkers(0.0)
    workers.reported(spec(1), 0, 0.0)
    workers.reported(spec(2, "other"), 0, 0.0)
    workers.reported(spec(3), 0, 1.0)
    assert [workers.name(epoch) for epoch in (1, 2, 3)] == [None, "other", "w"]
    assert len(workers) == 2


def test_preemptions_are_counted_from_a_workers_first_report():
    workers = ReportingWorkers(0.0)
    counted = [workers.reported(spec(1), num, 0.0) for num in (5, 5, 8, 7)]
    assert counted == [0, 0, 3, 0]
    assert workers.reported(spec(2), 4, 1.0) == 0  # it started anew


def test_a_silent_worker_is_removed_once():
    workers = ReportingWorkers(0.0)
    workers.reported(spec(1), 0, 0.0)
    workers.reported(spec(2, "other"), 0, 1.0)
    assert workers.remove_silent(SILENCE_S) == []
    assert workers.remove_silent(SILENCE_S + 0.5) == ["w"]
    assert workers.remove_silent(SILENCE_S + 0.5) == [] and len(workers) == 1


def test_a_new_gate_waits_for_the_workers_that_are_named_but_not_for_ever():
    workers = ReportingWorkers(10.0)
    assert workers.are_known(10.0)
    workers.named(1)
    workers.named(2)
    workers.reported(spec(1), 0, 10.1)
    workers.named(1)  # by a second ingress: it has reported
    assert not workers.are_known(10.0 + REBUILD_S)
    assert workers.are_known(10.1 + REBUILD_S)
    workers.reported(spec(2, "other"), 0, 10.2)
    assert workers.are_known(10.2)
