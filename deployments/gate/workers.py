"""Which workers report to the gate, and which are silent or have not reported yet.

A worker is known by its epoch, a number that it draws when it starts. The caller passes the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.deployments.gate.types import WorkerSpec

SILENCE_S = 3.0  # without a report: the worker is taken to be gone
REBUILD_S = 2.0  # longest that a new gate waits for the reports of all workers


@dataclass(slots=True)
class _Worker:
    name: str
    reported_s: float
    num_preemptions: int  # since it started


class ReportingWorkers:
    """The workers of one gate, from whichever ingress their reports come."""

    def __init__(self, now: float) -> None:
        self._workers: dict[int, _Worker] = {}  # by epoch
        self._expected: set[int] = set()  # epochs named by an ingress, without a report so far
        self._born_s = now

    def __len__(self) -> int:
        return len(self._workers)

    def name(self, epoch: int) -> str | None:
        """None: no worker of this epoch reports."""
        worker = self._workers.get(epoch)
        return None if worker is None else worker.name

    def are_known(self, now: float) -> bool:
        """Whether all workers that the ingresses name have reported what they run."""
        return not self._expected or now - self._born_s > REBUILD_S

    def named(self, epoch: int) -> None:
        """An ingress names a worker and has no report of it yet."""
        if epoch not in self._workers:
            self._expected.add(epoch)

    def reported(self, spec: WorkerSpec, num_preemptions: int, now: float) -> int:
        """A report. Returns the preemptions since the worker's last one.

        num_preemptions: since the worker started.
        """
        self._expected.discard(spec.epoch)
        known = self._workers.get(spec.epoch)
        if known is None:  # an earlier epoch at this address is over
            for epoch in [e for e, each in self._workers.items() if each.name == spec.name]:
                del self._workers[epoch]
        self._workers[spec.epoch] = _Worker(spec.name, now, num_preemptions)
        return 0 if known is None else max(num_preemptions - known.num_preemptions, 0)

    def remove_silent(self, now: float) -> list[str]:
        """Forget those without a report for SILENCE_S. Returns their names."""
        silent = [e for e, each in self._workers.items() if now - each.reported_s > SILENCE_S]
        return [self._workers.pop(epoch).name for epoch in silent]
