"""The ingress's end of the token path: one connection to each worker, many requests on each.

Routes to the worker that the gate names; without a gate, to the worker with the fewest outstanding
tokens, minus its expected prefix-cache hits. Where the gate does not answer, requests that exceed
this ingress's share of the workers wait in local_queue.py. A request whose worker is lost continues
on another one: the client sees a pause, and the tokens that it would have got.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.core.call import MAX_PRIORITY
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.tracing import CONTINUED, NEW
from penstock.deployments.ingress.core.tracing import LOST as WORKER_LOST
from penstock.deployments.ingress.dispatch.admission_gate import (
    ANY_WORKER,
    AdmissionGate,
    NoGate,
    Returned,
)
from penstock.deployments.ingress.dispatch.in_flight import LOST, InFlightRequest
from penstock.deployments.ingress.dispatch.local_queue import LocalQueue
from penstock.deployments.ingress.dispatch.lost_requests import LostRequests
from penstock.deployments.ingress.dispatch.worker_link import WorkerLink
from penstock.deployments.ingress.dispatch.worker_links import WorkerLinks
from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.channel.encrypted import TlsSource
from penstock.workers.request import DECLINED, STORE_UNAVAILABLE, Delta, FinishReason
from penstock.workers.stats import WorkerInfo

log = logging.getLogger("penstock.channel")

MAX_DECLINES = 3  # then the request waits at a worker
GATE_AWAY_S = 15.0  # longest that a request waits for the gate itself, while there is no worker
RETRY_S = 0.25
FIRST_GUESS_TOKENS = 128  # length of an answer, before any was seen
LOST_WAIT_S = 30.0  # longest that a request waits for another worker after its own was lost
STORE_RETRY_S = 0.5  # before a request whose worker could not get its experts is sent again
PATIENCE_SLACK_S = 0.5  # the gate refuses what has waited too long by then, with its reasons
LIVES_S = 1.0  # a worker that lives connects again by then, after its connection broke


class WorkerPool:
    """All workers that this ingress knows; a TokenBackend. Lives on one event loop."""

    def __init__(
        self,
        ingress_id: str,
        gate: AdmissionGate | None = None,
        *,
        may_wake: bool = False,
        tokenizer_digest: str = "",
        lost_wait_s: float = LOST_WAIT_S,
        longest_wait_s: float | None = None,
        tls: TlsSource | None = None,
    ):
        """Without a gate, requests go to the worker with the least to do, and wait there.

        `may_wake`: while there is no worker, requests wait at the gate for one to be started.
        `tokenizer_digest`: requests go to workers of that one only; empty: to any.
        `lost_wait_s`: longest wait for another worker, of requests whose worker was lost.
        `longest_wait_s`: longest wait to be admitted; then a request is refused. The gate does
        that, too: here it holds while the gate does not answer. `tls`: for each connection with a
        worker; None: they are in the clear.
        """
        self.lost_requests = LostRequests()
        self._lost_wait_s, self._longest_wait_s = lost_wait_s, longest_wait_s
        self._is_closed = False
        self._gate = gate or NoGate()
        self._may_wake = may_wake and self._gate.decides
        self._workers = WorkerLinks(ingress_id, self, tokenizer_digest, tls)
        self._links = self._workers.by_epoch
        self._mean_answer = float(FIRST_GUESS_TOKENS)
        self._local = LocalQueue(self._place_with_room, lambda: self._gate.answers)

    def update(self, workers: Iterable[WorkerInfo], num_ingresses: int = 1) -> None:
        """Take the registry's newest list; see WorkerLinks.update."""
        self._workers.update(workers, num_ingresses)

    def ready(self) -> bool:
        """Whether a request would be served: a worker takes it now, or will be started for it."""
        return self._workers.has_any() or (self._may_wake and self._gate.is_connected)

    @property
    def num_connected(self) -> int:
        return self._workers.num_connected

    def has_lost(self, epoch: int) -> bool:
        """Whether the worker of that epoch was connected, and is not any more."""
        return self._workers.has_lost(epoch)

    def beat(self) -> None:
        """Send a heartbeat to each worker; from any thread, while the event loop is late."""
        for link in list(self._links.values()):
            link.beat()

    async def generate(self, admission: AdmissionRequest) -> AsyncGenerator[Delta, None]:
        """Run a request on some worker. Closing the generator cancels it there.

        The last delta has a finish_reason: ERROR with `no_worker` if there is no worker to begin
        with, and with `worker_lost` if the worker was lost and no other takes the request in time.
        Raises ServiceError if the gate refuses it, if it has waited too long for the gate (the
        worker itself drops what waits too long there), if it ended three workers, or if another
        ingress began its answer with a model that no worker has any more.
        """
        request = admission.request
        if await self.lost_requests.is_refused(admission, asyncio.get_running_loop().time()):
            raise ServiceError("request_killed_workers")
        answer = min(self._mean_answer, request.params.max_tokens or float("inf"))
        expected = len(request.prompt_ids) + round(answer)
        call = InFlightRequest(admission, num_expected=expected, computes=admission.computes)
        try:
            await self._same_model(call)
            await self._enter_in_time(call)
            while True:
                delta = await call.next()
                if delta.error == DECLINED:
                    call.num_declined += 1
                    await self._enter_again(call, "declined")
                    continue
                if delta.error == LOST:
                    call.note(WORKER_LOST)
                    await self._continue(call)
                    continue
                if delta.error == STORE_UNAVAILABLE and self._tries_again(call):
                    await asyncio.sleep(STORE_RETRY_S)
                    await self._continue(call)
                    continue
                if call.lost_s is not None:
                    call.note(CONTINUED)
                    self.lost_requests.continued(call, asyncio.get_running_loop().time())
                if call.trial is not None:
                    call.trial.passed(call)
                yield call.presented(delta)
                if delta.finish_reason is not None:
                    if delta.finish_reason is not FinishReason.ERROR and not request.embeds:
                        self._mean_answer += 0.02 * (call.num_emitted - self._mean_answer)
                    return
        finally:
            call.cancel()
            if call.trial is not None:
                call.trial.passed(call)
            self._gate.ended(request.request_id, call.num_emitted)
            self._local.place_next()

    async def close(self) -> None:
        """Break all streams; running requests end with `worker_lost`."""
        self._is_closed = True
        await self._workers.close()

    async def _same_model(self, call: InFlightRequest) -> None:
        """Where another ingress began the answer of `call`: wait for a worker that computes as
        the one before. Raises ServiceError model_changed if there is none any more."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._lost_wait_s
        while self._workers.has_any() and not self._workers.usable(call):
            if self._workers.have_changed(call) or loop.time() > until_s:
                raise ServiceError("model_changed")
            await asyncio.sleep(0.02)

    def _tries_again(self, call: InFlightRequest) -> bool:
        """Whether a request whose worker could not get its experts has time to be sent again: the
        store may be back by then, or another worker may have them."""
        now_s = asyncio.get_running_loop().time()
        call.lost_s = call.lost_s or now_s
        return now_s <= call.lost_s + self._lost_wait_s

    async def _continue(self, call: InFlightRequest) -> None:
        """Send `call`, whose worker was lost, to another worker, which continues after its tokens.

        It was admitted once: the gate may have it wait, but no refusal ends it. Raises ServiceError
        if its deadline has passed, or if it ends workers.
        """
        loop = asyncio.get_running_loop()
        call.lost_s = call.lost_s or loop.time()
        if call.is_suspect:
            await self._acquit(call)
        if call.waits_for is not None:
            await call.waits_for.is_over.wait()
            call.waits_for = None
        call.continue_after_emitted()
        if (wait_s := call.admission.longest_wait_s) is not None:
            request = replace(call.request, wait_until_s=loop.time() + wait_s)
            call.admission = replace(call.admission, request=request)
        workers = self._workers
        while not workers.usable(call) and (workers.has_any() or not self._may_wake):
            if self._is_closed or loop.time() > call.lost_s + self._lost_wait_s:
                call.fail("worker_lost")
                return
            await asyncio.sleep(0.02)
        await self._enter_again(call, "lost")

    async def _enter_again(self, call: InFlightRequest, why: Returned) -> None:
        """`_enter`. Of a request that was admitted once, only its deadline is a refusal."""
        try:
            await self._enter_in_time(call, why)
        except ServiceError as refusal:
            if refusal.code == "deadline_exceeded" or not call.request.is_continued:
                raise
            self._place(call, LOST)

    async def _acquit(self, call: InFlightRequest) -> None:
        """Wait a moment for workers of `call` that are not dead. Raises ServiceError if all are."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + LIVES_S
        while not self.lost_requests.acquit(call, self._workers.lives):
            if loop.time() > until_s:
                await self.lost_requests.refuse(call, loop.time())
                raise ServiceError("request_killed_workers")
            await asyncio.sleep(0.02)

    async def _enter_in_time(self, call: InFlightRequest, returned: Returned | None = None) -> None:
        """`_enter`; raises ServiceError deadline_exceeded or overloaded if that takes longer than
        it may."""
        if call.admission.trace is not None:
            call.admission.trace.asks(returned or NEW)
        until_s, patience_s = call.request.wait_until_s or math.inf, self._longest_wait_s
        is_new = returned is None and not call.request.is_continued
        if patience_s is None or not is_new or call.request.priority >= MAX_PRIORITY:
            patience_s = math.inf
        gives_up_s = asyncio.get_running_loop().time() + patience_s + PATIENCE_SLACK_S
        first_s = min(until_s, gives_up_s)
        try:
            async with asyncio.timeout_at(None if first_s == math.inf else first_s):
                await self._enter(call, returned)
        except TimeoutError:
            if until_s <= gives_up_s:
                raise ServiceError("deadline_exceeded") from None
            raise ServiceError(
                "overloaded",
                f"no worker took this request in {patience_s:g} s, and it may wait no longer",
                retry_after_s=self._local.retry_after_s(len(self._local)),
            ) from None

    async def _enter(self, call: InFlightRequest, returned: Returned | None = None) -> None:
        """Have the gate admit `call`, which may take long, and send it to the worker it names."""
        if not self._may_wake:
            await self._workers.replaced()
        otherwise = LOST if returned == "lost" or call.emitted else "no_worker"
        if not self._gate.decides or self._workers.is_bound(call):
            self._place(call, otherwise)
            return
        seats = contextlib.ExitStack()
        with seats:
            if await self._sent(call, returned, seats):
                return
        self._place(call, otherwise)

    async def _sent(
        self, call: InFlightRequest, returned: Returned | None, seats: contextlib.ExitStack
    ) -> bool:
        """Whether `call` was sent to a worker; False: to whichever there is, or to none.

        While the gate does not answer, `call` takes a seat in the ingress's own queue, except one
        whose worker was lost: it was admitted once.
        """
        admission = self._workers.limited(call.admission)
        loop = asyncio.get_running_loop()
        is_lost, seat = returned == "lost", None
        given_up_s = loop.time() + GATE_AWAY_S
        while (links := self._workers.usable()) or self._may_wake:
            if not links and not self._gate.is_connected and loop.time() <= given_up_s:
                await asyncio.sleep(RETRY_S)
                continue
            epochs = [link.info.epoch for link in self._workers.by_work(links, admission)]
            asked_s = loop.time()
            epoch = await self._gate.admit(admission, epochs, returned=returned)
            if loop.time() - asked_s > RETRY_S:  # the gate was there
                given_up_s = loop.time() + GATE_AWAY_S
            if epoch == ANY_WORKER:
                return False
            if epoch is None:
                if not (links or self._workers.has_any() or loop.time() > given_up_s):
                    await asyncio.sleep(RETRY_S)  # no worker, and the gate does not answer
                    continue
                if is_lost or not self._workers.usable():
                    return False
                if seat is None:
                    seat = self._local.take_seat(call)
                    seats.callback(self._local.leave, seat)
                if await self._local.turn(seat):
                    return True
                continue
            link = self._links.get(epoch) if links else await self._workers.reachable(epoch)
            if link is not None and link.takes_requests:
                if link.lacks_experts and link not in self._workers.usable():
                    return False  # the gate does not know that
                if not call.fits(link.info.computes):
                    return False  # an update has begun meanwhile; nor does it know of weights
                self._submit(call, link, may_decline=True)
                return True
            returned = "declined"  # a worker that this ingress cannot reach, or that drains
        return False

    def _place(self, call: InFlightRequest, otherwise: str) -> None:
        """Send `call` to the worker with the least outstanding work, or fail it with a code.

        Of many workers, two are drawn: reports are old, and all ingresses would choose the same.
        """
        links = self._workers.usable(call)
        if links:
            self._send_to_best(call, links)
        else:
            call.fail(otherwise)

    def _place_with_room(self, call: InFlightRequest) -> bool:
        """The same, but only to a worker of which this ingress has less than its share."""
        links = self._workers.with_room(call)
        if links:
            self._send_to_best(call, links)
        return bool(links)

    def _send_to_best(self, call: InFlightRequest, links: list[WorkerLink]) -> None:
        if self._gate.decides and len(links) > 2:
            links = random.sample(links, 2)
        best = self._workers.by_work(links, call.admission)[0]
        self._submit(call, best, may_decline=call.request.may_decline)

    def _submit(self, call: InFlightRequest, link: WorkerLink, *, may_decline: bool) -> None:
        call.computes = link.info.computes
        self._workers.note(link, call)
        if call.admission.trace is not None:
            call.admission.trace.sent(link.info.address)
        link.submit(call, may_decline=may_decline and call.num_declined < MAX_DECLINES)

    def broken(self, link: WorkerLink) -> None:
        if self.lost_requests.shared is not None and not link.is_draining:
            self.lost_requests.shared.saw_loss()
        self._workers.forget(link)
        self._gate.lost(link.info.epoch)
        if not self._workers.has_any():
            self._local.release()
            if not self._may_wake:
                self._gate.release()

    def reported(self, link: WorkerLink, report: pb.Report) -> None:
        self._gate.report(link.info.address, link.info.epoch, report)
        self._local.place_next()

    def lost(self, link: WorkerLink, calls: list[InFlightRequest]) -> None:
        """The worker of `calls` is lost: each continues on another one, if it may."""
        if not (self._is_closed or link.is_draining):
            self.lost_requests.lost(calls, link.info.epoch, has_others=link.has_others)
        for call in calls:
            call.fail("worker_lost" if self._is_closed else LOST)
