"""The ingress's end of the token path: one connection to each worker, many requests on each.

Routes to the worker that the gate names; without a gate, to the worker with the fewest outstanding
tokens, minus its expected prefix-cache hits. A request whose worker is lost is tried once more, or
ends with a clear error.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from penstock.deployments.gate.prefix_affinity import PrefixAffinity
from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.dispatch.in_flight import InFlightRequest
from penstock.deployments.ingress.dispatch.worker_link import WorkerLink
from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.request import Delta, FinishReason
from penstock.workers.stats import WorkerInfo

DECLINED = "declined"  # the error code of a worker without room now (workers/engine/engine.py)
MAX_DECLINES = 3  # then the request waits at a worker
FIRST_GUESS_TOKENS = 128  # length of an answer, before any was seen


class AdmissionGate(Protocol):
    """Decides which requests are admitted, when and where: gate_client.GateClient, or NoGate."""

    decides: bool  # whether `admit` must be asked before a request is placed

    async def admit(
        self, admission: AdmissionRequest, epochs: Sequence[int], *, again: bool = False
    ) -> int | None: ...
    def ended(self, request_id: str, num_generated: int) -> None: ...
    def report(self, address: str, epoch: int, report: pb.Report) -> None: ...
    def lost(self, epoch: int) -> None: ...
    def release(self) -> None: ...


class NoGate:
    """Admits every request at once; the pool places it."""

    decides = False

    async def admit(
        self, admission: AdmissionRequest, epochs: Sequence[int], *, again: bool = False
    ) -> int | None:
        return None

    def ended(self, request_id: str, num_generated: int) -> None:
        """Keeps no account of requests."""

    def report(self, address: str, epoch: int, report: pb.Report) -> None:
        """Keeps no account of workers."""

    def lost(self, epoch: int) -> None:
        """Keeps no account of workers."""

    def release(self) -> None:
        """No request waits here."""


class WorkerPool:
    """All workers that this ingress knows; a TokenBackend. Lives on one event loop."""

    def __init__(self, ingress_id: str, gate: AdmissionGate | None = None):
        """Without a gate, requests go to the worker with the least to do, and wait there."""
        self._ingress_id = ingress_id
        self._gate = gate or NoGate()
        self._links: dict[int, WorkerLink] = {}  # by epoch
        self._mean_answer = float(FIRST_GUESS_TOKENS)
        self._turn = itertools.count(1)
        self._prefixes: PrefixAffinity[int] = PrefixAffinity()  # by epoch

    def update(self, workers: Iterable[WorkerInfo]) -> None:
        """Take the registry's newest list: connect with new workers.

        A worker that is no longer listed gets no new requests while others are; its stream ends
        when the worker ends it, for the registry may be wrong and the stream is not.
        """
        listed = {info.epoch: info for info in workers}
        for epoch, link in list(self._links.items()):
            link.is_listed = epoch in listed
            if link.task is not None and link.task.done():
                del self._links[epoch]
        for epoch in listed.keys() - self._links.keys():
            link = WorkerLink(listed[epoch], self._ingress_id, self)
            link.task = asyncio.ensure_future(link.run())
            self._links[epoch] = link

    def ready(self) -> bool:
        """Whether some worker would take a request now."""
        return any(link.is_connected for link in self._links.values())

    @property
    def num_connected(self) -> int:
        return sum(link.is_connected for link in self._links.values())

    async def generate(self, admission: AdmissionRequest) -> AsyncGenerator[Delta, None]:
        """Run a request on some worker. Closing the generator cancels it there.

        The last delta has a finish_reason; if the worker was lost it is ERROR with `worker_lost`,
        and ERROR with `no_worker` if there was none to begin with. Raises ServiceError if the gate
        refuses it.
        """
        request = admission.request
        answer = min(self._mean_answer, request.params.max_tokens or float("inf"))
        expected = request.num_expected or len(request.prompt_ids) + round(answer)
        call = InFlightRequest(admission, num_expected=expected)
        try:
            await self._enter(call)
            while True:
                delta = await call.next()
                if delta.error == DECLINED:
                    call.num_declined += 1
                    await self._enter(call)
                    continue
                yield delta
                if delta.finish_reason is not None:
                    if delta.finish_reason is not FinishReason.ERROR:
                        self._mean_answer += 0.02 * (call.num_emitted - self._mean_answer)
                    return
        finally:
            call.cancel()
            self._gate.ended(request.request_id, call.num_emitted)

    async def close(self) -> None:
        """Break all streams; running requests end with `worker_lost`."""
        tasks = [link.task for link in self._links.values() if link.task is not None]
        self._links.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _enter(self, call: InFlightRequest) -> None:
        """Have the gate admit `call`, which may take long, and send it to the worker it names."""
        if not self._gate.decides:
            self._place(call, otherwise="no_worker")
            return
        admission = self._limited(call.admission)
        again = call.num_declined > 0
        while links := self._usable():
            epochs = [link.info.epoch for link in self._sorted(links, admission)]
            epoch = await self._gate.admit(admission, epochs, again=again)
            if epoch is None:
                break
            link = self._links.get(epoch)
            if link is not None and link.is_connected:
                link.last_turn = next(self._turn)
                link.submit(call, may_decline=call.num_declined < MAX_DECLINES)
                return
            again = True  # a worker that this ingress cannot reach
        self._place(call, otherwise="no_worker")

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

    def _usable(self) -> list[WorkerLink]:
        links = [link for link in self._links.values() if link.is_connected]
        return [link for link in links if link.is_listed] or links

    def _place(self, call: InFlightRequest, otherwise: str) -> None:
        """Send `call` to the worker with the least outstanding work, or fail it with a code.

        Of many workers, two are drawn: reports are old, and all ingresses would choose the same.
        """
        links = self._usable()
        if not links:
            call.fail(otherwise)
            return
        if self._gate.decides and len(links) > 2:
            links = random.sample(links, 2)
        best = self._sorted(links, call.admission)[0]
        best.last_turn = next(self._turn)
        asks = call.request.may_decline and call.num_declined < MAX_DECLINES
        best.submit(call, may_decline=asks)

    def _sorted(self, links: list[WorkerLink], admission: AdmissionRequest) -> list[WorkerLink]:
        """Fewest tokens to compute first; a cached prefix of the prompt need not be computed."""
        hits = self._prefixes.hits(admission.prefix) if len(links) > 1 else {}

        def work(link: WorkerLink) -> tuple[int, int]:
            return link.num_outstanding - hits.get(link.info.epoch, 0), link.last_turn

        return sorted(links, key=work)

    def sends(self, call: InFlightRequest, link: WorkerLink) -> None:
        marks, epoch = call.admission.prefix, link.info.epoch
        self._prefixes.note(marks, epoch, call.num_expected, link.capacity)

    def broken(self, link: WorkerLink) -> None:
        self._prefixes.forget(link.info.epoch)
        self._gate.lost(link.info.epoch)
        if not self.ready():
            self._gate.release()

    def reported(self, link: WorkerLink, report: pb.Report) -> None:
        self._gate.report(link.info.address, link.info.epoch, report)

    def lost(self, call: InFlightRequest) -> None:
        """The worker of `call` is gone: try once more if nothing was emitted, else end it."""
        if call.num_emitted == 0 and not call.is_second_try:
            call.is_second_try = True
            self._place(call, otherwise="worker_lost")
        else:
            call.fail("worker_lost")
