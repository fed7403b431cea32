"""The register of running requests: one record and one state each, and the ledgers to match.

    PROVISIONAL --admit--> ADMITTED --started, or listed in a report--> RUNNING

PROVISIONAL: on a worker without a length prediction (admitted at its worst case, admitted by an
ingress on credit, or known only from a worker's report). ADMITTED: predicted, charged to its tenant
and leased. A request leaves the register when it finishes, is declined, loses its lease, or when
its worker is gone or no longer lists it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from penstock.deployments.gate.ledger import Ledger
from penstock.deployments.gate.types import Demand, Report, Running
from penstock.deployments.gate.wait_queue import GateQueue, Waiting


class State(Enum):
    PROVISIONAL = "provisional"
    ADMITTED = "admitted"
    RUNNING = "running"


@dataclass(slots=True)
class RunningRequest:
    """One record. `entry` and `worker` are set once the request has left PROVISIONAL."""

    state: State
    worker: str | None = None  # that the gate, or the ingress with a credit, chose
    entry: Waiting | None = None  # what its tenant was charged for
    is_elsewhere: bool = False  # a report lists it on a worker that was not chosen


class RunningRequests:
    """By request id. Keeps the ledgers of the workers and the tenants' charges consistent."""

    def __init__(self, ledgers: Mapping[str, Ledger], queue: GateQueue) -> None:
        self._ledgers = ledgers
        self._queue = queue
        self._requests: dict[str, RunningRequest] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def __getitem__(self, request_id: str) -> RunningRequest:
        return self._requests[request_id]

    def is_provisional(self, request_id: str) -> bool:
        record = self._requests.get(request_id)
        return record is not None and record.state is State.PROVISIONAL

    def hold(self, demand: Demand, ledger: Ledger, until: float) -> None:
        """On that worker without a prediction: PROVISIONAL."""
        ledger.lease(demand, until)
        self._requests[demand.request_id] = RunningRequest(State.PROVISIONAL)

    def confirm(self, entry: Waiting, ledger: Ledger, until: float) -> None:
        """A provisional or unknown request has its prediction: ADMITTED where it already is."""
        ledger.withdraw(entry.request_id)  # what it was held by knew less
        self._admit(entry, ledger, until, is_elsewhere=False)

    def admit(self, entry: Waiting, ledger: Ledger, until: float) -> None:
        """Bind a waiting request to a worker: ADMITTED. A report may list it somewhere already."""
        is_elsewhere = entry.request_id in self._requests and entry.request_id not in ledger
        ledger.withdraw(entry.request_id)
        self._admit(entry, ledger, until, is_elsewhere)

    def started(self, request_id: str, now: float) -> None:
        """The worker has the request: the lease becomes a holding."""
        record = self._requests.get(request_id)
        if record is not None and record.worker is not None:
            record.state = State.RUNNING
            self._ledgers[record.worker].started(request_id, now)

    def declined(self, request_id: str, now: float) -> Waiting | None:
        """Its worker had no room, and gets nothing more until it reports.

        The entry, to wait again, with its charge refunded; None: it had not been predicted yet.
        """
        record = self._requests.pop(request_id, None)
        if record is None:
            return None
        for ledger in self._where(record):
            # A report under way may still list it.
            if ledger.ended(request_id, now) or ledger.spec.name == record.worker:
                ledger.is_open = False
        if record.entry is not None:
            self._refund(record.entry)
        return record.entry

    def finished(self, request_id: str, generated: int, now: float) -> None:
        """Its answer ended after `generated` tokens: free its memory and true up its charge."""
        record = self._requests.pop(request_id, None)
        if record is None:
            return
        for ledger in self._where(record):
            if ledger.ended(request_id, now):
                ledger.headroom.count(completions=1)
        entry, settings = record.entry, self._queue.settings
        if entry is not None:
            owed = settings.charge(entry.tenant, entry.demand.prompt_tokens, generated)
            self._queue.counters.charge(entry.tenant, owed - self._queue.charge_of(entry))

    def report(
        self, ledger: Ledger, report: Report, now: float, demand_of: Callable[[Running], Demand]
    ) -> None:
        """Take over what a worker lists. `demand_of` makes demands for unregistered requests."""
        adopted = {each.request_id: demand_of(each) for each in ledger.unknown(report)}
        for name in adopted:
            record = self._requests.setdefault(name, RunningRequest(State.PROVISIONAL))
            record.is_elsewhere = record.state is not State.PROVISIONAL
        for name in ledger.report(report, now, adopted):
            self._requests.pop(name, None)  # the charge stays: its length is not known
        for each in report.running:
            listed = self._requests.get(each.request_id)
            if listed is not None and listed.worker == ledger.spec.name:
                listed.state = State.RUNNING

    def expire(self, now: float) -> None:
        """Take back leases that ran out without a start, and refund them."""
        for ledger in self._ledgers.values():
            for name in ledger.expire(now):
                record = self._requests.pop(name, None)
                if record is not None and record.entry is not None:
                    self._refund(record.entry)

    def worker_removed(self, ledger: Ledger) -> list[str]:
        """Forget what that worker had; returns the ids that had been admitted to it."""
        lost: list[str] = []
        for name, record in list(self._requests.items()):
            if record.worker == ledger.spec.name:
                lost.append(name)
            elif name in ledger and record.state is not State.PROVISIONAL:
                record.is_elsewhere = False
                continue
            elif name not in ledger:
                continue
            del self._requests[name]
        return lost

    def _admit(self, entry: Waiting, ledger: Ledger, until: float, is_elsewhere: bool) -> None:
        ledger.lease(entry.demand, until)
        self._queue.counters.charge(entry.tenant, self._queue.charge_of(entry))
        self._requests[entry.request_id] = RunningRequest(
            State.ADMITTED, ledger.spec.name, entry, is_elsewhere
        )

    def _refund(self, entry: Waiting) -> None:
        self._queue.counters.charge(entry.tenant, -self._queue.charge_of(entry))

    def _where(self, record: RunningRequest) -> list[Ledger]:
        """The ledgers that may hold it: provisional requests may be on two workers."""
        if record.worker is None or record.is_elsewhere:
            return list(self._ledgers.values())
        return [self._ledgers[record.worker]]
