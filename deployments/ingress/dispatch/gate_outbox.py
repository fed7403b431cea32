"""Gathers what an ingress has to send to the gate: a message costs more than its content.

What a request waits for is sent at once; other items go with it, or a moment later. A request has
one Offer, without its text: the features of the text take 0.2 ms to compute, and follow as soon as
the gate waits for them, or after the request's first step.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque

from penstock.deployments.gate.wire import features_message, text_message
from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.dispatch.admission_gate import Returned
from penstock.deployments.ingress.dispatch.pending_admission import PendingAdmission, State
from penstock.protos.penstock.internal.v1 import channel_pb2
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb

GATHER_S = 0.01  # longest delay of items that no request waits for
REPORT_GATHER_S = 0.02
TEXT_S = 0.05  # to the texts of admitted requests: their first step goes first
MAX_FEATURES = 4096
MAX_LABELS = 1024  # kept while the gate is away; older ones are dropped


class GateOutbox:
    """The message that is being filled. Lives on one event loop.

    Between streams worker reports are kept, with which the next one begins, and answers' lengths.
    """

    def __init__(self, ingress_id: str, tokenizer_digest: str = "") -> None:
        self._ingress_id = ingress_id
        self._tokenizer_digest = tokenizer_digest
        self._is_open = False
        self._message = pb.FromIngress()
        self._number = 0
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._report_timer: asyncio.TimerHandle | None = None
        self._text_timer: asyncio.TimerHandle | None = None
        # By id: requests of which the gate lacks the offer or the text.
        self._incomplete: dict[str, PendingAdmission] = {}
        self._reports: dict[int, pb.WorkerReport] = {}  # newest, by epoch
        self._fresh: set[int] = set()  # epochs whose newest report is not sent yet
        self._features: OrderedDict[str, pb.Features] = OrderedDict()
        self._over: list[str] = []  # requests that have ended since the last message
        self._labels: deque[pb.Label] = deque(maxlen=MAX_LABELS)  # of while the gate was away

    @property
    def next_number(self) -> int:
        """Of the message that will have the items added now."""
        return self._number + 1

    def begin(self) -> None:
        """A new stream: its first message has the ingress id and all workers' reports."""
        self._message, self._number = pb.FromIngress(), 0
        self._message.ingress_id = self._ingress_id
        self._message.tokenizer_digest = self._tokenizer_digest
        self._fresh = set(self._reports)
        self._add_reports()

    def open(self) -> None:
        """The gate has replied: from now on items are sent."""
        self._is_open = True
        if self._labels:
            self._message.labels.extend(self._labels)
            self._labels.clear()
            self._go_soon()

    def close(self) -> None:
        """The gate is gone."""
        self._is_open = False
        self._incomplete.clear()
        self._labels.extend(self._message.labels)  # not sent
        del self._message.labels[:]

    async def due(self) -> None:
        """Until there is something to send."""
        await self._due.wait()

    def take(self) -> pb.FromIngress:
        """The message; the next one is begun."""
        self._offer_credited()
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for request_id in self._over:  # nothing is learnt of those that were refused or failed
            self._features.pop(request_id, None)
        self._over.clear()
        message, self._message = self._message, pb.FromIngress()
        self._number += 1
        message.number = self._number
        return message

    def admitted_on_credit(self, request: AdmissionRequest, epoch: int) -> None:
        """Admitted on credit. Its offer is made after the request itself has been sent."""
        pending = PendingAdmission(request, State.CREDITED, epoch)
        self._incomplete[pending.request_id] = pending
        self._go_soon()

    def offer(
        self, pending: PendingAdmission, *, with_text: bool, returned: Returned | None = None
    ) -> None:
        """Offer it now, for a decision. `returned`: why again, if not for the first time."""
        self._offer_credited()  # before this one, which is judged against them
        if returned == "declined":
            self._message.declined.append(pending.request_id)
        elif returned == "lost":
            self._message.lost.append(pending.request_id)
        self._add_offer(pending)
        self._incomplete[pending.request_id] = pending  # in place of an earlier admission
        if with_text:
            self._add_text(pending)
        self._due.set()

    def compute_texts(self) -> None:
        """Compute the features of offered texts now, ahead of `send_text`."""
        for pending in self._incomplete.values():
            if pending.state is State.OFFERED:
                self._features_of(pending.request)

    def send_text(self, pending: PendingAdmission) -> None:
        """The gate waits for the text of this offer."""
        self._add_text(pending)
        self._due.set()

    def admitted(self, pending: PendingAdmission) -> None:
        """By a ticket. If the gate lacks its text, that is sent later."""
        if pending.state is State.TEXT_PENDING:
            self._send_texts_later()

    def ended(self, request_id: str, num_generated: int, *, is_awaited: bool) -> None:
        """A request is over. `is_awaited`: another may wait for its memory."""
        self._offer_credited()  # an end follows its offer
        self._send_texts()
        pending = self._incomplete.pop(request_id, None)
        if pending is not None:
            pending.state = State.ENDED
        if not self._is_open:
            self._features.pop(request_id, None)
            return
        self._over.append(request_id)  # its length may be reported next
        self._message.ended.add(request_id=request_id, generated=num_generated)
        self._due.set() if is_awaited else self._go_soon()

    def learn(self, request: AdmissionRequest, length: int, ended: str) -> None:
        """Report an answer's length, and why it ended: "stop", "length" or "cancel"."""
        features = self._features_of(request)
        label = pb.Label(
            features=features, length=length, ended=ended, request_id=request.request_id
        )
        self._features.pop(request.request_id, None)
        if self._is_open:
            self._message.labels.append(label)
            self._go_soon()
        else:  # the first requests may come before the gate, which starts later
            self._labels.append(label)

    def report(self, address: str, epoch: int, report: channel_pb2.Report) -> None:
        """Forward a worker's report."""
        self._reports[epoch] = pb.WorkerReport(address=address, epoch=epoch, report=report)
        self._fresh.add(epoch)
        if self._is_open and self._report_timer is None:
            loop = asyncio.get_running_loop()
            self._report_timer = loop.call_later(REPORT_GATHER_S, self._add_reports)

    def explain(self, number: int, limit: int) -> None:
        """Ask now what waits, and why."""
        if self._is_open:
            self._message.explain.add(number=number, limit=limit)
            self._due.set()

    def lost(self, epoch: int) -> None:
        """That worker is no longer connected."""
        self._reports.pop(epoch, None)

    def _go_soon(self) -> None:
        if self._timer is None and not self._due.is_set():
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self._due.set)

    def _add_reports(self) -> None:
        self._report_timer = None
        fresh = [self._reports[each] for each in self._fresh if each in self._reports]
        self._message.reports.extend(fresh)
        self._fresh = set()
        self._due.set()

    def _offer_credited(self) -> None:
        for pending in self._incomplete.values():
            if pending.state is State.CREDITED:
                self._add_offer(pending)
                self._send_texts_later()

    def _send_texts_later(self) -> None:
        if self._text_timer is None:
            loop = asyncio.get_running_loop()
            self._text_timer = loop.call_later(TEXT_S, self._send_texts)

    def _send_texts(self) -> None:
        if self._text_timer is not None:
            self._text_timer.cancel()
            self._text_timer = None
        for pending in list(self._incomplete.values()):
            if pending.state is State.TEXT_PENDING:
                self._add_text(pending)
                self._go_soon()

    def _add_offer(self, pending: PendingAdmission) -> None:
        pending.offer_sent()
        if not self._is_open:
            return
        request, inner = pending.request, pending.request.request
        left_s = inner.deadline_s
        self._message.offers.add(
            request_id=request.request_id,
            features=features_message(request.features),
            priority=-inner.priority,
            remaining_s=None if left_s is None else left_s - time.monotonic(),
            ceiling=request.ceiling or 0,
            credit_epoch=pending.credit_epoch,
            prefix=request.prefix,
            generated=len(inner.emitted_ids),
            weight=request.weight,
        )

    def _add_text(self, pending: PendingAdmission) -> None:
        pending.text_sent()
        self._incomplete.pop(pending.request_id, None)
        if self._is_open:
            features = self._features_of(pending.request)
            self._message.texts.append(text_message(pending.request_id, features))

    def _features_of(self, request: AdmissionRequest) -> pb.Features:
        """With the text's. Computed once: for the offer's text, and for the answer's length."""
        message = self._features.get(request.request_id)
        if message is None:
            message = features_message(request.features_with_text())
            self._features[request.request_id] = message
            if len(self._features) > MAX_FEATURES:
                self._features.popitem(last=False)
        return message
