"""Applies ingress messages to the gate and turns its decisions into replies.

Synchronous; the caller passes the time. Offers gather in an inbox and are judged one at a time, so
that a burst of them delays no reply.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from penstock.deployments.gate.controller import Gate
from penstock.deployments.gate.forecast.full_rate import StepCosts
from penstock.deployments.gate.inbox import Inbox, Offered
from penstock.deployments.gate.learner import GateLearner
from penstock.deployments.gate.load_meter import GateLoad, LoadMeter
from penstock.deployments.gate.status import GateCounters
from penstock.deployments.gate.types import (
    GateRequest,
    GateSetup,
    Outcome,
    Refusal,
    Ticket,
)
from penstock.deployments.gate.wire import (
    add_outcome,
    features_from,
    report_from,
    request_from,
    reserved_request_from,
    spec_from,
)
from penstock.deployments.gate.workers import SILENCE_S, ReportingWorkers
from penstock.deployments.prediction.distribution import NUM_BINS, LengthDistribution
from penstock.deployments.prediction.features import Features
from penstock.deployments.prediction.predictor import LengthPredictor
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb

log = logging.getLogger("penstock.gate")

JUDGE_S = 0.05  # longest that admission waits for offers that are not judged yet
SEED = 0


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
        self._meter = LoadMeter(now)
        self.inbox = Inbox()
        self._send = send
        self._owners: dict[str, str] = {}  # ingress by request, waiting or running
        self._last_messages: dict[str, int] = {}  # newest message counted in, by ingress
        self._tokenizers: dict[str, str] = {}  # digests, by ingress
        self.workers = ReportingWorkers(now)
        self._has_new = False  # a request has joined the queue since the last tick

    def adopt(self, setup: GateSetup) -> None:
        """Other settings from now on; requests, workers and what was learnt stay."""
        self.setup = setup
        self.gate.adopt(setup.gate_settings())

    @property
    def num_waiting(self) -> int:
        return len(self.gate.queue) + self.inbox.num_unheld

    def are_all_judged(self, now: float) -> bool:
        """Whether no recent offer is still to be compared with the waiting requests."""
        came_s = self.inbox.waits_since()
        return came_s is None or now - came_s > JUDGE_S

    def ingress_joined(self, ingress: str, tokenizer: str = "") -> None:
        """`tokenizer`: digest of the one that this ingress and its workers have; empty: unknown."""
        self._last_messages[ingress] = 0
        self._tokenizers[ingress] = tokenizer

    def ingress_left(self, ingress: str) -> None:
        """An ingress is gone, or sends its waiting requests elsewhere."""
        self._last_messages.pop(ingress, None)
        self._tokenizers.pop(ingress, None)
        for name in [each for each, owner in self._owners.items() if owner == ingress]:
            del self._owners[name]
            self.learner.ended(name)
            self._meter.ended(name)
            self.inbox.pop(name)
            self.gate.cancel(name, 0.0)

    def receive(self, ingress: str, message: pb.FromIngress, now: float) -> list[str]:
        """Apply all that is quick; offers go to the inbox, for `judge_next` once they have texts.

        Returns the ids of offers that are complete and still await a decision.
        """
        for report in message.reports:
            self._report(report, self._tokenizers.get(ingress, ""), now)
        for name in message.declined:
            self.counts.declined += self.gate.declined(name, now)
        for name in message.lost:
            self.gate.declined(name, now)
        texts = {each.request_id: each for each in message.texts}
        new = [Offered(ingress, each, now) for each in message.offers]
        renewed = {each.request_id for each in message.offers}
        earlier = [self.inbox.pop(name) for name in texts if name not in renewed]
        undecided: list[str] = []
        for offered in (*filter(None, earlier), *new):
            name = offered.message.request_id
            if self._take_offer(offered, texts.get(name), now):
                undecided.append(name)
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
            self._send_outcome(Refusal(name, "never_fits", str(error)), now)
        return True

    def tick(self, now: float) -> None:
        """Send all decisions made by now."""
        self._has_new = False
        for name in self.workers.remove_silent(now):
            log.warning("worker %s has not reported for %g s: removed", name, SILENCE_S)
            self.gate.remove_worker(name)
        self._meter.measure(now, len(self.workers), is_full=self.num_waiting > 0)
        if not self.workers.are_known(now):
            return
        for outcome in self.gate.tick(now):
            self._send_outcome(outcome, now)

    def report_queued(self, names: list[str], ingress: str) -> None:
        """Tell the ingress which of `names` wait for a decision."""
        waiting = [n for n in names if n in self.inbox or n in self.gate.queue]
        if waiting:
            self._send(ingress).queued.extend(waiting)

    def credits(self, ingress: str, now: float) -> pb.Credits:
        """What this ingress may admit without asking: its share, while the queue is empty."""
        message = pb.Credits(as_of=self._last_messages.get(ingress, 0))
        if self.num_waiting or not self.workers.are_known(now):
            return message
        num = max(len(self._last_messages), 1)
        for name, (tokens, slots) in self.gate.spare().items():
            if slots >= num:
                message.epochs.append(self.gate.ledgers[name].spec.epoch)
                message.tokens.append(tokens // num)
                message.slots.append(slots // num)
        return message

    def figures(self) -> pb.Figures:
        return self.counts.figures(
            self.epoch, self.num_waiting, self.learner, self.gate.retry_after
        )

    def load(self, now: float) -> GateLoad:
        """What the autoscaler reads."""
        held = (self.gate.running, self.gate.queue, self.inbox)
        self._meter.keep(lambda name: any(name in each for each in held))
        return self._meter.load(self.epoch, self.gate.queue.arrivals(), now)

    def _report(self, message: pb.WorkerReport, tokenizer: str, now: float) -> None:
        spec = spec_from(message, tokenizer)
        if spec is None:
            self.workers.named(message.epoch)
            return
        try:
            report = report_from(message)
        except ValueError as error:
            log.warning("a report of worker %s cannot be read: %s", spec.name, error)
            return
        self.gate.add_worker(spec)
        self.counts.preemptions += self.workers.reported(spec, report.num_preemptions, now)
        self.learner.progress(report.running)
        costs = StepCosts.of(report.step_costs)
        self._meter.reported(spec, report.running, report.step_s, costs)
        self.gate.report(spec.name, report, now)

    def _ended(self, ended: pb.Ended, now: float) -> None:
        name = ended.request_id
        self._owners.pop(name, None)
        self.learner.ended(name)
        self._meter.ended(name, ended.generated)
        offered = self.inbox.pop(name)
        if (offered is not None and not offered.is_held) or self.gate.cancel(name, now):
            return
        self.counts.admitted += offered is not None  # finished before it was judged
        self.counts.completed += 1
        self.gate.finished(name, ended.generated, now)

    def _take_offer(self, offered: Offered, text: pb.TextFeatures | None, now: float) -> bool:
        """A new offer, or the text of an earlier one; whether it is complete and undecided.

        If the queue is empty and the worst case fits, it gets its ticket at once, before its text
        has arrived; it is held provisionally until it is judged.
        """
        name = offered.message.request_id
        self._owners[name] = offered.ingress
        if name in self.gate.queue:  # its worker declined it, or is lost: it keeps its prediction
            self.gate.queue.continues_after(name, offered.message.generated)
            return text is not None
        offered = self._admit_provisionally(offered, now)
        if text is not None:
            offered = offered.with_text(text, now)
        elif offered.epoch is None:
            self._send(offered.ingress).queued.append(name)
        self.inbox.put(offered)
        return text is not None and offered.epoch is None

    def _admit_provisionally(self, offered: Offered, now: float) -> Offered:
        """With its epoch if it is admitted, on credit or now by a ticket for its worst case."""
        message = offered.message
        if offered.epoch is None and message.HasField("credit_epoch"):
            offered = replace(offered, epoch=message.credit_epoch)
        waits = self.num_waiting or offered.is_late(now) or not self.workers.are_known(now)
        if offered.epoch is None and waits:
            return offered
        try:
            request = self._request(offered)
        except ValueError:
            return offered  # `judge_next` reports what is wrong with it
        # By reserve_max all of it is in the prompt.
        limit = 0 if self.setup.admission == "reserve_max" else offered.max_tokens
        if offered.epoch is not None:
            worker = self.workers.name(offered.epoch) or ""
            is_held = self.gate.admit_on_credit(request, limit, worker, now)
            return replace(offered, is_held=is_held)
        ticket = self.gate.admit(request, limit, now)
        if ticket is None:
            return offered
        self._send(offered.ingress).tickets.add(request_id=ticket.request_id, epoch=ticket.epoch)
        return replace(offered, epoch=ticket.epoch, is_held=True)

    def _offer(self, name: str, offered: Offered, now: float) -> None:
        message = offered.message
        features = features_from(message.features, offered.text)
        self.learner.watch(name, features)
        distribution, holding = self._distributions(features)
        request = self._request(offered)
        if offered.epoch is not None:
            worker = self.workers.name(offered.epoch)
            if worker is not None:
                self.gate.confirm(request, distribution, worker, now, holding=holding)
                self.counts.admitted += 1
                self._measure_offer(request, features, distribution, now)
            return
        if name in self.gate.running:  # its ingress offers it anew: it runs no more
            self.gate.finished(name, 0, now)
        if self._has_new and len(self.gate.queue) >= self.setup.max_queued:
            self.tick(now)  # the newest waiting request may be admitted by this
        refusal = self.gate.offer(request, distribution, now, holding=holding)
        if refusal is None or refusal.reason != "never_fits":
            self._measure_offer(request, features, distribution, now)
        if refusal is not None:
            self._send_outcome(refusal, now)
        else:
            self._has_new = True

    def _measure_offer(
        self, request: GateRequest, features: Features, length: LengthDistribution, now: float
    ) -> None:
        capacity = max((each.spec.capacity for each in self.gate.ledgers.values()), default=0)
        mark = hash((features, request.prefix))
        self._meter.offered(request, length.mean, capacity, now, mark)

    def _request(self, offered: Offered) -> GateRequest:
        message, came_s = offered.message, offered.came_s
        tokenizer = self._tokenizers.get(offered.ingress, "")
        if self.setup.admission != "reserve_max":
            return request_from(message, came_s, tokenizer)
        sizes = [each.spec.block_size for each in self.gate.ledgers.values()]
        return reserved_request_from(message, came_s, max(sizes, default=16), tokenizer)

    def _distributions(self, features: Features) -> tuple[LengthDistribution, LengthDistribution]:
        distribution, holding = self.learner.predictor.predict_both(features)
        if self.setup.admission == "reserve_max":
            holding = LengthDistribution(np.zeros(NUM_BINS + 1), max_tokens=features.max_tokens)
        return distribution, holding

    def _send_outcome(self, outcome: Outcome, now: float) -> None:
        name = outcome.request_id
        ingress = self._owners.get(name)
        self.counts.note(outcome)
        if not isinstance(outcome, Ticket):
            self._owners.pop(name, None)
            self.learner.ended(name)
            retry_after_s = outcome.retry_after_s if isinstance(outcome, Refusal) else None
            self._meter.refused(name, retry_after_s, now)
        if ingress is not None:
            add_outcome(self._send(ingress), outcome)
