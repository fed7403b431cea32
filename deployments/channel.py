"""The ingress's end of the token path: one stream per worker, many requests on each.

Chooses the worker with the least to compute, what it has in its cache not counted; keeps the
streams alive, and turns the loss of a worker into a new try or a clear error. Knows nothing of
text, HTTP, or how workers are found.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from penstock.deployments.asked import AskedRequest
from penstock.deployments.prefix_book import PrefixBook
from penstock.deployments.running_call import Gathering, RunningCall
from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.message_link import MessageLink, connected
from penstock.workers.request import Delta, FinishReason, Request
from penstock.workers.stats import WorkerInfo
from penstock.workers.wire import delta_from, submit_message

log = logging.getLogger("penstock.channel")

TICK_S = 0.5
SILENCE_TICKS = 10  # a worker reports every second; one that says nothing for 5 s is dead
CONNECT_TIMEOUT_S = 3.0
BACKOFF_S = (0.1, 2.0)  # first and longest pause between attempts to connect
DECLINED = "declined"  # a worker's word for "no room now"; workers/engine.py says it
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
        self._links: dict[int, _WorkerLink] = {}  # by epoch
        self._mean_answer = float(FIRST_GUESS_TOKENS)
        self._turn = itertools.count(1)
        self._prefixes: PrefixBook[int] = PrefixBook()  # by epoch

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
            link = _WorkerLink(listed[epoch], self._ingress_id, self)
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

    def _usable(self) -> list[_WorkerLink]:
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

    def _sorted(self, links: list[_WorkerLink], request: Request) -> list[_WorkerLink]:
        """Least to compute first: a prompt's beginning that is cached there need not be."""
        marks = request.prefix if isinstance(request, AskedRequest) else ()
        hits = self._prefixes.hits(marks) if len(links) > 1 else {}

        def work(link: _WorkerLink) -> tuple[int, int]:
            return link.num_outstanding - hits.get(link.info.epoch, 0), link.last_turn

        return sorted(links, key=work)

    def _sends(self, call: RunningCall, link: _WorkerLink) -> None:
        if isinstance(call.request, AskedRequest):
            marks, epoch = call.request.prefix, link.info.epoch
            self._prefixes.note(marks, epoch, call.num_expected, link.capacity)

    def _broken(self, link: _WorkerLink) -> None:
        self._prefixes.forget(link.info.epoch)
        if self._door is not None:
            self._door.lost(link.info.epoch)
            if not self.ready():
                self._door.release()

    def _reported(self, link: _WorkerLink, report: pb.Report) -> None:
        if self._door is not None:
            self._door.report(link.info.address, link.info.epoch, report)

    def _lost(self, call: RunningCall) -> None:
        """The worker of `call` is gone: try once more if nothing was emitted, else end it."""
        if call.num_emitted == 0 and not call.is_second_try:
            call.is_second_try = True
            self._place(call, otherwise="worker_lost")
        else:
            call.fail("worker_lost")


