"""What an ingress has to tell the gate, gathered: a message costs more than what is in it.

What somebody waits for goes at once; news that can wait goes with it, or a moment later. Knows
nothing of streams, or of what the gate answers.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from penstock.deployments.gate.wire import features_message
from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.protos.penstock.internal.v1 import channel_pb2
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb

GATHER_S = 0.01  # how long news may wait
REPORT_GATHER_S = 0.02
TEXT_S = 0.05  # to the texts of those that came in: the first step goes before the books
MAX_FEATURES = 4096


class GateOutbox:
    """The message that is being made. Lives on one event loop.

    Between streams only reports are kept: the next gate begins with what workers run.
    """

    def __init__(self, ingress_id: str) -> None:
        self._ingress_id = ingress_id
        self._is_open = False
        self._message = pb.FromIngress()
        self._number = 0
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._report_timer: asyncio.TimerHandle | None = None
        self._credited: list[tuple[AdmissionRequest, int]] = []  # not yet sent
        self._unread: list[tuple[AdmissionRequest, int]] = []  # text features not yet sent
        self._reports: dict[int, pb.WorkerReport] = {}  # newest, by epoch
        self._fresh: set[int] = set()  # epochs of which the gate has not the newest
        self._features: OrderedDict[str, pb.Features] = OrderedDict()

    @property
    def next_number(self) -> int:
        """Of the message that will tell what is told now."""
        return self._number + 1

    def begin(self) -> None:
        """A new stream: its first message is who this is, and what all workers run."""
        self._message, self._number = pb.FromIngress(ingress_id=self._ingress_id), 0
        self._fresh = set(self._reports)
        self._add_reports()

    def open(self) -> None:
        """The gate has answered: from now on it is told."""
        self._is_open = True

    def close(self) -> None:
        """The gate is gone."""
        self._is_open = False

    async def due(self) -> None:
        """Until there is something to send."""
        await self._due.wait()

    def take(self) -> pb.FromIngress:
        """The message as it is; the next one is begun."""
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
        """It came in with a pass. Nothing is made of it before the request itself has gone."""
        self._credited.append((request, epoch))
        self._go_soon()

    def ask(
        self, request: AdmissionRequest, *, text_follows: bool = False, declined: bool = False
    ) -> None:
        """May it come in? `declined`: a worker sent it back."""
        self._offer_credited()  # before this one: it must be judged beside them
        if declined:
            self._message.declined.append(request.request_id)
        self._offer(request, text_follows=text_follows)
        self._due.set()

    def read_text(self, request: AdmissionRequest) -> None:
        """Make now what is told of its text."""
        self._features_of(request)

    def tell_text(self, request: AdmissionRequest, epoch: int) -> None:
        """It is in; what its text says follows."""
        self._unread.append((request, epoch))
        if len(self._unread) == 1:
            asyncio.get_running_loop().call_later(TEXT_S, self._tell_texts)

    def ended(self, request_id: str, num_generated: int, *, is_awaited: bool) -> None:
        """A request is over. `is_awaited`: somebody may wait for its memory."""
        self._offer_credited()  # an end behind its beginning
        self._tell_texts()
        if self._is_open:
            self._message.ended.add(request_id=request_id, generated=num_generated)
            self._due.set() if is_awaited else self._go_soon()

    def learn(self, request: AdmissionRequest, length: int, ended: str) -> None:
        """How long an answer was, and why: "stop", "length" or "cancel"."""
        if self._is_open:
            features = self._features_of(request)
            self._message.labels.add(
                features=features, length=length, ended=ended, request_id=request.request_id
            )
            self._features.pop(request.request_id, None)
            self._go_soon()

    def report(self, address: str, epoch: int, report: channel_pb2.Report) -> None:
        """What a worker has said of itself."""
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
            self.tell_text(request, epoch)

    def _tell_texts(self) -> None:
        unread, self._unread = self._unread, []
        for request, epoch in unread:
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
        """Made once: they are told with the offer, and again with the answer's length."""
        message = self._features.get(request.request_id)
        if message is None:
            message = features_message(request.features_with_text())
            self._features[request.request_id] = message
            if len(self._features) > MAX_FEATURES:
                self._features.popitem(last=False)
        return message
