"""The ingress's connection to the gate: asks for admission, and never depends on the gate.

A request is admitted on credit, which the gate hands out while the worst case fits; or it is
offered, and waits. Without a reply within `answer_s`, or when the stream breaks, a request falls
back to the ingress's own queue (local_queue.py). Three faults in a row open the circuit breaker.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from penstock.deployments.gate.links.greeting import Refused, greet_gate
from penstock.deployments.gate.links.tls import open_channel
from penstock.deployments.gate.wire import GateAddress
from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.dispatch.admission_gate import ANY_WORKER, Returned
from penstock.deployments.ingress.dispatch.circuit_breaker import CircuitBreaker
from penstock.deployments.ingress.dispatch.credits import Credits
from penstock.deployments.ingress.dispatch.gate_outbox import GateOutbox
from penstock.deployments.ingress.dispatch.pending_admission import PendingAdmission, State
from penstock.deployments.security.cluster_links import ClusterCertificate
from penstock.deployments.security.identity import WrongPeer
from penstock.protos.penstock.internal.v1 import channel_pb2, gate_pb2_grpc
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb
from penstock.workers.channel.refusals import RefusalLog
from penstock.workers.stats import Histogram

log = logging.getLogger("penstock.gate")

ANSWER_S = 0.02
SILENCE_TICKS = 5  # the gate sends something every TICK_S; after this many without, it is gone
TICK_S = 0.25
CONNECT_TIMEOUT_S = 3.0
EXPLAIN_S = 1.0
BACKOFF_S = (0.1, 1.0)
WAIT_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


class GateClient:
    """The gate's client in one ingress. Lives on one event loop."""

    decides: bool = True

    def __init__(
        self,
        ingress_id: str,
        where: Callable[[], Awaitable[GateAddress]],
        *,
        answer_s: float = ANSWER_S,
        tokenizer_digest: str = "",
        certificate: ClusterCertificate | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.breaker = CircuitBreaker()
        self.figures = pb.Figures()  # the newest of the gate
        self.waits = Histogram(WAIT_BOUNDS)  # seconds, of requests that were offered and admitted
        self.num_on_credit = self.num_asked = self.num_ticketed = self.num_fallback = 0
        self._where = where
        self._certificate = certificate  # None: connections are in the clear
        self._answer_s = answer_s
        self._clock = clock
        self._pending: dict[str, PendingAdmission] = {}
        self._credits = Credits()
        self._outbox = GateOutbox(ingress_id, tokenizer_digest)
        self._is_connected = False
        self._num_silent_ticks = 0
        self._explaining: dict[int, asyncio.Future[pb.ExplainResponse | None]] = {}
        self._explain_numbers = itertools.count(1)
        self._refusals = RefusalLog(log)

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    @property
    def answers(self) -> bool:
        """Whether it is connected, and the circuit breaker is closed."""
        return self._is_connected and self.breaker.until is None

    @property
    def breaker_state(self) -> str:
        return self.breaker.state(self._clock())

    @property
    def num_waiting(self) -> int:
        """Requests of this ingress that wait for the gate."""
        return len(self._pending)

    async def admit(
        self,
        request: AdmissionRequest,
        epochs: Sequence[int],
        *,
        returned: Returned | None = None,
    ) -> int | None:
        """Wait for admission: the epoch of the worker that has room, or ANY_WORKER. None: the gate
        is away or too slow, and the ingress decides by itself.

        `epochs`: the workers to choose from, best first. `returned`: why it is asked again. Raises
        ServiceError if it is refused. Call `ended` in any case, also after a cancellation.
        """
        now = self._clock()
        if not self._is_connected or not self.breaker.allows(now):
            self.num_fallback += 1
            return None
        if returned is None:
            epoch = self._credits.take(request, epochs, self._outbox.next_number, now)
            if epoch is not None:
                self.num_on_credit += 1
                self._outbox.admitted_on_credit(request, epoch)
                return epoch
        self.num_asked += 1
        pending = self._pending[request.request_id] = PendingAdmission(request)
        try:
            if not await self._ask(pending, returned):
                self.breaker.fault(self._clock())
                self.num_fallback += 1
                self.ended(request.request_id, 0)
                return None
            epoch = await pending.decided
        finally:
            del self._pending[request.request_id]
        if epoch in (None, ANY_WORKER):
            self.num_fallback += 1
        else:
            self._outbox.admitted(pending)
            self.num_ticketed += 1
            self.waits.observe(self._clock() - now)
        return epoch

    def ended(self, request_id: str, num_generated: int) -> None:
        """A request is over, for any reason: its memory is free."""
        is_awaited = bool(self._pending or self.figures.num_waiting or not self._credits.has_any)
        self._outbox.ended(request_id, num_generated, is_awaited=is_awaited)

    def learn(self, request: AdmissionRequest, length: int, ended: str) -> None:
        """Report an answer's length, and why it ended: "stop", "length" or "cancel"."""
        self._outbox.learn(request, length, ended)

    def report(self, address: str, epoch: int, report: channel_pb2.Report) -> None:
        """Forward a worker's report."""
        self._outbox.report(address, epoch, report)

    def lost(self, epoch: int) -> None:
        """A worker is no longer connected."""
        self._outbox.lost(epoch)
        self._credits.drop(epoch)

    def release(self) -> None:
        """All waiting requests fall back to a worker."""
        for pending in self._pending.values():
            pending.decide(None)

    async def explain(self, limit: int) -> pb.ExplainResponse | None:
        """What waits, and why; None while the gate is away."""
        if not self._is_connected:
            return None
        number = next(self._explain_numbers)
        answer = asyncio.get_running_loop().create_future()
        self._explaining[number] = answer
        self._outbox.explain(number, limit)
        try:
            async with asyncio.timeout(EXPLAIN_S):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._explaining[number]

    async def run(self) -> None:
        """Connect, and again after each break, for ever."""
        backoff_s = BACKOFF_S[0]
        while True:
            try:
                gate = await self._where()
                async with open_channel(gate, self._certificate, OPTIONS) as channel:
                    stub = gate_pb2_grpc.GateStub(channel)
                    await self._serve_stream(stub.Connect(), gate.token)
            except asyncio.CancelledError:
                raise
            except (Refused, WrongPeer) as refused:
                self._refusals.note("gate", gate.address, str(refused))
            except Exception as error:  # Ray's, gRPC's, or time: all mean that it is away
                level = logging.WARNING if self._is_connected else logging.DEBUG
                kind = type(error).__name__
                if isinstance(error, grpc.aio.AioRpcError):
                    kind = error.code().name
                log.log(level, "the gate is unavailable (%s): the ingress decides", kind)
            if self._is_connected:
                backoff_s = BACKOFF_S[0]
            self._break()
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.5))
            backoff_s = min(2 * backoff_s, BACKOFF_S[1])

    async def _ask(self, pending: PendingAdmission, returned: Returned | None) -> bool:
        """Offer it; whether the gate replies in time.

        If the gate gave credits, it may admit this one without a prediction: the features of its
        text are computed while the gate replies, and sent if it replies "queued".
        """
        with_text = returned is not None or not self._credits.has_any
        self._outbox.offer(pending, with_text=with_text, returned=returned)
        if not await self._replies(pending):
            return False
        if with_text or pending.state is not State.OFFERED:
            return True
        pending.answered.clear()
        self._outbox.send_text(pending)
        return await self._replies(pending)

    async def _replies(self, pending: PendingAdmission) -> bool:
        """Whether the gate replies in time."""
        try:
            async with asyncio.timeout(self._answer_s):
                await pending.answered.wait()
        except TimeoutError:
            return False
        return True

    async def _serve_stream(self, stream: Any, token: str) -> None:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            proof = await greet_gate(stream, token)
            self._outbox.begin()
            message = self._outbox.take()
            message.proof = proof
            await stream.write(message)
            first = await stream.read()
        if first is grpc.aio.EOF:
            return
        self._num_silent_ticks, self._is_connected = 0, True
        self._outbox.open()
        self.breaker.success()
        self._take(first)
        log.info("connected to the gate")
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
            await stream.write(self._outbox.take())
            self._outbox.compute_texts()  # while the gate replies

    async def _watch(self) -> None:
        # Turns of this loop, not seconds: while this process is stopped, it receives nothing.
        while self._num_silent_ticks < SILENCE_TICKS:
            self._num_silent_ticks += 1
            await asyncio.sleep(TICK_S)
        raise TimeoutError

    def _take(self, message: pb.ToIngress) -> None:
        if message.HasField("credits"):
            credits = message.credits
            given = dict(zip(credits.epochs, zip(credits.tokens, credits.slots)))
            self._credits.renew(credits.as_of, given, self._clock())
        for explained in message.explained:
            if (answer := self._explaining.get(explained.number)) is not None and not answer.done():
                answer.set_result(explained)
        if message.HasField("figures"):
            self.figures = message.figures
        if message.queued or message.expired or message.tickets or message.refusals:
            self.breaker.success()
        for name in message.queued:
            if (pending := self._pending.get(name)) is not None:
                pending.answered.set()
        for ticket in message.tickets:
            if (pending := self._pending.get(ticket.request_id)) is not None:
                pending.decide(ticket.epoch)
        for name in message.expired:
            if (pending := self._pending.get(name)) is not None:
                pending.fail(ServiceError("deadline_exceeded"))
        for refusal in message.refusals:
            if (pending := self._pending.get(refusal.request_id)) is not None:
                pending.refuse(refusal)

    def _break(self) -> None:
        self._is_connected = False
        self._outbox.close()
        self._credits = Credits()
        for answer in self._explaining.values():
            if not answer.done():
                answer.set_result(None)
        self.release()