class _WorkerLink:
    """The stream with one life of one worker, and the calls on it."""

    def __init__(self, info: WorkerInfo, ingress_id: str, pool: WorkerPool):
        self.info = info
        self.task: asyncio.Task[None] | None = None
        self.is_listed = True
        self.is_connected = False
        self.last_turn = 0
        self.capacity = info.max_model_len  # tokens of KV, once it reports
        self._ingress_id = ingress_id
        self._pool = pool
        self._calls: dict[int, RunningCall] = {}
        self._stream_ids = itertools.count(1)
        self._own_tokens = 0
        self._others_tokens = 0
        self._messages: MessageLink | None = None  # while there is a connection
        self._welcomed: asyncio.Future[None]
        self._ended: asyncio.Future[str]
        self._num_silent_ticks = 0
        self._gathering = Gathering(self._end_gathering)

    @property
    def num_outstanding(self) -> int:
        """Tokens that this worker has still to compute, as far as this ingress can guess."""
        return self._own_tokens + self._others_tokens

    def submit(self, call: RunningCall, *, may_decline: bool = False) -> None:
        call.link, call.stream_id = self, next(self._stream_ids)
        self._calls[call.stream_id] = call
        self._pool._sends(call, self)
        self._own_tokens += call.num_expected
        message = submit_message(
            call.request, call.stream_id, call.num_expected, may_decline=may_decline
        )
        self._send(pb.UpMessage(submit=message))

    def cancel(self, call: RunningCall) -> None:
        self._remove(call)
        message = pb.Cancel(stream_id=call.stream_id, request_id=call.request.request_id)
        self._send(pb.UpMessage(cancel=message))

    async def run(self) -> None:
        """Connect, and again after each break, until the registry no longer lists the worker."""
        backoff_s = BACKOFF_S[0]
        while self.is_listed:
            try:
                why = await self._connection()
            except (OSError, TimeoutError) as error:
                why = getattr(error, "strerror", None) or "it is silent"
            finally:
                was_connected = self.is_connected
                self._break()
            level = logging.WARNING if was_connected else logging.DEBUG
            log.log(level, "worker %s: no connection (%s)", self.info.address, why)
            if was_connected:
                backoff_s = BACKOFF_S[0]
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.5))
            backoff_s = min(2 * backoff_s, BACKOFF_S[1])

    async def _connection(self) -> str:
        """One connection, and why it ended. Raises OSError or TimeoutError."""
        loop = asyncio.get_running_loop()
        self._welcomed, self._ended = loop.create_future(), loop.create_future()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            self._messages = MessageLink(
                loop,
                await connected(self.info.address),
                on_message=self._take_message,
                on_end=self._ended.set_result,
            )
            hello = pb.Hello(ingress_id=self._ingress_id, token=self.info.token)
            self._send(pb.UpMessage(hello=hello))
            await asyncio.wait((self._welcomed, self._ended), return_when=asyncio.FIRST_COMPLETED)
        if self._ended.done():
            return self._ended.result()
        log.info("worker %s connected", self.info.address)
        watching = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait((watching, self._ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
        return self._ended.result() if self._ended.done() else "it is silent"

    def _send(self, message: pb.UpMessage) -> None:
        if self._messages is not None:
            message.epoch = self.info.epoch
            self._messages.send(message.SerializeToString())

    def _take_message(self, data: bytes) -> None:
        message = pb.DownMessage.FromString(data)
        self._num_silent_ticks = 0
        if message.epoch != self.info.epoch:
            return
        if message.HasField("step"):
            self._take_step(message.step)
        elif message.HasField("report"):
            self._others_tokens = message.report.others_tokens
            self.capacity = message.report.num_blocks * message.report.block_size
            self._pool._reported(self, message.report)
        elif message.HasField("welcome"):
            # At once, and not when a task hears of it: what comes behind it counts.
            self.is_connected = True
            if not self._welcomed.done():
                self._welcomed.set_result(None)
        elif message.HasField("rejection") and self._messages is not None:
            self._messages.end(message.rejection.reason)

    async def _watch(self) -> None:
        # Counts turns of this loop, not seconds: if it was this process that stood still, the
        # worker has had no chance to be heard.
        while self._num_silent_ticks < SILENCE_TICKS:
            self._num_silent_ticks += 1
            self._send(pb.UpMessage())  # this ingress lives
            await asyncio.sleep(TICK_S)

    def _take_step(self, step: pb.Step) -> None:
        now_s = asyncio.get_running_loop().time()
        self._gathering.steps(now_s)
        for message in step.deltas:
            call = self._calls.get(message.stream_id)
            if call is not None:  # else it was cancelled meanwhile
                delta = delta_from(message, call.request.request_id)
                delta.engine = self.info.address
                self._take(call, delta, now_s)
        for stream_id, token_id in zip(step.stream_ids, step.token_ids, strict=True):
            call = self._calls.get(stream_id)
            if call is not None:
                self._take(call, Delta(call.request.request_id, [token_id]), now_s)

    def _take(self, call: RunningCall, delta: Delta, now_s: float) -> None:
        is_first = call.num_emitted == 0
        computed = len(delta.token_ids)
        if is_first:
            computed += len(call.request.prompt_ids)
        computed = min(computed, call.num_expected)
        call.num_expected -= computed
        self._own_tokens -= computed
        call.num_emitted += len(delta.token_ids)
        call.add(delta)
        if delta.finish_reason is not None:
            self._remove(call)
            call.tell(now_s)
        elif is_first or not self._gathering.holds(call, len(self._calls), now_s):
            call.tell(now_s)

    def _end_gathering(self, now_s: float) -> None:
        for call in self._calls.values():
            if call.pending:
                call.tell(now_s)

    def _remove(self, call: RunningCall) -> None:
        call.link = None
        if self._calls.pop(call.stream_id, None) is not None:
            self._own_tokens -= call.num_expected

    def _break(self) -> None:
        """The stream is gone, and with it all that was on it."""
        self.is_connected = False
        if self._messages is not None:
            self._messages.end("this end closes it")
            self._messages = None
        self._others_tokens = 0
        calls = list(self._calls.values())
        for call in calls:
            self._remove(call)
        self._pool._broken(self)
        for call in calls:
            self._pool._lost(call)
