"""The gate: which request is admitted, when, and to which worker. Pure: a simulator drives it too.

Requests wait here, not at the workers, and are bound to one when it has room (late binding): by
the quantile rule of forecast/sampled.py, in the order of wait_queue.py, against the ledgers of
ledger.py. After a first one that does not fit, a few later ones may be admitted if they leave its
reservation alone (EASY backfill). A request that would wait too long is refused at once.

One owner calls it; nothing is locked. The caller passes the time: `now` is in seconds and never
decreases. Length distributions are passed in as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from penstock.deployments.gate.futures import FutureSampler
from penstock.deployments.gate.ledger import Ledger
from penstock.deployments.gate.placement import Placement, WorkerShortlist
from penstock.deployments.gate.retry_after import RetryAfterModel
from penstock.deployments.gate.running import RunningRequests
from penstock.deployments.gate.types import (
    Demand,
    Expiry,
    GateRequest,
    GateSettings,
    Outcome,
    Refusal,
    Report,
    Ticket,
    Wait,
    WorkerSpec,
)
from penstock.deployments.gate.wait_queue import GateQueue, Waiting
from penstock.deployments.prediction.distribution import LengthDistribution


class Gate:
    """Waiting and running requests, and the ledgers of the workers, of one model."""

    SHARE = 0.9  # of all memory that is in use when the queue is not empty
    STEP = 0.05  # by which one admission corrects the predicted waits

    def __init__(self, settings: GateSettings | None = None, *, seed: int = 0) -> None:
        self.settings = settings or GateSettings()
        self.queue = GateQueue(self.settings.queue)
        self.ledgers: dict[str, Ledger] = {}
        self.wait_factor = 1.0  # seconds waited per second of memory ahead
        self._retry_after = RetryAfterModel(self._would_wait)
        self._placement = Placement(self.ledgers)
        self._sampler = FutureSampler(seed, self.settings.num_samples)
        self._number = 0
        self._pace_s: float | None = None  # seconds of a step, mean of all workers; None: anew
        self._capacity = 1 << 16  # of all workers, when last there were any
        self._displaced: list[Refusal] = []
        self.running = RunningRequests(self.ledgers, self.queue)

    def add_worker(self, spec: WorkerSpec) -> list[str]:
        """A worker, or a new epoch of one; returns what was admitted to the earlier epoch."""
        known = self.ledgers.get(spec.name)
        if known is not None and known.spec == spec:
            return []
        lost = self.remove_worker(spec.name)
        self.ledgers[spec.name], self._pace_s = Ledger(spec), None
        self._capacity = sum(each.spec.capacity for each in self.ledgers.values())
        return lost

    def remove_worker(self, name: str) -> list[str]:
        """A worker is gone; returns the ids that were admitted to it."""
        ledger = self.ledgers.pop(name, None)
        if ledger is None:
            return []
        self._placement.forget(ledger)
        self._pace_s = None
        lost = self.running.worker_removed(ledger)
        if self.ledgers:
            self._capacity = sum(each.spec.capacity for each in self.ledgers.values())
        return lost

    def offer(
        self,
        request: GateRequest,
        length: LengthDistribution,
        now: float,
        *,
        holding: LengthDistribution | None = None,
    ) -> Refusal | None:
        """A request arrives: it waits for `tick` to admit it (None), or is refused at once.

        `length` is of the answer, for order and charges; `holding` of how long its memory is held,
        clients that leave included (None: the same). Raises ValueError for an id that waits
        or runs already.
        """
        name = request.request_id
        if name in self.queue or name in self.running:
            raise ValueError(
                f"request_id {name!r} is already waiting or running: give each request its own"
            )
        demand = self._sampler.demand(request, holding or length)
        entry = self._entry(request, demand, length, now)
        if self.ledgers and not self._placement.could_fit(demand):
            return _never(entry, max(each.spec.capacity for each in self.ledgers.values()))
        fixed, ahead = self._predicted_wait(entry, now)
        wait = fixed + self.wait_factor * ahead
        patience_s = self.settings.longest_wait_s
        if request.deadline is not None:
            patience_s = min(patience_s, request.deadline - now)
        if wait > patience_s:
            text = f"the predicted wait is {wait:.1f} s, the limit {max(patience_s, 0.0):.1f} s"
            lasting_patience_s = patience_s if request.deadline is None else None
            return self._refuse(entry, "too_long", text, wait - patience_s / 2, lasting_patience_s)
        if len(self.queue) >= self.settings.queue.max_waiting:
            leaves = self.queue.displaced_by(request.tenant)
            if leaves is None:
                return self._refuse(
                    entry, "queue_full", f"the queue is full with {len(self.queue)} requests", wait
                )
            self.queue.remove(leaves.request_id)
            text = "the queue is full, and this tenant has the most requests in it"
            later = sum(leaves.predicted_wait)
            self._displaced.append(self._refuse(leaves, "displaced", text, later))
        entry.predicted_wait, entry.quoted_wait_s = (fixed, ahead), wait
        self.queue.add(entry)
        return None

    def would_wait(self, request: GateRequest, length: LengthDistribution, now: float) -> float:
        """Seconds that it would wait if it arrived now, as `offer` judges it. Changes nothing."""
        demand = self._sampler.demand(request, length)
        return self._would_wait(self._entry(request, demand, length, now), now)

    def confirm(
        self,
        request: GateRequest,
        length: LengthDistribution,
        worker: str,
        now: float,
        *,
        holding: LengthDistribution | None = None,
    ) -> None:
        """Replace a provisional holding by the request's own prediction, and charge its tenant.

        Also for a request that an ingress admitted on credit and that is not registered yet.
        """
        name, ledger = request.request_id, self.ledgers.get(worker)
        is_provisional = self.running.is_provisional(name)
        if ledger is None or name in self.queue or (name in self.running and not is_provisional):
            return
        demand = self._sampler.demand(request, holding or length)
        entry = self._entry(request, demand, length, now)
        tokens = round(entry.expected)
        if not is_provisional:  # else the prompt was counted when it was admitted
            tokens += request.prompt_tokens
        self.running.confirm(entry, ledger, now + self.settings.lease_s)
        self._placement.sent(request.prefix, tokens, ledger)

    def admit(self, request: GateRequest, max_tokens: int | None, now: float) -> Ticket | None:
        """Admit without a length prediction: the queue is empty and the worst case fits.

        The ledger holds it with the prior distribution until `confirm` brings its own. None: it
        needs a prediction, by `offer`.
        """
        name = request.request_id
        if len(self.queue) or name in self.running:
            return None
        demand = self._sampler.provisional(request, max_tokens)
        shortlist = WorkerShortlist(self.ledgers, self.settings, now)
        worker = self._placement.worst_case_fit(demand, request.prefix, shortlist)
        if worker is None:
            return None
        ledger, until = self.ledgers[worker], now + self.settings.lease_s
        self._hold_provisionally(request, demand, ledger, until)
        return Ticket(name, ledger.spec.name, ledger.spec.epoch, 0.0, until)

    def admit_on_credit(
        self, request: GateRequest, max_tokens: int | None, worker: str, now: float
    ) -> bool:
        """An ingress admitted it on credit: the ledger holds it with the prior until `confirm`."""
        name, ledger = request.request_id, self.ledgers.get(worker)
        if self.running.is_provisional(name) and ledger is not None and name in ledger:
            return True  # admitted before, or listed in a report
        if ledger is None or name in self.queue or name in self.running:
            return False
        demand = self._sampler.provisional(request, max_tokens)
        self._hold_provisionally(request, demand, ledger, now + self.settings.lease_s)
        return True

    def _hold_provisionally(
        self, request: GateRequest, demand: Demand, ledger: Ledger, until: float
    ) -> None:
        """It may finish before it is confirmed; its prefix is cached all the same."""
        self.running.hold(demand, ledger, until)
        self._placement.sent(request.prefix, request.prompt_tokens, ledger)

    def spare(self) -> dict[str, tuple[int, int]]:
        """By worker: tokens and slots that stay free even if all answers reach their limits."""
        return {name: each.spare() for name, each in self.ledgers.items()}

    def cancel(self, request_id: str, now: float) -> bool:
        """The client left; True if it waited (a running one ends with `finished`)."""
        return self.queue.remove(request_id) is not None

    def started(self, request_id: str, now: float) -> None:
        """The worker has the request: the lease becomes a holding."""
        self.running.started(request_id, now)

    def declined(self, request_id: str, now: float) -> bool:
        """The worker had no room: the request waits again, ahead of others. False: it has not been
        predicted yet, and is offered as a new one."""
        entry = self.running.declined(request_id, now)
        if entry is None:
            return False
        entry.returned = True
        self.queue.add(entry)
        return True

    def finished(self, request_id: str, generated: int, now: float) -> None:
        """An answer ended after `generated` tokens, for any reason: its memory is free."""
        self.running.finished(request_id, generated, now)

    def report(self, worker: str, report: Report, now: float) -> None:
        """A worker lists what it runs. Reports of unregistered workers are ignored."""
        ledger = self.ledgers.get(worker)
        if ledger is not None:
            self._pace_s = None
            self.running.report(ledger, report, now, self._sampler.from_report)

    def tick(self, now: float) -> list[Outcome]:
        """Decisions made by now: tickets, and requests that leave the queue without one."""
        outcomes: list[Outcome] = [*self._displaced]
        self._displaced = []
        self._retry_after.update(now)
        for entry in self.queue.take_expired(now):
            outcomes.append(Expiry(entry.request_id, now - entry.arrived))
        self.running.expire(now)
        if not len(self.queue):
            self._placement.first_fits_at = None
        elif self.ledgers:
            outcomes.extend(self._admit(now))
        return outcomes

    def explain(self, now: float, limit: int = 32) -> list[Wait]:
        """Why the first `limit` requests wait, and until when. Changes nothing."""
        shortlist = WorkerShortlist(self.ledgers, self.settings, now, self.queue.longest_wait(now))
        waits: list[Wait] = []
        first_s: float | None = None
        for position, entry in enumerate(islice(self.queue.order(now), limit)):
            waited = now - entry.arrived
            if position == 0:
                wait = self._placement.explain(entry, shortlist, now)
                first_s = wait.expected_s
            else:
                expected = None
                if first_s is not None:
                    ahead = self.queue.area_ahead(entry, now) / Gate.SHARE
                    expected = first_s + self.wait_factor * ahead
                reason = "behind" if shortlist else "no_worker"
                wait = Wait(entry.request_id, entry.tenant, position, reason, waited, expected)
            waits.append(wait)
        return waits

    def _admit(self, now: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        shortlist = WorkerShortlist(self.ledgers, self.settings, now, self.queue.longest_wait(now))
        order = self.queue.order(now)
        self._placement.first_fits_at = None
        for entry in order:
            if not self._placement.could_fit(entry.demand):  # the only worker large enough is gone
                self.queue.remove(entry.request_id)
                largest = max(each.spec.capacity for each in self.ledgers.values())
                outcomes.append(_never(entry, largest))
                continue
            [able] = self._placement.able([entry], shortlist)
            if able:
                worker = self._placement.best(able, entry)
                outcomes.append(self._grant(entry, worker, shortlist, now))
                continue
            outcomes.extend(self._backfill(entry, order, shortlist, now))
            break
        return outcomes

    def _backfill(
        self, first: Waiting, order: Iterator[Waiting], shortlist: WorkerShortlist, now: float
    ) -> list[Outcome]:
        """Admit later requests that fit and do not delay the first one's reservation."""
        reserved = self._placement.reserve(first, shortlist, now)
        if reserved is None:
            return []
        steps, kept = reserved
        outcomes: list[Outcome] = []
        own = self._placement.candidate(first, kept)
        max_wait_s = self.settings.queue.max_wait_s
        later = list(islice(order, self.settings.max_backfills))
        all_able = self._placement.able(later, shortlist)
        for i, entry in enumerate(later):
            if first.num_overtaken >= self.settings.max_backfills or first.is_overdue(
                now, max_wait_s
            ):
                break
            able = all_able[i]
            for place, name in enumerate(each[1] for each in able):
                if name == kept:
                    joined = shortlist[kept].joined_by(self._placement.candidate(entry, kept))
                    if not joined.admits_after(steps, own):
                        del able[place]
                    break
            if able:
                first.num_overtaken += 1
                worker = self._placement.best(able, entry)
                outcomes.append(self._grant(entry, worker, shortlist, now))
                all_able[i + 1 :] = self._placement.able(later[i + 1 :], shortlist)
        return outcomes

    def _grant(self, entry: Waiting, worker: str, shortlist: WorkerShortlist, now: float) -> Ticket:
        ledger = self.ledgers[worker]
        until = now + self.settings.lease_s
        self.running.admit(entry, ledger, until)
        shortlist.grant(worker, self._placement.candidate(entry, worker))
        self.queue.remove(entry.request_id)
        tokens = entry.demand.prompt_tokens + round(entry.expected)
        self._placement.sent(entry.prefix, tokens, ledger)
        waited = now - entry.arrived
        fixed, ahead = entry.predicted_wait
        if ahead > 0:
            ratio = min(max((waited - fixed) / ahead, 0.1), 10.0)
            self.wait_factor += Gate.STEP * (ratio - self.wait_factor)
        epoch = ledger.spec.epoch
        return Ticket(entry.request_id, worker, epoch, waited, until, entry.quoted_wait_s)

    def _entry(
        self, request: GateRequest, demand: Demand, length: LengthDistribution, now: float
    ) -> Waiting:
        """Its expected length, and the tokens x seconds of KV that it will take."""
        self._number += 1
        remaining = demand.remaining()
        steps = remaining.astype(np.float64)
        area = float((request.prompt_tokens * steps + steps**2 / 2).mean())
        if self._pace_s is None:
            paces = [each.step_s for each in self.ledgers.values()] or [0.03]
            self._pace_s = sum(paces) / len(paces)
        return Waiting(
            demand=demand,
            tenant=request.tenant,
            priority=request.priority,
            arrived=now,
            number=self._number,
            expected=length.mean,
            area=area * self._pace_s / self._capacity,
            deadline=request.deadline,
            prefix=request.prefix,
            remaining=remaining,
        )

    def _would_wait(self, entry: Waiting, now: float) -> float:
        fixed, ahead = self._predicted_wait(entry, now)
        return fixed + self.wait_factor * ahead

    def _predicted_wait(self, entry: Waiting, now: float) -> tuple[float, float]:
        """Seconds until the first one fits, and seconds of all memory served before `entry`."""
        fixed = max((self._placement.first_fits_at or now) - now, 0.0) if len(self.queue) else 0.0
        return fixed, self.queue.area_ahead(entry, now) / Gate.SHARE

    def _refuse(
        self,
        entry: Waiting,
        reason: str,
        text: str,
        after_s: float,
        patience_s: float | None = None,
    ) -> Refusal:
        """Its own uniforms spread Retry-After by a fifth, so that not all return at once.

        `patience_s`: the longest it may wait; with it the refusal calibrates Retry-After.
        """
        least, most = self.settings.retry_s
        spread = 0.8 + 0.4 * float(entry.demand.uniforms[0])
        if patience_s is not None:
            self._retry_after.watch(entry, after_s, patience_s)
        after = min(max(self._retry_after.factor * after_s, least), most) * spread
        return Refusal(entry.request_id, reason, f"refused for now: {text}", after)


def _never(entry: Waiting, capacity: int) -> Refusal:
    text = (
        f"prompt_tokens ({entry.demand.prompt_tokens}) and max_tokens "
        f"({entry.demand.length.max_tokens}) exceed the {capacity} KV tokens of the largest "
        "worker: ask for fewer tokens"
    )
    return Refusal(entry.request_id, "never_fits", text)
