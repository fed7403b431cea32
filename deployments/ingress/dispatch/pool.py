"""The ingress's end of the token path: one connection to each worker, many requests on each.

Routes to the worker that the gate names; without a gate, to the worker with the fewest outstanding
tokens, minus its expected prefix-cache hits. A request whose worker is lost continues on another
one: the client sees a pause, and the tokens that it would have got.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace

from penstock.deployments.gate.forecast.prefix_affinity import PrefixAffinity
from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.dispatch.admission_gate import AdmissionGate, NoGate, Returned
from penstock.deployments.ingress.dispatch.in_flight import LOST, InFlightRequest
from penstock.deployments.ingress.dispatch.lost_requests import LostRequests
from penstock.deployments.ingress.dispatch.worker_link import WorkerLink
from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.request import DECLINED, Delta, FinishReason
from penstock.workers.stats import WorkerInfo

log = logging.getLogger("penstock.channel")

REPLACED_S = 2.0  # a worker that replaces a draining one is listed and connected by then
MAX_DECLINES = 3  # then the request waits at a worker
GATE_AWAY_S = 15.0  # longest that a request waits for the gate itself, while there is no worker
RETRY_S = 0.25
REACH_S = 1.0  # longest from a ticket to the connection with its worker, if that has just started
FIRST_GUESS_TOKENS = 128  # length of an answer, before any was seen
LOST_WAIT_S = 30.0  # longest that a request waits for another worker after its own was lost
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
    ):
        """Without a gate, requests go to the worker with the least to do, and wait there.

        `may_wake`: while there is no worker, requests wait at the gate for one to be started.
        `tokenizer_digest`: requests go to workers of that one only; empty: to any.
        `lost_wait_s`: longest wait for another worker, of requests whose worker was lost.
        """
        self.lost_requests = LostRequests()
        self._lost_wait_s = lost_wait_s
        self._is_closed = False
        self._tokenizer_digest = tokenizer_digest
        self._foreign: set[int] = set()  # epochs that have another tokenizer
        self._ingress_id = ingress_id
        self._gate = gate or NoGate()
        self._may_wake = may_wake and self._gate.decides
        self._drained_s = float("-inf")  # when a worker was last seen to drain
        self._links: dict[int, WorkerLink] = {}  # by epoch
        self._mean_answer = float(FIRST_GUESS_TOKENS)
        self._turn = itertools.count(1)
        self._prefixes: PrefixAffinity[int] = PrefixAffinity()  # by epoch

    def update(self, workers: Iterable[WorkerInfo]) -> None:
        """Take the registry's newest list: connect with new workers.

        A worker that is no longer listed gets no new requests while others are; its stream ends
        when the worker ends it, for the registry may be wrong and the stream is not. One that
        drains gets none at all.
        """
        listed = {info.epoch: info for info in workers}
        for epoch, link in list(self._links.items()):
            link.is_listed = epoch in listed
            if link.is_listed and listed[epoch].is_draining:
                link.is_draining = True
            if link.is_draining:
                self._drained_s = asyncio.get_running_loop().time()
            if link.task is not None and link.task.done():
                del self._links[epoch]
        for epoch in listed.keys() - self._links.keys():
            if listed[epoch].is_draining:  # nothing of this ingress runs there
                continue
            if self._is_foreign(listed[epoch]):
                continue
            link = WorkerLink(listed[epoch], self._ingress_id, self)
            link.task = asyncio.ensure_future(link.run())
            self._links[epoch] = link

    def _is_foreign(self, info: WorkerInfo) -> bool:
        """Whether token ids mean something else to that worker."""
        own, its = self._tokenizer_digest, info.tokenizer_digest
        if not own or not its or own == its:
            return False
        if info.epoch not in self._foreign:
            self._foreign.add(info.epoch)
            log.warning(
                "worker %s has another tokenizer than this ingress (digest %s, not %s): it gets no "
                "requests from here. In an update this passes; else compare the model's files",
                info.address,
                its,
                own,
            )
        return True

    def ready(self) -> bool:
        """Whether a request would be served: a worker takes it now, or will be started for it."""
        return self._has_worker() or (self._may_wake and self._gate.is_connected)

    def _has_worker(self) -> bool:
        return any(link.takes_requests for link in self._links.values())

    @property
    def num_connected(self) -> int:
        return sum(link.is_connected for link in self._links.values())

    async def generate(self, admission: AdmissionRequest) -> AsyncGenerator[Delta, None]:
        """Run a request on some worker. Closing the generator cancels it there.

        The last delta has a finish_reason: ERROR with `no_worker` if there is no worker to begin
        with, and with `worker_lost` if the worker was lost and no other takes the request in time.
        Raises ServiceError if the gate refuses it, or if it ended three workers.
        """
        request = admission.request
        if self.lost_requests.is_refused(admission, asyncio.get_running_loop().time()):
            raise ServiceError("request_killed_workers")
        answer = min(self._mean_answer, request.params.max_tokens or float("inf"))
        expected = request.num_expected or len(request.prompt_ids) + round(answer)
        call = InFlightRequest(admission, num_expected=expected)
        try:
            await self._enter(call)
            while True:
                delta = await call.next()
                if delta.error == DECLINED:
                    call.num_declined += 1
                    await self._enter(call, "declined")
                    continue
                if delta.error == LOST:
                    await self._continue(call)
                    continue
                if call.lost_s is not None:
                    self.lost_requests.continued(call, asyncio.get_running_loop().time())
                if call.trial is not None:
                    call.trial.passed(call)
                yield call.presented(delta)
                if delta.finish_reason is not None:
                    if delta.finish_reason is not FinishReason.ERROR:
                        self._mean_answer += 0.02 * (call.num_emitted - self._mean_answer)
                    return
        finally:
            call.cancel()
            if call.trial is not None:
                call.trial.passed(call)
            self._gate.ended(request.request_id, call.num_emitted)

    async def close(self) -> None:
        """Break all streams; running requests end with `worker_lost`."""
        self._is_closed = True
        tasks = [link.task for link in self._links.values() if link.task is not None]
        self._links.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
        while not self._usable(call) and (self._has_worker() or not self._may_wake):
            if self._is_closed or loop.time() > call.lost_s + self._lost_wait_s:
                call.fail("worker_lost")
                return
            await asyncio.sleep(0.02)
        try:
            await self._enter(call, "lost")
        except ServiceError as refusal:
            if refusal.code == "deadline_exceeded":
                raise
            self._place(call, LOST)

    async def _acquit(self, call: InFlightRequest) -> None:
        """Wait a moment for workers of `call` that are not dead. Raises ServiceError if all are."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + LIVES_S
        while not self.lost_requests.acquit(call, self._lives):
            if loop.time() > until_s:
                self.lost_requests.refuse(call, loop.time())
                raise ServiceError("request_killed_workers")
            await asyncio.sleep(0.02)

    def _lives(self, epoch: int) -> bool:
        link = self._links.get(epoch)
        return link is not None and link.is_connected

    async def _enter(self, call: InFlightRequest, returned: Returned | None = None) -> None:
        """Have the gate admit `call`, which may take long, and send it to the worker it names."""
        await self._replaced()
        otherwise = LOST if returned == "lost" or call.emitted else "no_worker"
        if not self._gate.decides or self._is_bound(call):
            self._place(call, otherwise)
            return
        admission = self._limited(call.admission)
        loop = asyncio.get_running_loop()
        given_up_s = loop.time() + GATE_AWAY_S
        while (links := self._usable()) or self._may_wake:
            if not links and not self._gate.is_connected and loop.time() <= given_up_s:
                await asyncio.sleep(RETRY_S)
                continue
            epochs = [link.info.epoch for link in self._sorted(links, admission)]
            asked_s = loop.time()
            epoch = await self._gate.admit(admission, epochs, returned=returned)
            if loop.time() - asked_s > RETRY_S:  # the gate was there
                given_up_s = loop.time() + GATE_AWAY_S
            if epoch is None:
                if links or self._has_worker() or loop.time() > given_up_s:
                    break
                await asyncio.sleep(RETRY_S)  # no worker, and the gate does not answer
                continue
            link = self._links.get(epoch) if links else await self._reachable(epoch)
            if link is not None and link.takes_requests:
                if call.fits(link.info.computes):
                    self._submit(call, link, may_decline=True)
                    return
                break  # an update has begun meanwhile, and the gate knows nothing of weights
            returned = "declined"  # a worker that this ingress cannot reach, or that drains
        self._place(call, otherwise)

    async def _replaced(self) -> None:
        """Where all workers drain, wait a moment for one that takes requests.

        In a rolling update, the worker that replaces the last old one is known a moment later.
        """
        loop = asyncio.get_running_loop()
        if self._usable() or self._may_wake:
            return
        is_draining = any(link.is_draining for link in self._links.values())
        if not is_draining and loop.time() > self._drained_s + REPLACED_S:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPLACED_S):
                while not self._usable():
                    await asyncio.sleep(0.02)

    async def _reachable(self, epoch: int) -> WorkerLink | None:
        """The connection with a worker that the gate knew first, once there is one."""
        for _ in range(round(REACH_S / 0.02)):
            link = self._links.get(epoch)
            if link is not None and link.takes_requests:
                return link
            await asyncio.sleep(0.02)
        return None

    def _limited(self, admission: AdmissionRequest) -> AdmissionRequest:
        """Where the client set no limit, the limit is what the longest worker has room for."""
        if admission.has_limit or admission.ceiling is not None or not self._links:
            return admission
        longest = max(link.info.max_model_len for link in self._links.values())
        limit = max(longest - len(admission.request.prompt_ids), 1)
        features = admission.features
        if features.max_tokens is not None:
            limit = min(limit, features.max_tokens)
        return replace(admission, features=replace(features, max_tokens=limit))

    def _usable(self, call: InFlightRequest | None = None) -> list[WorkerLink]:
        """Workers that take requests; of other weights than `call` has begun with, none."""
        links = [link for link in self._links.values() if link.takes_requests]
        if call is not None:
            links = [link for link in links if call.fits(link.info.computes)]
        return [link for link in links if link.is_listed] or links

    def _is_bound(self, call: InFlightRequest) -> bool:
        """Whether `call` may go to some workers only, as others would change its answer."""
        return any(
            link.takes_requests and not call.fits(link.info.computes)
            for link in self._links.values()
        )

    def _place(self, call: InFlightRequest, otherwise: str) -> None:
        """Send `call` to the worker with the least outstanding work, or fail it with a code.

        Of many workers, two are drawn: reports are old, and all ingresses would choose the same.
        """
        links = self._usable(call)
        if not links:
            call.fail(otherwise)
            return
        if self._gate.decides and len(links) > 2:
            links = random.sample(links, 2)
        best = self._sorted(links, call.admission)[0]
        self._submit(call, best, may_decline=call.request.may_decline)

    def _submit(self, call: InFlightRequest, link: WorkerLink, *, may_decline: bool) -> None:
        """Send `call` to the worker of `link`, which gets the prefix of its prompt."""
        link.last_turn = next(self._turn)
        epoch, call.computes = link.info.epoch, link.info.computes
        self._prefixes.note(call.admission.prefix, epoch, call.num_expected, link.capacity)
        link.submit(call, may_decline=may_decline and call.num_declined < MAX_DECLINES)

    def _sorted(self, links: list[WorkerLink], admission: AdmissionRequest) -> list[WorkerLink]:
        """Fewest tokens to compute first; a cached prefix of the prompt need not be computed."""
        hits = self._prefixes.hits(admission.prefix) if len(links) > 1 else {}

        def work(link: WorkerLink) -> tuple[int, int]:
            return link.num_outstanding - hits.get(link.info.epoch, 0), link.last_turn

        return sorted(links, key=work)

    def broken(self, link: WorkerLink) -> None:
        self._prefixes.forget(link.info.epoch)
        self._gate.lost(link.info.epoch)
        if not self._has_worker() and not self._may_wake:
            self._gate.release()

    def reported(self, link: WorkerLink, report: pb.Report) -> None:
        self._gate.report(link.info.address, link.info.epoch, report)

    def lost(self, link: WorkerLink, calls: list[InFlightRequest]) -> None:
        """The worker of `calls` is lost: each continues on another one, if it may."""
        if not (self._is_closed or link.is_draining):
            self.lost_requests.lost(calls, link.info.epoch, has_others=link.has_others)
        for call in calls:
            call.fail("worker_lost" if self._is_closed else LOST)
