"""The gate's state for operators: totals for metrics, what waits and why, what each worker holds.

Workers are named by the first digits of their epoch, as the status of workers names them; their
addresses are not shown.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from penstock.deployments.gate.controller import Gate
from penstock.deployments.gate.forecast.retry_after import RetryAfterModel
from penstock.deployments.gate.learner import GateLearner
from penstock.deployments.gate.types import Expiry, Outcome, Refusal
from penstock.deployments.gate.wire import wait_message
from penstock.deployments.prediction.conformal import LEVELS
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb
from penstock.workers.stats import worker_name


@dataclass(slots=True)
class GateCounters:
    """Totals since the start."""

    admitted: int = 0
    expired: int = 0
    declined: int = 0
    completed: int = 0
    preemptions: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    waits: int = 0  # requests that waited: their number, quoted and actual waits
    predicted_wait_s: float = 0.0
    actual_wait_s: float = 0.0
    wait_error_s: float = 0.0

    def note(self, outcome: Outcome) -> None:
        """Count a decision; an admitted request may have waited."""
        if isinstance(outcome, Expiry):
            self.expired += 1
        elif isinstance(outcome, Refusal):
            self.refused[outcome.reason] += 1
        else:
            self.admitted += 1
            if outcome.quoted_wait_s > 0:
                self.waits += 1
                self.predicted_wait_s += outcome.quoted_wait_s
                self.actual_wait_s += outcome.waited_s
                self.wait_error_s += abs(outcome.waited_s - outcome.quoted_wait_s)

    def figures(
        self, epoch: int, num_waiting: int, learner: GateLearner, retry_after: RetryAfterModel[Any]
    ) -> pb.Figures:
        """The message that ingresses receive."""
        return pb.Figures(
            epoch=epoch,
            num_waiting=num_waiting,
            num_admitted=self.admitted,
            num_expired=self.expired,
            num_declined=self.declined,
            num_refused=self.refused,
            num_learnt=learner.num_learnt,
            levels=LEVELS,
            coverage=learner.coverage.tolist(),
            num_waits=self.waits,
            predicted_wait_s=self.predicted_wait_s,
            actual_wait_s=self.actual_wait_s,
            wait_error_s=self.wait_error_s,
            num_preemptions=self.preemptions,
            num_completed=self.completed,
            retry_after_factor=retry_after.factor,
            num_retry_after_in_time=retry_after.num_in_time,
            num_retry_after_late=retry_after.num_late,
        )


def explain(gate: Gate, num_waiting: int, now: float, limit: int) -> pb.ExplainResponse:
    """The first `limit` waiting requests with their reasons, and the workers' ledgers."""
    accounts = [
        pb.WorkerAccount(
            worker=_shown(gate, name),
            num_held=len(ledger),
            slots=ledger.spec.slots,
            used=ledger.used(now),
            capacity=ledger.spec.capacity,
            headroom=ledger.headroom.share,
            is_open=ledger.is_open,
        )
        for name, ledger in gate.ledgers.items()
    ]
    waits = [wait_message(each) for each in gate.explain(now, limit)]
    for wait in waits:
        wait.worker = _shown(gate, wait.worker)
    return pb.ExplainResponse(waits=waits, workers=accounts, num_waiting=num_waiting)


def _shown(gate: Gate, name: str) -> str:
    ledger = gate.ledgers.get(name)
    return "" if ledger is None else worker_name(ledger.spec.epoch)
