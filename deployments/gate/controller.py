"""The gate: which request is admitted, when, and to which worker. Pure: a simulator drives it too.

Requests wait here, not at the workers, and are bound to one when it has room (late binding): by
the quantile rule of forecast/sampled.py, in the order of wait_queue.py, against the ledgers of
ledger.py. A request that would wait too long is refused at once. This file takes in requests,
reports and ends; admission.py empties the queue.

One owner calls it; nothing is locked. The caller passes the time: `now` is in seconds and never
decreases. Length distributions are passed in as well.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from penstock.deployments.gate.admission import QueueAdmission, never_fits
from penstock.deployments.gate.forecast.start_times import StartTimes
from penstock.deployments.gate.futures import FutureSampler
from penstock.deployments.gate.ledger import Ledger
from penstock.deployments.gate.placement import Placement, WorkerShortlist
from penstock.deployments.gate.running import RunningRequests
from penstock.deployments.gate.types import (
    LOWEST_PRIORITY,
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

    def __init__(self, settings: GateSettings | None = None, *, seed: int = 0) -> None:
        self.settings = settings or GateSettings()
        self.queue = GateQueue(self.settings.queue)
        self.ledgers: dict[str, Ledger] = {}
        self.running = RunningRequests(self.ledgers, self.queue)
        self._placement = Placement(self.ledgers)
        self._starts = StartTimes(self.settings.start_s)
        self._admission = QueueAdmission(
            self.settings, self.queue, self.ledgers, self._placement, self.running, self._starts
        )
        self.retry_after = self._admission.retry_after
        self._sampler = FutureSampler(seed, self.settings.num_samples)
        self._number = 0
        self._pace_s: float | None = None  # seconds of a step, mean of all workers; None: anew
        self._last_pace_s = 0.03  # the same, when last there were any workers
        self._capacity = 1 << 16  # of all workers, when last there were any
        self._displaced: list[Refusal] = []
        # Looks at a long queue cost most of a gate's CPU, and seldom find anything until something
        # has changed.
        self._has_freed = self._has_arrived = False  # since the last look
        self._is_blocked = False  # it left requests in the queue
        self._looked_at = -math.inf

    def adopt(self, settings: GateSettings) -> None:
        """Other settings from now on; what waits and runs stays. `num_samples` stays."""
        self.settings = replace(settings, num_samples=self.settings.num_samples)
        self._admission.settings = self.settings
        self._admission.pressure.largest_s = settings.pressed_s
        self.queue.settings = settings.queue
        self._starts.prior_s = settings.start_s
        self._has_freed = True

    def add_worker(self, spec: WorkerSpec) -> list[str]:
        """A worker, or a new epoch of one; returns what was admitted to the earlier epoch."""
        known = self.ledgers.get(spec.name)
        if known is not None and known.spec == spec:
            return []
        lost = self.remove_worker(spec.name)
        self.ledgers[spec.name], self._pace_s = Ledger(spec), None
        self._has_freed = True
        self._capacity = sum(each.spec.capacity for each in self.ledgers.values())
        return lost

    def remove_worker(self, name: str) -> list[str]:
        """A worker is gone; returns the ids that were admitted to it."""
        ledger = self.ledgers.pop(name, None)
        if ledger is None:
            return []
        self._placement.forget(ledger)
        self._pace_s, self._has_freed = None, True
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
        entry = self._measured(self._entry(request, demand, length, now))
        if not self._placement.could_fit(demand):
            return never_fits(entry, self._placement.largest(demand))
        if request.generated:  # admitted once: it waits for room, and is not refused
            entry.returned = True
            self.queue.add(entry)
            self._has_freed = True  # it goes first
            return None
        if self._admission.must_wake:
            self._starts.asked(now)
        fixed, ahead = self._admission.predicted_wait(entry, now)
        wait = fixed + self._admission.wait_factor * ahead
        patience_s = self.settings.longest_wait_s
        if request.priority <= LOWEST_PRIORITY:  # a batch sends it again when it has waited
            patience_s = math.inf
        if request.deadline is not None:
            patience_s = min(patience_s, request.deadline - now)
        if wait > patience_s:
            text = f"the predicted wait is {wait:.1f} s, the limit {max(patience_s, 0.0):.1f} s"
            if self._admission.must_wake:
                return self._admission.refuse_until_ready(entry, text, wait)
            lasting_s = patience_s if request.deadline is None else None
            after_s = wait - patience_s / 2
            return self._admission.refuse(entry, "too_long", text, after_s, now, lasting_s)
        if len(self.queue) >= self.settings.queue.max_waiting:
            leaves = self.queue.displaced_by(request.tenant, request.weight)
            if leaves is None:
                text = f"the queue is full with {len(self.queue)} requests"
                return self._admission.refuse(entry, "queue_full", text, wait, now)
            self.queue.remove(leaves.request_id)
            text = "the queue is full, and this tenant has the most requests in it"
            later = sum(leaves.predicted_wait)
            self._displaced.append(self._admission.refuse(leaves, "displaced", text, later, now))
        entry.predicted_wait, entry.quoted_wait_s = (fixed, ahead), wait
        if self._admission.must_wake:  # what is ahead is not what it will have waited for
            entry.predicted_wait = (wait, 0.0)
        self.queue.add(entry)
        self._has_arrived = True
        return None

    def would_wait(self, request: GateRequest, length: LengthDistribution, now: float) -> float:
        """Seconds that it would wait if it arrived now, as `offer` judges it. Changes nothing."""
        demand = self._sampler.demand(request, length)
        entry = self._measured(self._entry(request, demand, length, now))
        return self._admission.would_wait(entry, now)

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
        self.running.admit(entry, ledger, now + self.settings.lease_s)
        self._placement.sent(request.prefix, tokens, ledger)

    def admit(self, request: GateRequest, max_tokens: int | None, now: float) -> Ticket | None:
        """Admit without a length prediction: the queue is empty and the worst case fits.

        The ledger holds it with the prior distribution until `confirm` brings its own. None: it
        needs a prediction, by `offer`, as those of LOWEST_PRIORITY always do.
        """
        name = request.request_id
        if len(self.queue) or name in self.running or request.priority <= LOWEST_PRIORITY:
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
        self._has_freed = True  # it may have been the first
        return self.queue.remove(request_id) is not None

    def started(self, request_id: str, now: float) -> None:
        """The worker has the request: the lease becomes a holding."""
        self.running.started(request_id, now)

    def declined(self, request_id: str, now: float) -> bool:
        """The worker had no room: the request waits again, ahead of others. False: it has not been
        predicted yet, and is offered as a new one."""
        entry = self.running.declined(request_id, now)
        self._has_freed = True
        if entry is None:
            return False
        entry.returned = True
        self.queue.add(entry if entry.remaining is not None else self._measured(entry))
        return True

    def finished(self, request_id: str, generated: int, now: float) -> None:
        """An answer ended after `generated` tokens, for any reason: its memory is free."""
        self.running.finished(request_id, generated, now)
        self._has_freed = True

    def report(self, worker: str, report: Report, now: float) -> None:
        """A worker lists what it runs. Reports of unregistered workers are ignored."""
        ledger = self.ledgers.get(worker)
        if ledger is not None:
            self._pace_s, self._has_freed = None, True
            self.running.report(ledger, report, now, self._sampler.from_report)
            if not ledger.is_draining:
                self._starts.ready(now)

    def tick(self, now: float) -> list[Outcome]:
        """Decisions made by now: tickets, and requests that leave the queue without one."""
        outcomes: list[Outcome] = [*self._displaced]
        self._displaced = []
        self.retry_after.update(now)
        for entry in self.queue.take_expired(now):
            outcomes.append(Expiry(entry.request_id, now - entry.arrived))
        outcomes.extend(self._admission.refuse_overlong(now))
        self._has_freed |= bool(self.running.expire(now) or outcomes)
        if not len(self.queue):
            self._placement.first_fits_at, self._is_blocked = None, False
            return outcomes
        if self._admission.must_wake:
            self._starts.asked(now)
        if self.ledgers and self._must_look(now):
            self._has_freed = self._has_arrived = False
            self._looked_at = now
            outcomes.extend(self._admission.admit(now))
            self._is_blocked = len(self.queue) > 0
        return outcomes

    def _must_look(self, now: float) -> bool:
        """Whether a waiting request may fit that did not fit at the last look. In a short queue
        each request counts: forecasts change with every step, if little."""
        if len(self.queue) <= self.settings.short_queue:
            return True
        looked_s, fits_at = now - self._looked_at, self._placement.first_fits_at
        if self._has_freed or not self._is_blocked or looked_s >= self.settings.look_s:
            return True
        if fits_at is not None and now >= fits_at:  # as it was forecast then
            return True
        return self._has_arrived and looked_s >= self.settings.look_on_arrival_s

    def explain(self, now: float, limit: int = 32) -> list[Wait]:
        """Why the first `limit` requests wait, and until when. Changes nothing."""
        return self._admission.explain(now, limit)

    def _entry(
        self, request: GateRequest, demand: Demand, length: LengthDistribution, now: float
    ) -> Waiting:
        """With its expected length; its area is not measured yet."""
        self._number += 1
        return Waiting(
            demand=demand,
            tenant=request.tenant,
            priority=request.priority,
            arrived=now,
            number=self._number,
            expected=length.mean,
            weight=request.weight,
            deadline=request.deadline,
            prefix=request.prefix,
        )

    def _measured(self, entry: Waiting) -> Waiting:
        """The same, with the tokens x seconds of KV that it will take: for the queue."""
        entry.remaining = entry.demand.remaining()
        steps = entry.remaining.astype(np.float64)
        area = float((entry.demand.prompt_tokens * steps + steps**2 / 2).mean())
        if self._pace_s is None:
            paces = [each.step_s for each in self.ledgers.values()] or [self._last_pace_s]
            self._pace_s = self._last_pace_s = sum(paces) / len(paces)
        entry.area = area * self._pace_s / self._capacity
        return entry
