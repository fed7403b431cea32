"""The register of running requests: one record and one state each, and the ledgers to match.

    PROVISIONAL --admit--> ADMITTED --started, or listed in a report--> RUNNING

PROVISIONAL: on a worker without a length prediction (admitted at its worst case, admitted by an
ingress on credit, or known only from a worker's report). ADMITTED: predicted, charged to its tenant
and leased. A request leaves the register when it finishes or is declined, and when no worker holds
it any more: its lease ran out, its worker is gone or no longer lists it.

A request may be on two workers for a while: an ingress that lost the chosen one sends it to another
one, which lists it. The record then follows the request to the worker that still holds it.
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
    is_elsewhere: bool = False  # a worker that was not chosen holds it, too


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

    def admit(self, entry: Waiting, ledger: Ledger, until: float) -> None:
        """Predicted, and bound to a worker: ADMITTED. It may be on that worker, or on another one,
        already: admitted without a prediction, or listed in a report."""
        name = entry.request_id
        known = self._requests.get(name)
        is_elsewhere = known is not None and (known.is_elsewhere or name not in ledger)
        ledger.withdraw(name)  # what it was held by knew less
        ledger.lease(entry.demand, until)
        self._queue.counters.charge(entry.tenant, self._queue.charge_of(entry))
        self._requests[name] = RunningRequest(State.ADMITTED, ledger.spec.name, entry, is_elsewhere)

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
        held = [each for each in self._where(record) if each.ended(request_id, now)]
        if held:  # one that moved has ended where it was not sent at first
            moved = [each for each in held if each.spec.name != record.worker]
            (moved or held)[-1].headroom.count(completions=1)
        entry, settings = record.entry, self._queue.settings
        if entry is not None:
            owed = settings.charge(entry.weight, entry.demand.prompt_tokens, generated)
            self._queue.counters.charge(entry.tenant, owed - self._queue.charge_of(entry))

    def report(
        self, ledger: Ledger, report: Report, now: float, demand_of: Callable[[Running], Demand]
    ) -> None:
        """Take over what a worker lists. `demand_of` makes demands for requests that its ledger
        lacks. A late report, or one of another epoch, changes nothing."""
        if not ledger.accepts(report):
            return
        adopted = {each.request_id: demand_of(each) for each in ledger.unknown(report)}
        for name in adopted:
            known = self._requests.get(name)
            if known is None:
                self._requests[name] = RunningRequest(State.PROVISIONAL)
            else:
                known.is_elsewhere = True
        for name in ledger.report(report, now, adopted):
            self._left(name, ledger)  # the charge stays: its length is not known
        for each in report.running:
            listed = self._requests.get(each.request_id)
            if listed is not None and listed.worker == ledger.spec.name:
                listed.state = State.RUNNING

    def expire(self, now: float) -> int:
        """Take back leases that ran out without a start, and refund them; how many."""
        num = 0
        for ledger in self._ledgers.values():
            for name in ledger.expire(now):
                num += 1
                record = self._left(name, ledger)
                if record is not None and record.entry is not None:
                    self._refund(record.entry)
        return num

    def worker_removed(self, ledger: Ledger) -> list[str]:
        """Forget what only that worker had; returns the ids that had been admitted to it."""
        lost: list[str] = []
        for name, record in list(self._requests.items()):
            if record.worker != ledger.spec.name and name not in ledger:
                continue
            if self._left(name, ledger) is not None and record.worker is not None:
                lost.append(name)
        return lost

    def _left(self, request_id: str, ledger: Ledger) -> RunningRequest | None:
        """That ledger holds it no more. The record stays, and follows it, while another one does;
        else it is taken out and returned."""
        record = self._requests.get(request_id)
        if record is None:
            return None
        if record.worker is None or record.is_elsewhere:
            others = [e for e in self._ledgers.values() if e is not ledger and request_id in e]
            if others:
                record.is_elsewhere = len(others) > 1
                if record.worker == ledger.spec.name:  # the others hold it because they listed it
                    record.worker, record.state = others[0].spec.name, State.RUNNING
                return None
        return self._requests.pop(request_id)

    def _refund(self, entry: Waiting) -> None:
        self._queue.counters.charge(entry.tenant, -self._queue.charge_of(entry))

    def _where(self, record: RunningRequest) -> list[Ledger]:
        """The ledgers that may hold it: provisional requests may be on two workers."""
        if record.worker is None or record.is_elsewhere:
            return list(self._ledgers.values())
        return [self._ledgers[record.worker]]
