"""Gathers what an ingress has to send to the gate: a message costs more than its content.

What a request waits for is sent at once; other items go with it, or a moment later.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from penstock.deployments.gate.wire import features_message
from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.protos.penstock.internal.v1 import channel_pb2
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb

GATHER_S = 0.01  # longest delay of items that no request waits for
REPORT_GATHER_S = 0.02
TEXT_S = 0.05  # to the texts of admitted requests: their first step goes first
MAX_FEATURES = 4096


class GateOutbox:
    """The message that is being filled. Lives on one event loop.

    Between streams only worker reports are kept: the next gate begins with them.
    """

    def __init__(self, ingress_id: str) -> None:
        self._ingress_id = ingress_id
        self._is_open = False
        self._message = pb.FromIngress()
        self._number = 0
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._report_timer: asyncio.TimerHandle | None = None
        self._credited: list[
            tuple[AdmissionRequest, int]
        ] = []  # admitted on credit, not offered yet
        self._without_text: list[tuple[AdmissionRequest, int]] = []  # admitted, text not sent yet
        self._reports: dict[int, pb.WorkerReport] = {}  # newest, by epoch
        self._fresh: set[int] = set()  # epochs whose newest report is not sent yet
        self._features: OrderedDict[str, pb.Features] = OrderedDict()

    @property
    def next_number(self) -> int:
        """Of the message that will have the items added now."""
        return self._number + 1

    def begin(self) -> None:
        """A new stream: its first message has the ingress id and all workers' reports."""
        self._message, self._number = pb.FromIngress(ingress_id=self._ingress_id), 0
        self._fresh = set(self._reports)
        self._add_reports()

    def open(self) -> None:
        """The gate has replied: from now on items are sent."""
        self._is_open = True

    def close(self) -> None:
        """The gate is gone."""
        self._is_open = False

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
        message, self._message = self._message, pb.FromIngress()
        self._number += 1
        message.number = self._number
        return message

    def admitted_on_credit(self, request: AdmissionRequest, epoch: int) -> None:
        """Admitted on credit. Its offer is made after the request itself has been sent."""
        self._credited.append((request, epoch))
        self._go_soon()

    def ask(
        self, request: AdmissionRequest, *, text_follows: bool = False, declined: bool = False
    ) -> None:
        """Offer it, and wait for a decision. `declined`: a worker sent it back."""
        self._offer_credited()  # before this one, which is judged against them
        if declined:
            self._message.declined.append(request.request_id)
        self._offer(request, text_follows=text_follows)
        self._due.set()

    def compute_features(self, request: AdmissionRequest) -> None:
        """Compute the features of its text now."""
        self._features_of(request)

    def send_text_later(self, request: AdmissionRequest, epoch: int) -> None:
        """It is admitted; send the features of its text later."""
        self._without_text.append((request, epoch))
        if len(self._without_text) == 1:
            asyncio.get_running_loop().call_later(TEXT_S, self._send_texts)

    def ended(self, request_id: str, num_generated: int, *, is_awaited: bool) -> None:
        """A request is over. `is_awaited`: another may wait for its memory."""
        self._offer_credited()  # an end follows its offer
        self._send_texts()
        if self._is_open:
            self._message.ended.add(request_id=request_id, generated=num_generated)
            self._due.set() if is_awaited else self._go_soon()

    def learn(self, request: AdmissionRequest, length: int, ended: str) -> None:
        """Report an answer's length, and why it ended: "stop", "length" or "cancel"."""
        if self._is_open:
            features = self._features_of(request)
            self._message.labels.add(
                features=features, length=length, ended=ended, request_id=request.request_id
            )
            self._features.pop(request.request_id, None)
            self._go_soon()

    def report(self, address: str, epoch: int, report: channel_pb2.Report) -> None:
        """Forward a worker's report."""
        self._reports[epoch] = pb.WorkerReport(address=address, epoch=epoch, report=report)
        self._fresh.add(epoch)
        if self._is_open and self._report_timer is None:
            loop = asyncio.get_running_loop()
            self._report_timer = loop.call_later(REPORT_GATHER_S, self._add_reports)

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
        credited, self._credited = self._credited, []
        for request, epoch in credited:
            self._offer(request, epoch, text_follows=True)
            self.send_text_later(request, epoch)

    def _send_texts(self) -> None:
        waiting, self._without_text = self._without_text, []
        for request, epoch in waiting:
            self._offer(request, epoch)
            self._go_soon()

    def _offer(
        self,
        request: AdmissionRequest,
        credit_epoch: int | None = None,
        *,
        text_follows: bool = False,
    ) -> None:
        if not self._is_open:
            return
        left_s = request.request.deadline_s
        features = request.features
        self._message.offers.add(
            request_id=request.request_id,
            features=features_message(features) if text_follows else self._features_of(request),
            priority=-request.request.priority,
            remaining_s=None if left_s is None else left_s - time.monotonic(),
            ceiling=request.ceiling or 0,
            credit_epoch=credit_epoch,
            prefix=request.prefix,
            text_follows=text_follows,
        )

    def _features_of(self, request: AdmissionRequest) -> pb.Features:
        """Computed once: sent with the offer, and again with the answer's length."""
        message = self._features.get(request.request_id)
        if message is None:
            message = features_message(request.features_with_text())
            self._features[request.request_id] = message
            if len(self._features) > MAX_FEATURES:
                self._features.popitem(last=False)
        return message
