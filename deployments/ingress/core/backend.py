"""What the request core needs of others: tokens, their journal, and somebody who learns lengths."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.workers.request import Delta


class TokenBackend(Protocol):
    """Turns a request into Deltas: the workers of a cluster, or an engine in this process."""

    def generate(self, admission: AdmissionRequest) -> AsyncGenerator[Delta, None]:
        """Deltas until one has a finish_reason. Closing the generator cancels the request."""
        ...

    def ready(self) -> bool:
        """Whether a request would be served now."""
        ...


class Recorder(Protocol):
    """Keeps what a call's answers become, so that it can be continued."""

    @property
    def generates(self) -> bool:
        """Whether the call runs here; False: it only follows one that runs elsewhere."""
        ...

    def generate(
        self, admission: AdmissionRequest, backend: TokenBackend
    ) -> AsyncGenerator[Delta, None]:
        """All deltas of one answer: those that are kept, then those of the backend."""
        ...


class Learner(Protocol):
    """Learns how long answers become."""

    def learn(self, request: AdmissionRequest, length: int, ended: str) -> None:
        """`ended`: "stop", "length" (it was cut) or "cancel"."""
