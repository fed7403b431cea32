"""Applies ingress messages to the gate and turns its decisions into replies.

Synchronous; the caller passes the time. Offers gather in an inbox and are judged one at a time, so
that a burst of them delays no reply.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from penstock.deployments.gate.controller import Gate
from penstock.deployments.gate.counters import GateCounters
from penstock.deployments.gate.inbox import Inbox, Offered
from penstock.deployments.gate.learner import GateLearner
from penstock.deployments.gate.types import (
    Expiry,
    GateRequest,
    GateSetup,
    Outcome,
    Refusal,
    Ticket,
)
from penstock.deployments.gate.wire import (
    features_from,
    refusal_message,
    report_from,
    request_from,
    reserved_request_from,
    spec_from,
)
from penstock.deployments.prediction.distribution import NUM_BINS, LengthDistribution
from penstock.deployments.prediction.features import Features
from penstock.deployments.prediction.predictor import LengthPredictor
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb

log = logging.getLogger("penstock.gate")

SILENCE_S = 3.0  # without a report: the worker is taken to be gone
REBUILD_S = 2.0  # longest that a new gate waits for the reports of all workers
JUDGE_S = 0.05  # longest that admission waits for offers that are not judged yet
SEED = 0


@dataclass(slots=True)
class Worker:
    """A worker that reports, by its epoch."""

    name: str
    reported_s: float
    num_preemptions: int


class GateService:
    """One gate and one predictor, and which ingress owns which request.

    `send(ingress)` returns the message to that ingress which is being filled.
    """

    def __init__(
        self,
        setup: GateSetup,
        predictor: LengthPredictor,
        send: Callable[[str], pb.ToIngress],
        now: float,
    ):
        self.setup = setup
        self.learner = GateLearner(predictor)
        self.gate = Gate(setup.gate_settings(), seed=SEED)
        self.epoch = secrets.randbits(64)
        self.counts = GateCounters()
        self.inbox = Inbox()
        self._send = send
        self._owners: dict[str, str] = {}  # ingress by request, waiting or running
        self._last_messages: dict[str, int] = {}  # newest message counted in, by ingress
        self._workers: dict[int, Worker] = {}  # by epoch
        self._expected: set[int] = set()  # epochs named by an ingress, without a report so far
        self._born_s = now
        self._has_new = False  # a request has joined the queue since the last tick

    @property
    def num_waiting(self) -> int:
        return len(self.gate.queue) + self.inbox.num_unheld

    def are_all_judged(self, now: float) -> bool:
        """Whether no recent offer is still to be compared with the waiting requests."""
        came_s = self.inbox.waits_since()
        return came_s is None or now - came_s > JUDGE_S

    def is_rebuilt(self, now: float) -> bool:
        """Whether all workers that the ingresses know have reported what they run."""
        return not self._expected or now - self._born_s > REBUILD_S

    def ingress_joined(self, ingress: str) -> None:
        self._last_messages[ingress] = 0

    def ingress_left(self, ingress: str) -> None:
        """An ingress is gone, or sends its waiting requests elsewhere."""
        self._last_messages.pop(ingress, None)
        for name in [each for each, owner in self._owners.items() if owner == ingress]:
            del self._owners[name]
            self.learner.ended(name)
            self.inbox.pop(name)
            self.gate.cancel(name, 0.0)

    def receive(self, ingress: str, message: pb.FromIngress, now: float) -> list[str]:
        """Apply all that is quick; offers go to the inbox, for `judge_next`.

        If the queue is empty and the worst case fits, an offer gets its ticket at once, before the
        prompt's text has arrived; it is held provisionally until it is judged. Returns the ids of
        offers that still await a decision.
        """
        for report in message.reports:
            self._report(report, now)
        for name in message.declined:
            self.counts.declined += self.gate.declined(name, now)
        undecided: list[str] = []
        for offer in message.offers:
            self._owners[offer.request_id] = ingress
            if offer.request_id in self.gate.queue:  # a worker has just declined it
                if not offer.text_follows:
                    undecided.append(offer.request_id)
                continue
            offered = self._admit_provisionally(Offered(ingress, offer, now), now)
            if not offer.text_follows:
                self.inbox.put(offered)
                if offered.epoch is None:
                    undecided.append(offer.request_id)
            elif offered.epoch is None:
                self._send(ingress).queued.append(offer.request_id)
        for ended in message.ended:  # after the offers: an end follows its beginning
            self._ended(ended, now)
        self.learner.labels.extend(message.labels)
        self._last_messages[ingress] = max(message.number, self._last_messages.get(ingress, 0))
        return undecided

    def judge_next(self, now: float) -> bool:
        """One offer out of the inbox; False if there was none."""
        offered = self.inbox.next()
        if offered is None:
            return False
        name = offered.message.request_id
        try:
            self._offer(name, offered, now)
        except ValueError as error:  # its ingress sends it without the gate
            log.warning("request %s cannot be judged: %s", name, error)
            self._send_outcome(Refusal(name, "never_fits", str(error)))
        return True

    def tick(self, now: float) -> None:
        """Send all decisions made by now."""
        self._has_new = False
        for epoch, worker in list(self._workers.items()):
            if now - worker.reported_s > SILENCE_S:
                log.warning("worker %s has not reported for %g s: removed", worker.name, SILENCE_S)
                del self._workers[epoch]
                self.gate.remove_worker(worker.name)
        if not self.is_rebuilt(now):
            return
        for outcome in self.gate.tick(now):
            self._send_outcome(outcome)

    def report_queued(self, names: list[str], ingress: str) -> None:
        """Tell the ingress which of `names` wait for a decision."""
        waiting = [n for n in names if n in self.inbox or n in self.gate.queue]
        if waiting:
            self._send(ingress).queued.extend(waiting)

    def credits(self, ingress: str, now: float) -> pb.Credits:
        """What this ingress may admit without asking: its share, while the queue is empty."""
        message = pb.Credits(as_of=self._last_messages.get(ingress, 0))
        if self.num_waiting or not self.is_rebuilt(now):
            return message
        num = max(len(self._last_messages), 1)
        for name, (tokens, slots) in self.gate.spare().items():
            if slots >= num:
                message.epochs.append(self.gate.ledgers[name].spec.epoch)
                message.tokens.append(tokens // num)
                message.slots.append(slots // num)
        return message

    def figures(self) -> pb.Figures:
        return self.counts.figures(self.epoch, self.num_waiting, self.learner)

    def _report(self, message: pb.WorkerReport, now: float) -> None:
        spec = spec_from(message)
        if spec is None:
            if message.epoch not in self._workers:
                self._expected.add(message.epoch)  # named, and nothing is known of it yet
            return
        self._expected.discard(message.epoch)
        self.gate.add_worker(spec)
        preempted = message.report.num_preemptions
        known = self._workers.get(message.epoch)
        if known is not None:
            self.counts.preemptions += max(preempted - known.num_preemptions, 0)
        else:  # an earlier epoch at this address is over
            same = [e for e, each in self._workers.items() if each.name == spec.name]
            for epoch in same:
                del self._workers[epoch]
        self._workers[message.epoch] = Worker(spec.name, now, preempted)
        report = report_from(message)
        self.learner.progress(report.running)
        self.gate.report(spec.name, report, now)

    def _ended(self, ended: pb.Ended, now: float) -> None:
        name = ended.request_id
        self._owners.pop(name, None)
        self.learner.ended(name)
        offered = self.inbox.pop(name)
        if (offered is not None and not offered.is_held) or self.gate.cancel(name, now):
            return
        self.counts.admitted += offered is not None  # finished before it was judged
        self.counts.completed += 1
        self.gate.finished(name, ended.generated, now)

    def _admit_provisionally(self, offered: Offered, now: float) -> Offered:
        """With its epoch if it is admitted, on credit or now by a ticket for its worst case."""
        message = offered.message
        if message.HasField("credit_epoch"):
            offered = replace(offered, epoch=message.credit_epoch)
        is_late = message.HasField("remaining_s") and message.remaining_s <= 0
        waits = self.num_waiting or is_late or not self.is_rebuilt(now)
        if offered.epoch is None and waits:
            return offered
        try:
            request = self._request(message, now)
        except ValueError:
            return offered  # `judge_next` reports what is wrong with it
        features = message.features
        limit = features.max_tokens if features.HasField("max_tokens") else None
        if self.setup.admission == "reserve_max":
            limit = 0  # all of it is in the prompt
        if offered.epoch is not None:
            worker = self._workers.get(offered.epoch)
            name = "" if worker is None else worker.name
            is_held = self.gate.admit_on_credit(request, limit, name, now)
            return replace(offered, is_held=is_held)
        ticket = self.gate.admit(request, limit, now)
        if ticket is None:
            return offered
        self._send(offered.ingress).tickets.add(request_id=ticket.request_id, epoch=ticket.epoch)
        return replace(offered, epoch=ticket.epoch, is_held=True)

    def _offer(self, name: str, offered: Offered, now: float) -> None:
        message = offered.message
        features = features_from(message.features)
        self.learner.watch(name, features)
        distribution, holding = self._distributions(features)
        request = self._request(message, offered.came_s)
        if offered.epoch is not None:
            worker = self._workers.get(offered.epoch)
            if worker is not None:
                self.gate.confirm(request, distribution, worker.name, now, holding=holding)
                self.counts.admitted += 1
            return
        if name in self.gate.running:  # its ingress offers it anew: it runs no more
            self.gate.finished(name, 0, now)
        if self._has_new and len(self.gate.queue) >= self.setup.max_queued:
            self.tick(now)  # the newest waiting request may be admitted by this
        refusal = self.gate.offer(request, distribution, now, holding=holding)
        if refusal is not None:
            self._send_outcome(refusal)
        else:
            self._has_new = True

    def _request(self, message: pb.Offer, came_s: float) -> GateRequest:
        if self.setup.admission != "reserve_max":
            return request_from(message, came_s)
        sizes = [each.spec.block_size for each in self.gate.ledgers.values()]
        return reserved_request_from(message, came_s, max(sizes, default=16))

    def _distributions(self, features: Features) -> tuple[LengthDistribution, LengthDistribution]:
        distribution, holding = self.learner.predictor.predict_both(features)
        if self.setup.admission == "reserve_max":
            holding = LengthDistribution(np.zeros(NUM_BINS + 1), max_tokens=features.max_tokens)
        return distribution, holding

    def _send_outcome(self, outcome: Outcome) -> None:
        name, counts = outcome.request_id, self.counts
        ingress = self._owners.get(name)
        if isinstance(outcome, Ticket):
            counts.admits(outcome)
            if ingress is not None:
                self._send(ingress).tickets.add(request_id=name, epoch=outcome.epoch)
            return
        self._owners.pop(name, None)
        self.learner.ended(name)
        if isinstance(outcome, Expiry):
            counts.expired += 1
            if ingress is not None:
                self._send(ingress).expired.append(name)
            return
        counts.refused[outcome.reason] += 1
        if ingress is not None:
            self._send(ingress).refusals.append(refusal_message(outcome))
