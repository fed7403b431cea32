"""The ingress's end of the gate: asks who may come in, and never waits for a gate that is away.

Requests come in with a pass, which the gate hands out while there is room whatever happens; or they
ask, and wait. No first answer within `answer_s`, or a broken stream, sends a request the old way:
to the worker with the least to do, whose own queue it then waits in. Three faults in a row open the
breaker. Knows nothing of how the gate decides, or of how workers are reached.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from penstock.deployments.asked import AskedRequest
from penstock.deployments.breaker import Breaker
from penstock.deployments.errors import ServiceError
from penstock.deployments.gate_outbox import GateOutbox
from penstock.deployments.gate_wire import features_message
from penstock.deployments.passes import Passes
from penstock.protos.penstock.internal.v1 import channel_pb2, gate_pb2_grpc
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb
from penstock.workers.histogram import Histogram

log = logging.getLogger("penstock.gate")

TOKEN_KEY = "penstock-gate-token"
ANSWER_S = 0.02
SILENCE_TICKS = (
    5  # the gate speaks four times a second: so many quarters of silence, and it is gone
)
TICK_S = 0.25
REPORT_GATHER_S = 0.02
TEXT_S = 0.05  # to the texts of those that came in: the first step goes before the books
CONNECT_TIMEOUT_S = 3.0
BACKOFF_S = (0.1, 1.0)
WAIT_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
MAX_FEATURES = 4096
NEVER_FITS = "never_fits"
OVER_SHARE = "displaced"


@dataclass(frozen=True, slots=True)
class GateAddress:
    """Where one life of the gate listens, and the key to it."""

    address: str
    token: str
    pid: int


@dataclass(slots=True, eq=False)
class _Asking:
    """A request at the gate."""

    answered: asyncio.Event = field(default_factory=asyncio.Event)  # anything at all was said
    decided: asyncio.Future[int | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def decide(self, epoch: int | None) -> None:
        self.answered.set()
        if not self.decided.done():
            self.decided.set_result(epoch)

    def refuse(self, error: ServiceError) -> None:
        self.answered.set()
        if not self.decided.done():
            self.decided.set_exception(error)


class GateClient:
    """The gate as this ingress sees it. Lives on one event loop."""

    def __init__(
        self,
        ingress_id: str,
        where: Callable[[], Awaitable[GateAddress]],
        *,
        answer_s: float = ANSWER_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.breaker = Breaker()
        self.figures = pb.Figures()  # as the gate last told
        self.waits = Histogram(WAIT_BOUNDS)  # seconds, of those that asked and came in
        self.num_passed = self.num_asked = self.num_ticketed = self.num_fallback = 0
        self._ingress_id = ingress_id
        self._where = where
        self._answer_s = answer_s
        self._clock = clock
        self._asking: dict[str, _Asking] = {}
        self._entered: list[tuple[AskedRequest, int]] = []  # with a pass; the gate is to be told
        self._unread: list[tuple[AskedRequest, int]] = []  # came in; what the text says is to come
        self._reports: dict[int, pb.WorkerReport] = {}  # newest, by epoch
        self._fresh: set[int] = set()  # epochs of which the gate has not the newest
        self._features: OrderedDict[str, pb.Features] = OrderedDict()
        self._passes = Passes()
        self._outbox = GateOutbox()
        self._due: asyncio.TimerHandle | None = None
        self._is_connected = False
        self._num_silent_ticks = 0
        self._address: GateAddress | None = None

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    @property
    def breaker_state(self) -> str:
        return self.breaker.state(self._clock())

    @property
    def num_waiting(self) -> int:
        """Requests of this ingress that wait at the gate."""
        return len(self._asking)

    async def admit(
        self, request: AskedRequest, epochs: Sequence[int], *, again: bool = False
    ) -> int | None:
        """The epoch of the worker that has room; waits for it. None: choose one yourself.

        `epochs`: the workers to choose from, best first. `again`: a worker sent it back. Raises
        ServiceError if it may not come in. Tell `ended` in any case, also after a cancellation.
        """
        now = self._clock()
        if not self._is_connected or not self.breaker.allows(now):
            self.num_fallback += 1
            return None
        epoch: int | None
        if not again and (epoch := self._pass(request, epochs, now)) is not None:
            self.num_passed += 1
            self._entered.append((request, epoch))  # told after the request itself has gone
            self._outbox.soon()
            return epoch
        self.num_asked += 1
        self._tell_entered()  # before this one: it must be judged beside them
        asking = self._asking[request.request_id] = _Asking()
        if again:
            self._outbox.message.declined.append(request.request_id)
        try:
            if not await self._ask(request, asking, again):
                self.breaker.fault(self._clock())
                self.num_fallback += 1
                self.ended(request.request_id, 0)
                return None
            epoch = await asking.decided
        finally:
            del self._asking[request.request_id]
        if epoch is None:
            self.num_fallback += 1
        else:
            self.num_ticketed += 1
            self.waits.observe(self._clock() - now)
        return epoch

    def ended(self, request_id: str, num_generated: int) -> None:
        """A request is over, whatever became of it: its memory is free."""
        self._tell_entered()  # an end behind its beginning
        self._tell_texts()
        if self._is_connected:
            self._outbox.message.ended.add(request_id=request_id, generated=num_generated)
            self._news()

    def learn(self, request: AskedRequest, length: int, ended: str) -> None:
        """How long an answer was, and why: "stop", "length" or "cancel"."""
        if self._is_connected:
            features = self._features_of(request)
            self._outbox.message.labels.add(
                features=features, length=length, ended=ended, request_id=request.request_id
            )
            self._features.pop(request.request_id, None)
            self._outbox.soon()

    def report(self, address: str, epoch: int, report: channel_pb2.Report) -> None:
        """What a worker has said of itself: handed on."""
        self._reports[epoch] = pb.WorkerReport(address=address, epoch=epoch, report=report)
        self._fresh.add(epoch)
        if self._is_connected and self._due is None:
            loop = asyncio.get_running_loop()
            self._due = loop.call_later(REPORT_GATHER_S, self._send_reports)

    def lost(self, epoch: int) -> None:
        """A worker is no longer connected."""
        self._reports.pop(epoch, None)
        self._passes.drop(epoch)

    def release(self) -> None:
        """Nobody waits at the gate any more: all that did go their own way."""
        for asking in self._asking.values():
            asking.decide(None)

    async def explain(self, limit: int) -> pb.ExplainResponse | None:
        """Who waits, and why; None while the gate is away."""
        if self._address is None or not self._is_connected:
            return None
        try:
            response: pb.ExplainResponse = await self._stub.Explain(
                pb.ExplainRequest(limit=limit), metadata=self._metadata(), timeout=1.0
            )
        except grpc.aio.AioRpcError:
            return None
        except asyncio.CancelledError:  # also gRPC's word for a channel that was closed meanwhile
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return None
        return response

    async def run(self) -> None:
        """Connect, and again after each break, for ever."""
        backoff_s = BACKOFF_S[0]
        while True:
            try:
                self._address = await self._where()
                async with grpc.aio.insecure_channel(
                    self._address.address, options=OPTIONS
                ) as channel:
                    self._stub = gate_pb2_grpc.GateStub(channel)
                    await self._serve_stream()
            except asyncio.CancelledError:
                raise
            except Exception as error:  # Ray's, gRPC's, or time: all mean that it is away
                level = logging.WARNING if self._is_connected else logging.DEBUG
                log.log(level, "the gate is away (%s): requests go without it", _kind(error))
            if self._is_connected:
                backoff_s = BACKOFF_S[0]
            self._break()
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.5))
            backoff_s = min(2 * backoff_s, BACKOFF_S[1])

    def _pass(self, request: AskedRequest, epochs: Sequence[int], now: float) -> int | None:
        return self._passes.take(request, epochs, self._outbox.next_number, now)

    def _features_of(self, request: AskedRequest) -> pb.Features:
        """Made once: they are told with the offer, and again with the answer's length."""
        message = self._features.get(request.request_id)
        if message is None:
            message = features_message(request.features_with_text())
            self._features[request.request_id] = message
            if len(self._features) > MAX_FEATURES:
                self._features.popitem(last=False)
        return message

    async def _ask(self, request: AskedRequest, asking: _Asking, again: bool) -> bool:
        """Whether the gate says a word in time.

        Where it had room when it last told, there may be some for this one, whatever its text says:
        it is asked without, and the text is read while it answers.
        """
        if self._passes.has_any and not again:
            self._offer(request, text_follows=True)
            await asyncio.sleep(0)  # it goes out
            self._features_of(request)
            if not await self._hears(asking):
                return False
            if asking.decided.done():
                if not asking.decided.exception() and (epoch := asking.decided.result()):
                    self._tell_text(request, epoch)
                return True
            asking.answered.clear()
        self._offer(request)
        return await self._hears(asking)

    async def _hears(self, asking: _Asking) -> bool:
        """Whether the gate says a word in time."""
        try:
            async with asyncio.timeout(self._answer_s):
                await asking.answered.wait()
        except TimeoutError:
            return False
        return True

    def _tell_entered(self) -> None:
        entered, self._entered = self._entered, []
        for request, epoch in entered:
            self._offer(request, epoch, text_follows=True)
            self._tell_text(request, epoch)

    def _tell_text(self, request: AskedRequest, epoch: int) -> None:
        """Soon."""
        self._unread.append((request, epoch))
        if len(self._unread) == 1:
            asyncio.get_running_loop().call_later(TEXT_S, self._tell_texts)

    def _tell_texts(self) -> None:
        unread, self._unread = self._unread, []
        for request, epoch in unread:
            self._offer(request, epoch)

    def _offer(
        self, request: AskedRequest, entered: int | None = None, *, text_follows: bool = False
    ) -> None:
        if not self._is_connected:
            return
        left_s = request.deadline_s
        features = request.features
        self._outbox.message.offers.add(
            request_id=request.request_id,
            features=features_message(features) if text_follows else self._features_of(request),
            priority=-request.priority,
            remaining_s=None if left_s is None else left_s - time.monotonic(),
            ceiling=request.ceiling or 0,
            entered=entered,
            prefix=request.prefix,
            text_follows=text_follows,
        )
        if entered is None:
            self._outbox.now()
        else:
            self._outbox.soon()

    def _news(self) -> None:
        """Memory is free: for somebody who waits, or of use when somebody does."""
        if self._asking or self.figures.num_waiting or not self._passes.has_any:
            self._outbox.now()
        else:
            self._outbox.soon()

    async def _serve_stream(self) -> None:
        stream = self._stub.Connect(metadata=self._metadata())
        self._outbox.begin(self._ingress_id)
        self._fresh = set(self._reports)
        self._send_reports()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await stream.write(self._outbox.take())
            first = await stream.read()
        if first is grpc.aio.EOF:
            return
        self._num_silent_ticks, self._is_connected = 0, True
        self.breaker.success()
        self._take(first)
        log.info("the gate is there")
        ends = [
            asyncio.ensure_future(self._read(stream)),
            asyncio.ensure_future(self._write(stream)),
            asyncio.ensure_future(self._watch()),
        ]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in done:
                end.result()
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def _read(self, stream: Any) -> None:
        while (message := await stream.read()) is not grpc.aio.EOF:
            self._num_silent_ticks = 0
            self._take(message)

    async def _write(self, stream: Any) -> None:
        while True:
            await self._outbox.due()
            self._tell_entered()
            await stream.write(self._outbox.take())

    async def _watch(self) -> None:
        # Turns of this loop, not seconds: if it was this process that stood still, the gate has
        # had no chance to be heard.
        while self._num_silent_ticks < SILENCE_TICKS:
            self._num_silent_ticks += 1
            await asyncio.sleep(TICK_S)
        raise TimeoutError

    def _take(self, message: pb.ToIngress) -> None:
        if message.HasField("passes"):
            told = message.passes
            given = dict(zip(told.epochs, zip(told.tokens, told.slots)))
            self._passes.renew(told.as_of, given, self._clock())
        if message.HasField("figures"):
            self.figures = message.figures
        if message.queued or message.expired or message.tickets or message.refusals:
            self.breaker.success()
        for name in message.queued:
            if (asking := self._asking.get(name)) is not None:
                asking.answered.set()
        for ticket in message.tickets:
            if (asking := self._asking.get(ticket.request_id)) is not None:
                asking.decide(ticket.epoch)
        for name in message.expired:
            if (asking := self._asking.get(name)) is not None:
                asking.refuse(ServiceError("deadline_exceeded"))
        for refusal in message.refusals:
            if (asking := self._asking.get(refusal.request_id)) is not None:
                _tell_refusal(asking, refusal)

    def _send_reports(self) -> None:
        self._due = None
        fresh = [self._reports[e] for e in self._fresh if e in self._reports]
        self._outbox.message.reports.extend(fresh)
        self._fresh = set()
        self._outbox.now()

    def _break(self) -> None:
        self._is_connected = False
        self._passes = Passes()
        self.release()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        assert self._address is not None
        return ((TOKEN_KEY, self._address.token),)


def _tell_refusal(asking: _Asking, refusal: pb.Refusal) -> None:
    if refusal.reason == NEVER_FITS:
        asking.decide(None)  # the worker says it better, or knows better
        return
    code = "over_share" if refusal.reason == OVER_SHARE else "overloaded"
    asking.refuse(ServiceError(code, refusal.message, retry_after_s=refusal.retry_after_s))


def _kind(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code().name
    return type(error).__name__
