"""What the gate's process does with messages: gate, books and what is learnt, behind one clock.

Plain and synchronous: messages of ingresses in, answers to each of them out. Offers gather in an
inbox and are taken in pieces, so that a flood of them holds up no answer. Knows nothing of Ray,
sockets or event loops; the clock is told.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.deployments.gate.controller import Gate
from penstock.deployments.gate.counters import GateCounters
from penstock.deployments.gate.inbox import Inbox, Offered
from penstock.deployments.gate.learner import GateLearner
from penstock.deployments.gate.sampled_forecast import UNBOUNDED
from penstock.deployments.gate.types import (
    Expiry,
    GateRequest,
    GateSettings,
    Outcome,
    QueueSettings,
    Refusal,
    Ticket,
)
from penstock.deployments.gate.wire import (
    epoch_name,
    features_from,
    refusal_message,
    report_from,
    spec_from,
    wait_message,
)
from penstock.deployments.prediction.distribution import MAX_LENGTH, NUM_BINS, LengthDistribution
from penstock.deployments.prediction.features import Features
from penstock.deployments.prediction.predictor import LengthPredictor
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb

log = logging.getLogger("penstock.gate")

SILENCE_S = 3.0  # a worker of which nothing is heard for so long is gone
REBUILD_S = 2.0  # at most so long a new gate waits for the reports of all workers
JUDGE_S = 0.05  # at most so long nobody goes in because others have not been judged
SEED = 0


@dataclass(frozen=True, slots=True)
class GateSetup:
    """How an operator wants the gate. Small: each ingress shows its own when it asks for it."""

    admission: str = "predicted"  # or "reserve_max"
    max_queued: int = 1024
    longest_wait_s: float | None = None
    host: str | None = None  # address that the gate listens on; None: its node's in the cluster
    snapshot_file: str | None = None  # what the predictor has learnt

    def gate_settings(self) -> GateSettings:
        wait_s = float("inf") if self.longest_wait_s is None else self.longest_wait_s
        return GateSettings(longest_wait_s=wait_s, queue=QueueSettings(max_waiting=self.max_queued))


@dataclass(slots=True)
class _Worker:
    epoch: int
    reported_s: float


class GateService:
    """One gate and one predictor, and who is to be told what.

    `send(ingress)` gives the message to that ingress which is being made.
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
        self._owners: dict[str, str] = {}  # of what waits or runs: its ingress
        self._last_messages: dict[str, int] = {}  # by ingress: newest that is counted in
        self._workers: dict[str, _Worker] = {}
        self._expected: set[int] = set()  # epochs that an ingress has named, and not yet reported
        self._num_preempted: dict[str, int] = {}
        self._born_s = now
        self._has_new = False  # somebody has joined the queue since the last tick

    @property
    def num_waiting(self) -> int:
        return len(self.gate.queue) + self.inbox.num_unheld

    def are_all_judged(self, now: float) -> bool:
        """Whether nobody who has just come is yet to be compared with those that wait."""
        came_s = self.inbox.waits_since()
        return came_s is None or now - came_s > JUDGE_S

    def is_rebuilt(self, now: float) -> bool:
        """Whether all workers that ingresses know have said what they run."""
        return not self._expected or now - self._born_s > REBUILD_S

    def ingress_joined(self, ingress: str) -> None:
        self._last_messages[ingress] = 0

    def ingress_left(self, ingress: str) -> None:
        """An ingress is gone, or sends what waits elsewhere."""
        self._last_messages.pop(ingress, None)
        for name in [each for each, owner in self._owners.items() if owner == ingress]:
            del self._owners[name]
            self.learner.ended(name)
            self.inbox.pop(name)
            self.gate.cancel(name, 0.0)

    def receive(self, ingress: str, message: pb.FromIngress, now: float) -> None:
        """All that is quick. Offers go to the inbox: `work` takes them.

        With nobody there and room whatever happens, one that asks has its ticket at once, before
        its text has come; the books have it by a broad distribution until it is judged.
        """
        for report in message.reports:
            self._report(report, now)
        for name in message.declined:
            self.counts.declined += self.gate.declined(name, now)
        for offer in message.offers:
            self._owners[offer.request_id] = ingress
            if offer.request_id in self.gate.queue:  # it has just come back from a worker
                continue
            is_held = self._holds_provisionally(offer, now)
            if not offer.text_follows:
                self.inbox.put(Offered(ingress, offer, now, is_held))
            elif not is_held and not offer.HasField("credit_epoch"):
                self._send(ingress).queued.append(offer.request_id)
        for ended in message.ended:  # an end behind its beginning
            self._ended(ended, now)
        self.learner.labels.extend(message.labels)
        self._last_messages[ingress] = max(message.number, self._last_messages.get(ingress, 0))

    def judge_next(self, now: float) -> bool:
        """One offer out of the inbox; False if there was none."""
        offered = self.inbox.next()
        if offered is None:
            return False
        name = offered.message.request_id
        try:
            self._offer(name, offered, now)
        except ValueError as error:  # a request that cannot be judged goes its own way
            log.warning("request %s cannot be judged: %s", name, error)
            self._send_outcome(Refusal(name, "never_fits", str(error)))
        return True

    def tick(self, now: float) -> None:
        """Whatever was decided by now is told."""
        self._has_new = False
        for name, worker in list(self._workers.items()):
            if now - worker.reported_s > SILENCE_S:
                log.warning("worker %s is silent: nobody is sent there", name)
                self._forget(name)
        if not self.is_rebuilt(now):
            return
        for outcome in self.gate.tick(now):
            self._send_outcome(outcome)

    def report_queued(self, names: list[str], ingress: str) -> None:
        """Those of `names` that are still here wait: say so."""
        waiting = [n for n in names if n in self.inbox or n in self.gate.queue]
        if waiting:
            self._send(ingress).queued.extend(waiting)

    def credits(self, ingress: str, now: float) -> pb.Credits:
        """What this ingress may let in without asking: its share, while nobody waits."""
        message = pb.Credits(as_of=self._last_messages.get(ingress, 0))
        if self.num_waiting or not self.is_rebuilt(now):
            return message
        num = max(len(self._last_messages), 1)
        for name, (tokens, slots) in self.gate.spare().items():
            worker = self._workers.get(name)
            if worker is not None and slots >= num:
                message.epochs.append(worker.epoch)
                message.tokens.append(tokens // num)
                message.slots.append(slots // num)
        return message

    def figures(self) -> pb.Figures:
        return self.counts.figures(self.epoch, self.num_waiting, self.learner)

    def explain(self, now: float, limit: int) -> pb.ExplainResponse:
        accounts = []
        for name, ledger in self.gate.ledgers.items():
            accounts.append(
                pb.WorkerAccount(
                    worker=self._id_of(name),
                    num_held=len(ledger),
                    slots=ledger.spec.slots,
                    used=ledger.used(now),
                    capacity=ledger.spec.capacity,
                    headroom=ledger.headroom.share,
                    is_open=ledger.is_open,
                )
            )
        waits = [wait_message(each) for each in self.gate.explain(now, limit)]
        for wait in waits:
            wait.worker = self._id_of(wait.worker)
        return pb.ExplainResponse(waits=waits, workers=accounts, num_waiting=self.num_waiting)

    def _report(self, message: pb.WorkerReport, now: float) -> None:
        spec = spec_from(message)
        if spec is None:
            if message.epoch not in {each.epoch for each in self._workers.values()}:
                self._expected.add(message.epoch)  # named, and nothing is known of it yet
            return
        self._expected.discard(message.epoch)
        self.gate.add_worker(spec)
        self._workers[spec.name] = _Worker(message.epoch, now)
        before = self._num_preempted.get(epoch_name(message.epoch))
        preempted = message.report.num_preemptions
        if before is not None:
            self.counts.preemptions += max(preempted - before, 0)
        self._num_preempted[epoch_name(message.epoch)] = preempted
        report = report_from(message)
        self.learner.progress(report.running)
        self.gate.report(spec.name, report, now)

    def _forget(self, name: str) -> None:
        worker = self._workers.pop(name)
        self._num_preempted.pop(epoch_name(worker.epoch), None)
        self.gate.remove_worker(name)

    def _ended(self, ended: pb.Ended, now: float) -> None:
        name = ended.request_id
        self._owners.pop(name, None)
        self.learner.ended(name)
        offered = self.inbox.pop(name)
        if (offered is not None and not offered.is_held) or self.gate.cancel(name, now):
            return
        self.counts.admitted += offered is not None  # it is over before it was judged
        self.counts.completed += 1
        self.gate.finished(name, ended.generated, now)

    def _holds_provisionally(self, message: pb.Offer, now: float) -> bool:
        """Whether the books have it, by a broad distribution; one that asks has its ticket then."""
        is_in = message.HasField("credit_epoch")
        is_late = message.HasField("remaining_s") and message.remaining_s <= 0
        if not is_in and (self.num_waiting or is_late or not self.is_rebuilt(now)):
            return False
        try:
            request = self._request(message, now)
        except ValueError:
            return False  # `work` says what is wrong with it
        features = message.features
        limit = features.max_tokens if features.HasField("max_tokens") else None
        if self.setup.admission == "reserve_max":
            limit = 0  # all of it is in the prompt
        if is_in:
            worker = self._name_of(message.credit_epoch)
            return worker is not None and self.gate.admit_on_credit(request, limit, worker, now)
        ticket = self.gate.admit(request, limit, now)
        if ticket is None:
            return False
        message.credit_epoch = int(ticket.epoch, 16)
        told = pb.Ticket(request_id=request.request_id, epoch=message.credit_epoch)
        self._send(self._owners[request.request_id]).tickets.append(told)
        return True

    def _offer(self, name: str, offered: Offered, now: float) -> None:
        message = offered.message
        features = features_from(message.features)
        self.learner.watch(name, features)
        distribution, holding = self._distributions(features)
        request = self._request(message, offered.came_s)
        if message.HasField("credit_epoch"):
            worker = self._name_of(message.credit_epoch)
            if worker is not None:
                self.gate.confirm(request, distribution, worker, now, holding=holding)
                self.counts.admitted += 1
            return
        if self.gate.is_admitted(name):  # its ingress knows better
            self.gate.finished(name, 0, now)
        if self._has_new and len(self.gate.queue) >= self.setup.max_queued:
            self.tick(now)  # who came just before may only be waiting for this
        refusal = self.gate.offer(request, distribution, now, holding=holding)
        if refusal is not None:
            self._send_outcome(refusal)
        else:
            self._has_new = True

    def _request(self, message: pb.Offer, came_s: float) -> GateRequest:
        features = message.features
        prompt, ceiling = features.prompt_tokens, message.ceiling or None
        if self.setup.admission == "reserve_max":
            # All that it may need is held from the beginning, and it grows no more.
            longest = features.max_tokens if features.HasField("max_tokens") else MAX_LENGTH
            whole = min(prompt + longest, ceiling or UNBOUNDED)
            size = max((each.spec.block_size for each in self.gate.ledgers.values()), default=16)
            prompt = ceiling = -(-whole // size) * size
        deadline = came_s + message.remaining_s if message.HasField("remaining_s") else None
        return GateRequest(
            message.request_id,
            prompt,
            features.tenant,
            message.priority,
            deadline,
            ceiling,
            tuple(message.prefix),
        )

    def _distributions(self, features: Features) -> tuple[LengthDistribution, LengthDistribution]:
        distribution, holding = self.learner.predictor.predict_both(features)
        if self.setup.admission == "reserve_max":
            holding = LengthDistribution(np.zeros(NUM_BINS + 1), max_tokens=features.max_tokens)
        return distribution, holding

    def _id_of(self, name: str) -> str:
        """As the status of workers has it: where machines are is nobody's business."""
        worker = self._workers.get(name)
        return "" if worker is None else epoch_name(worker.epoch)[:8]

    def _name_of(self, epoch: int) -> str | None:
        return next((n for n, each in self._workers.items() if each.epoch == epoch), None)

    def _send_outcome(self, outcome: Outcome) -> None:
        name, counts = outcome.request_id, self.counts
        ingress = self._owners.get(name)
        if isinstance(outcome, Ticket):
            counts.admits(outcome)
            if ingress is not None:
                epoch = int(outcome.epoch, 16)
                self._send(ingress).tickets.append(pb.Ticket(request_id=name, epoch=epoch))
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
