"""A request that an ingress has asked the gate about: heard, let in, sent its own way, or refused.

Knows nothing of streams, or of when to ask.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from penstock.deployments.ingress.core.errors import ServiceError
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb

NEVER_FITS = "never_fits"
OVER_SHARE = "displaced"


@dataclass(slots=True, eq=False)
class PendingAdmission:
    """What the gate has said of one request. Lives on one event loop."""

    answered: asyncio.Event = field(default_factory=asyncio.Event)  # anything at all was said
    decided: asyncio.Future[int | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def decide(self, epoch: int | None) -> None:
        """It may come in, on the worker of that epoch; None: it goes its own way."""
        self.answered.set()
        if not self.decided.done():
            self.decided.set_result(epoch)

    def fail(self, error: ServiceError) -> None:
        """It may not come in."""
        self.answered.set()
        if not self.decided.done():
            self.decided.set_exception(error)

    def refuse(self, refusal: pb.Refusal) -> None:
        """It may not come in, as the gate says it."""
        if refusal.reason == NEVER_FITS:
            self.decide(None)  # the worker says it better, or knows better
            return
        code = "over_share" if refusal.reason == OVER_SHARE else "overloaded"
        self.fail(ServiceError(code, refusal.message, retry_after_s=refusal.retry_after_s))
