"""What limits an ingress now, in words for its operator.

The ingress sends them with its heartbeat; `penstock serve` prints them as they come and go,
`penstock status` and the console list them. What they are read from logs them, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.deployments.ingress.models import IngressModel
from penstock.deployments.security.certificates import WARN_S, Certificates
from penstock.deployments.security.watch import KeyFileWatch
from penstock.deployments.state.store import Store
from penstock.deployments.supervision.view import OperatorWarning

STORE = (
    "the state store does not work: streams are not journaled, and quotas are counted by each "
    "ingress for itself"
)
KEYS = "the file of API keys cannot be used, and the keys before it stay in force"
CERTIFICATE = "a new certificate cannot be used, and the one before it stays"


@dataclass(frozen=True, slots=True, eq=False)
class WarningSources:
    """What one ingress's warnings are read from. `store` None: it has none; `certificates`: by
    what they are used for."""

    models: Sequence[IngressModel]
    store: Store | None
    keys: KeyFileWatch
    certificates: Mapping[str, Certificates]

    def now(self) -> tuple[OperatorWarning, ...]:
        """Texts that stay the same while their cause lasts, without addresses, paths or names of
        machines; these are in `detail`."""
        return (*self._of_store(), *self._of_gates(), *self._of_keys(), *self._of_certificates())

    def _of_store(self) -> Iterator[OperatorWarning]:
        if self.store is not None and (fault := self.store.status().fault) is not None:
            yield OperatorWarning(STORE, fault)

    def _of_gates(self) -> Iterator[OperatorWarning]:
        for each in self.models:
            if each.gate is None:
                continue
            of = f" of {each.config.model_name}" if len(self.models) > 1 else ""
            if not each.gate.answers:
                yield OperatorWarning(
                    f"the gate{of} does not answer: requests go to the least-loaded worker"
                )
            elif fault := each.gate.figures.snapshot_fault:
                yield OperatorWarning(
                    f"what the gate{of} learns about answer lengths is not kept: it is lost when "
                    "the gate starts anew",
                    fault,
                )

    def _of_keys(self) -> Iterator[OperatorWarning]:
        if self.keys.complaint:
            yield OperatorWarning(KEYS, self.keys.complaint)

    def _of_certificates(self) -> Iterator[OperatorWarning]:
        for use, each in self.certificates.items():
            if each.reload_failed:
                yield OperatorWarning(f"{CERTIFICATE} (for {use})", each.complaint)
            if each.expires_s <= 0:
                yield OperatorWarning(f"the certificate for {use} has expired")
            elif each.expires_s < WARN_S:
                yield OperatorWarning(f"the certificate for {use} expires within 7 days")
