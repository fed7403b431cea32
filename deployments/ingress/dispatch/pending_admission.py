"""One request between an ingress and the gate: what the gate has of it, and what it has decided.

CREDITED --its Offer is sent--> TEXT_PENDING --its TextFeatures are sent--> ADMITTED
OFFERED --a ticket--> TEXT_PENDING, or ADMITTED if its text went ahead
any --it is over, refused or sent without the gate--> ENDED
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.dispatch.admission_gate import ANY_WORKER
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb

NEVER_FITS = "never_fits"
CODES = {"displaced": "over_share", "no_worker": "no_worker"}  # by reason; others: overloaded


class State(Enum):
    CREDITED = "credited"  # admitted on credit; the gate has nothing of it yet
    OFFERED = "offered"  # it waits for the gate's decision
    TEXT_PENDING = "text pending"  # admitted; the gate has no features of its text yet
    ADMITTED = "admitted"  # the gate has all of it
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class PendingAdmission:
    """The state of one request, and the gate's replies to it. Lives on one event loop."""

    request: AdmissionRequest
    state: State = State.OFFERED
    credit_epoch: int | None = None  # of the worker that it was admitted to on credit
    has_sent_text: bool = False
    answered: asyncio.Event = field(default_factory=asyncio.Event)  # the gate has replied
    decided: asyncio.Future[int | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def offer_sent(self) -> None:
        """Its Offer is in a message: one that was admitted on credit owes its text now."""
        if self.state is State.CREDITED:
            self.state = State.TEXT_PENDING

    def text_sent(self) -> None:
        """The features of its text are in a message."""
        self.has_sent_text = True
        if self.state is State.TEXT_PENDING:
            self.state = State.ADMITTED

    def decide(self, epoch: int | None) -> None:
        """Admitted to the worker of that epoch; None: the ingress chooses one itself."""
        self.answered.set()
        if self.decided.done():
            return
        self.decided.set_result(epoch)
        if epoch is None:
            self.state = State.ENDED
        else:
            self.state = State.ADMITTED if self.has_sent_text else State.TEXT_PENDING

    def leave_to_worker(self) -> None:
        """No worker can hold it: the one that the ingress chooses says so to the client."""
        self.answered.set()
        if not self.decided.done():
            self.decided.set_result(ANY_WORKER)
            self.state = State.ENDED

    def fail(self, error: ServiceError) -> None:
        """Not admitted, with this error."""
        self.answered.set()
        if not self.decided.done():
            self.decided.set_exception(error)
            self.state = State.ENDED

    def refuse(self, refusal: pb.Refusal) -> None:
        """Not admitted, for the gate's reason."""
        if refusal.reason == NEVER_FITS:
            self.leave_to_worker()
            return
        code = CODES.get(refusal.reason, "overloaded")
        self.fail(ServiceError(code, refusal.message, retry_after_s=refusal.retry_after_s))
