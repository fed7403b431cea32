"""A request that the ingress has offered to the gate, until it is admitted, released or refused."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from penstock.deployments.ingress.core.errors import ServiceError
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb

NEVER_FITS = "never_fits"
OVER_SHARE = "displaced"


@dataclass(slots=True, eq=False)
class PendingAdmission:
    """The gate's replies to one request. Lives on one event loop."""

    answered: asyncio.Event = field(default_factory=asyncio.Event)  # the gate has replied
    decided: asyncio.Future[int | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def decide(self, epoch: int | None) -> None:
        """Admitted to the worker of that epoch; None: the ingress chooses one itself."""
        self.answered.set()
        if not self.decided.done():
            self.decided.set_result(epoch)

    def fail(self, error: ServiceError) -> None:
        """Not admitted, with this error."""
        self.answered.set()
        if not self.decided.done():
            self.decided.set_exception(error)

    def refuse(self, refusal: pb.Refusal) -> None:
        """Not admitted, for the gate's reason."""
        if refusal.reason == NEVER_FITS:
            self.decide(None)  # the worker decides, and reports it to the client
            return
        code = "over_share" if refusal.reason == OVER_SHARE else "overloaded"
        self.fail(ServiceError(code, refusal.message, retry_after_s=refusal.retry_after_s))
