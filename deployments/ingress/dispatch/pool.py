"""The ingress's end of the token path: one connection per worker, many requests on each.

Chooses the worker with the least to compute, what it has in its cache not counted, and turns the
loss of a worker into a new try or a clear error. Knows nothing of text, HTTP, or how workers are
found; each connection is kept by a WorkerLink.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from penstock.deployments.gate.prefix_affinity import PrefixAffinity
from penstock.deployments.ingress.core.admission_request import AskedRequest
from penstock.deployments.ingress.dispatch.in_flight import RunningCall
from penstock.deployments.ingress.dispatch.worker_link import WorkerLink
from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.request import Delta, FinishReason, Request
from penstock.workers.stats import WorkerInfo

DECLINED = "declined"  # a worker's word for "no room now"; workers/engine/engine.py says it
MAX_DECLINES = 3  # after so many, a request waits at a worker
FIRST_GUESS_TOKENS = 128  # length of an answer, before any was seen


class Door(Protocol):
    """Who decides which requests come in, when and where: gate_client.GateClient."""

    async def admit(
        self, request: AskedRequest, epochs: Sequence[int], *, again: bool = False
    ) -> int | None: ...
    def ended(self, request_id: str, num_generated: int) -> None: ...
    def report(self, address: str, epoch: int, report: pb.Report) -> None: ...
    def lost(self, epoch: int) -> None: ...
    def release(self) -> None: ...


class WorkerPool:
    """All workers that this ingress knows; a TokenBackend. Lives on one event loop."""

    def __init__(self, ingress_id: str, door: Door | None = None):
        """Without a door, requests go to the worker with the least to do, and wait there."""
        self._ingress_id = ingress_id
        self._door = door
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

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        """Run `request` on some worker. Closing the iterator cancels it there.

        The last delta has a finish_reason; if the worker was lost it is ERROR with `worker_lost`,
        and ERROR with `no_worker` if there was none to begin with. Raises ServiceError if the door
        does not let it in.
        """
        answer = min(self._mean_answer, request.params.max_tokens or float("inf"))
        call = RunningCall(request, num_expected=len(request.prompt_ids) + round(answer))
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
            if call.link is not None:
                call.link.cancel(call)
            if self._door is not None and isinstance(request, AskedRequest):
                self._door.ended(request.request_id, call.num_emitted)

    async def close(self) -> None:
        """Break all streams; requests under way end with `worker_lost`."""
        tasks = [link.task for link in self._links.values() if link.task is not None]
        self._links.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _enter(self, call: RunningCall) -> None:
        """Through the door, if there is one, to a worker; may wait there for long."""
        request = call.request
        if self._door is None or not isinstance(request, AskedRequest):
            self._place(call, otherwise="no_worker")
            return
        request = self._limited(request)
        again = call.num_declined > 0
        while links := self._usable():
            epochs = [link.info.epoch for link in self._sorted(links, request)]
            epoch = await self._door.admit(request, epochs, again=again)
            if epoch is None:
                break
            link = self._links.get(epoch)
            if link is not None and link.is_connected:
                link.last_turn = next(self._turn)
                link.submit(call, may_decline=call.num_declined < MAX_DECLINES)
                return
            again = True  # a worker that this ingress cannot reach
        self._place(call, otherwise="no_worker")

    def _limited(self, request: AskedRequest) -> AskedRequest:
        """Where the client set no limit, it is what workers have room for."""
        if request.has_limit or request.ceiling is not None or not self._links:
            return request
        longest = max(link.info.max_model_len for link in self._links.values())
        limit = max(longest - len(request.prompt_ids), 1)
        if request.features.max_tokens is not None:
            limit = min(limit, request.features.max_tokens)
        return replace(request, features=replace(request.features, max_tokens=limit))

    def _usable(self) -> list[WorkerLink]:
        links = [link for link in self._links.values() if link.is_connected]
        return [link for link in links if link.is_listed] or links

    def _place(self, call: RunningCall, otherwise: str) -> None:
        """Send `call` to the worker with the least outstanding work, or fail it with a code.

        Of many workers, two are drawn: reports are old, and all ingresses would choose the same.
        """
        links = self._usable()
        if not links:
            call.fail(otherwise)
            return
        if self._door is not None and len(links) > 2:
            links = random.sample(links, 2)
        best = self._sorted(links, call.request)[0]
        best.last_turn = next(self._turn)
        best.submit(call)

    def _sorted(self, links: list[WorkerLink], request: Request) -> list[WorkerLink]:
        """Least to compute first: a prompt's beginning that is cached there need not be."""
        marks = request.prefix if isinstance(request, AskedRequest) else ()
        hits = self._prefixes.hits(marks) if len(links) > 1 else {}

        def work(link: WorkerLink) -> tuple[int, int]:
            return link.num_outstanding - hits.get(link.info.epoch, 0), link.last_turn

        return sorted(links, key=work)

    def sends(self, call: RunningCall, link: WorkerLink) -> None:
        if isinstance(call.request, AskedRequest):
            marks, epoch = call.request.prefix, link.info.epoch
            self._prefixes.note(marks, epoch, call.num_expected, link.capacity)

    def broken(self, link: WorkerLink) -> None:
        self._prefixes.forget(link.info.epoch)
        if self._door is not None:
            self._door.lost(link.info.epoch)
            if not self.ready():
                self._door.release()

    def reported(self, link: WorkerLink, report: pb.Report) -> None:
        if self._door is not None:
            self._door.report(link.info.address, link.info.epoch, report)

    def lost(self, call: RunningCall) -> None:
        """The worker of `call` is gone: try once more if nothing was emitted, else end it."""
        if call.num_emitted == 0 and not call.is_second_try:
            call.is_second_try = True
            self._place(call, otherwise="worker_lost")
        else:
            call.fail("worker_lost")
