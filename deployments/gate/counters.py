"""Totals of the gate since its start, for metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from penstock.deployments.gate.learner import GateLearner
from penstock.deployments.gate.types import Ticket
from penstock.deployments.prediction.conformal import LEVELS
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb


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

    def admits(self, ticket: Ticket) -> None:
        """Count a ticket; the request may have waited."""
        self.admitted += 1
        if ticket.quoted_wait_s > 0:
            self.waits += 1
            self.predicted_wait_s += ticket.quoted_wait_s
            self.actual_wait_s += ticket.waited_s
            self.wait_error_s += abs(ticket.waited_s - ticket.quoted_wait_s)

    def figures(self, epoch: int, num_waiting: int, learner: GateLearner) -> pb.Figures:
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
        )
