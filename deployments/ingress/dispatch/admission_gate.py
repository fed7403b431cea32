"""What the pool asks before it places a request: the gate's client, or no gate at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.protos.penstock.internal.v1 import channel_pb2 as pb

ANY_WORKER = -1  # in place of an epoch: the ingress chooses, at once
Returned = Literal["declined", "lost"]  # by its worker; or its worker was lost


class AdmissionGate(Protocol):
    """Decides which requests are admitted, when and where: gate_client.GateClient, or NoGate."""

    decides: bool  # whether `admit` must be asked before a request is placed

    @property
    def is_connected(self) -> bool: ...
    @property
    def answers(self) -> bool: ...  # is connected, and has answered what it was last asked

    async def admit(
        self,
        admission: AdmissionRequest,
        epochs: Sequence[int],
        *,
        returned: Returned | None = None,
    ) -> int | None: ...
    def ended(self, request_id: str, num_generated: int) -> None: ...
    def report(self, address: str, epoch: int, report: pb.Report) -> None: ...
    def lost(self, epoch: int) -> None: ...
    def release(self) -> None: ...


class NoGate:
    """Admits every request at once; the pool places it."""

    decides = False
    is_connected = False
    answers = False

    async def admit(
        self,
        admission: AdmissionRequest,
        epochs: Sequence[int],
        *,
        returned: Returned | None = None,
    ) -> int | None:
        return None

    def ended(self, request_id: str, num_generated: int) -> None:
        """Keeps no account of requests."""

    def report(self, address: str, epoch: int, report: pb.Report) -> None:
        """Keeps no account of workers."""

    def lost(self, epoch: int) -> None:
        """Keeps no account of workers."""

    def release(self) -> None:
        """No request waits here."""
