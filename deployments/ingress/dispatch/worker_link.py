"""The ingress's end of the connection with one epoch of one worker, and the requests on it.

Reconnects after each break, and declares a silent worker dead. WorkerPool chooses between workers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from functools import partial
from typing import Protocol

from penstock.deployments.ingress.dispatch.in_flight import (
    TOO_SLOW,
    Coalescer,
    InFlightRequest,
    nothing_to_cancel,
)
from penstock.deployments.ingress.dispatch.worker_greeting import Refused, WorkerGreeting
from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.channel.codec import delta_from, submit_bytes
from penstock.workers.channel.encrypted import TlsSource, message_connection
from penstock.workers.channel.framing import (
    CLOSED,
    MAX_MESSAGE_BYTES,
    MessageConnection,
    connected,
)
from penstock.workers.channel.peer import MAX_HELLO_BYTES
from penstock.workers.channel.refusals import RefusalLog
from penstock.workers.request import STORE_UNAVAILABLE, Delta
from penstock.workers.stats import WorkerInfo

log = logging.getLogger("penstock.channel")

TICK_S = 0.5
# A worker reports every second, and acknowledges with all that it says. After 4 to 4.5 s without a
# message, or without an acknowledgement, it is lost: its requests move within 5 s.
SILENCE_TICKS = 9
UNHEARD_TICKS = 9
CONNECT_TIMEOUT_S = 3.0
AVOIDED_S = 2.0  # a worker that could not get its experts, while others can
BACKOFF_S = (0.1, 2.0)  # first and longest pause between attempts to connect


class WorkerLinkHandlers(Protocol):
    """What a WorkerLink calls when something happens on it: pool.WorkerPool."""

    def reported(self, link: WorkerLink, report: pb.Report) -> None:
        """The worker has sent a report of its state."""

    def broken(self, link: WorkerLink) -> None:
        """The connection has ended."""

    def lost(self, link: WorkerLink, calls: list[InFlightRequest]) -> None:
        """The connection that `calls` were on has ended."""


class WorkerLink:
    """The connection with one epoch of one worker, and the requests on it."""

    def __init__(
        self,
        info: WorkerInfo,
        ingress_id: str,
        owner: WorkerLinkHandlers,
        tls: TlsSource | None = None,
    ):
        """`tls`: asked for each connection; None: they are in the clear."""
        self.info = info
        self._tls = tls
        self.task: asyncio.Task[None] | None = None
        self.is_listed = True
        self.is_connected = False
        self.was_connected = False  # once, or is now
        self.ended_s = float("-inf")  # when its last connection ended
        self.is_draining = info.is_draining
        self.is_stalled = False  # its engine computes nothing, although it has work
        self.last_turn = 0
        self._failed_s = float("-inf")  # when it last failed to get its experts
        self.capacity = info.max_model_len  # tokens of KV, once it reports
        self.max_num_seqs = 1  # most requests of a step, once it reports
        self._ingress_id = ingress_id
        self._owner = owner
        self._calls: dict[int, InFlightRequest] = {}
        self._stream_ids = itertools.count(1)
        self._own_tokens = 0
        self._others_tokens = 0
        self._messages: MessageConnection | None = None  # while there is a connection
        self._greeting: WorkerGreeting  # of that connection
        self._refusals = RefusalLog(log)
        self._welcomed: asyncio.Future[None]
        self._ended: asyncio.Future[str]
        self._num_silent_ticks = self._num_unheard_ticks = 0
        self._num_sent = self._heard = 0  # messages of the connection; the last acknowledged one
        self._gathering = Coalescer(self._end_gathering)

    @property
    def takes_requests(self) -> bool:
        """Whether a new request may be sent to this worker."""
        return self.is_connected and not self.is_draining and not self.is_stalled

    @property
    def lacks_experts(self) -> bool:
        """Whether its expert store did not answer a moment ago."""
        return asyncio.get_running_loop().time() < self._failed_s + AVOIDED_S

    @property
    def num_calls(self) -> int:
        """Requests of this ingress that the worker has."""
        return len(self._calls)

    @property
    def num_outstanding(self) -> int:
        """Estimate of the tokens that this worker has still to compute."""
        return self._own_tokens + self._others_tokens

    @property
    def has_others(self) -> bool:
        """Whether requests of other ingresses run on this worker, by its last report."""
        return self._others_tokens > 0

    def submit(self, call: InFlightRequest, *, may_decline: bool = False) -> None:
        """Send `call` to the worker, which may decline it where it has no room."""
        call.cancel, call.stream_id = partial(self.cancel, call), next(self._stream_ids)
        self._calls[call.stream_id] = call
        self._own_tokens += call.num_expected
        messages = self._messages
        if messages is None or not self.is_connected:
            return
        with messages.lock:  # as in _send
            messages.send(
                submit_bytes(
                    call.request,
                    call.stream_id,
                    call.num_expected,
                    self.info.epoch,
                    self._next_number(),
                    may_decline=may_decline,
                )
            )

    def cancel(self, call: InFlightRequest) -> None:
        self._remove(call)
        if self.is_connected:
            message = pb.Cancel(stream_id=call.stream_id, request_id=call.request.request_id)
            self._send(pb.UpMessage(cancel=message))

    async def run(self) -> None:
        """Connect, and reconnect after each break, while the registry lists the worker."""
        backoff_s = BACKOFF_S[0]
        while self.is_listed:
            try:
                why = await self._connection()
            except (OSError, TimeoutError) as error:
                why = getattr(error, "strerror", None) or "no message from the worker"
            finally:
                was_connected = self.is_connected
                self._break()
            is_loss = was_connected and not self.is_draining
            level = logging.WARNING if is_loss else logging.DEBUG
            log.log(level, "no connection to worker %s: %s", self.info.address, why)
            if was_connected:
                backoff_s = BACKOFF_S[0]
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.5))
            backoff_s = min(2 * backoff_s, BACKOFF_S[1])

    async def _connection(self) -> str:
        """Run one connection; returns why it ended. Raises OSError or TimeoutError."""
        loop = asyncio.get_running_loop()
        self._welcomed, self._ended = loop.create_future(), loop.create_future()
        self._num_sent = self._heard = 0
        self._greeting = WorkerGreeting(self.info, self._ingress_id)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            self._messages = message_connection(
                loop,
                await connected(self.info.address),
                None if self._tls is None else self._tls(),
                on_message=self._take_message,
                on_end=self._ended.set_result,
                max_bytes=MAX_HELLO_BYTES,
            )
            await asyncio.wait((self._welcomed, self._ended), return_when=asyncio.FIRST_COMPLETED)
        if self._ended.done():
            why = self._ended.result()
            if not self._welcomed.done() and why != CLOSED:
                self._refusals.note("worker", self.info.address, why)
            return why
        log.info("worker %s connected", self.info.address)
        watching = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait((watching, self._ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
        return self._ended.result() if self._ended.done() else watching.result()

    def _next_number(self) -> int:
        self._num_sent += 1
        return self._num_sent

    def _send(self, message: pb.UpMessage) -> None:
        messages = self._messages
        if messages is None:
            return
        with messages.lock:  # numbers must be in the order of sending
            message.epoch, message.number = self.info.epoch, self._next_number()
            messages.send(message.SerializeToString())

    def beat(self) -> None:
        """Send the ingress's heartbeat; from any thread, while the loop cannot."""
        if self.is_connected:
            self._send(pb.UpMessage())

    def _take_message(self, data: bytes) -> None:
        if not self.is_connected:
            self._greet(data)
            return
        message = pb.DownMessage.FromString(data)
        self._num_silent_ticks = 0
        if message.epoch != self.info.epoch:
            return
        if message.heard != self._heard:
            self._heard, self._num_unheard_ticks = message.heard, 0
        if message.HasField("step"):
            self._take_step(message.step)
        elif message.HasField("report"):
            self._take_report(message.report)

    def _greet(self, data: bytes) -> None:
        """A message of what listens at the worker's address, and has not proven that it is it."""
        messages = self._messages
        assert messages is not None, "it received this message"
        try:
            hello = self._greeting.take(data, messages.binding)
        except Refused as refused:
            messages.end(str(refused))
            return
        if hello is not None:
            self._send(pb.UpMessage(hello=hello))
            return
        messages.max_bytes = MAX_MESSAGE_BYTES
        # Set here, not in the task that awaits _welcomed: the messages that follow count.
        self.is_connected = self.was_connected = True
        self._welcomed.set_result(None)

    def _take_report(self, report: pb.Report) -> None:
        self._others_tokens = report.others_tokens
        self.capacity = report.num_blocks * report.block_size
        self.max_num_seqs = report.max_num_seqs
        self.is_draining = self.is_draining or report.is_draining
        self.is_stalled = report.is_stalled
        self._owner.reported(self, report)
        if self.is_stalled and self._calls and self._messages is not None:
            self._messages.end("its engine has computed no token for some seconds")

    async def _watch(self) -> str:
        """Returns why the connection is to end: the worker is silent, or hears nothing."""
        # Counts turns of this loop, not seconds: if this process itself stood still, the worker's
        # messages are only waiting to be read.
        self._num_silent_ticks = self._num_unheard_ticks = 0
        while self._num_silent_ticks < SILENCE_TICKS:
            if self._num_unheard_ticks >= UNHEARD_TICKS:
                return "the worker hears nothing of this ingress"
            self._num_silent_ticks += 1
            self._num_unheard_ticks += 1
            self._send(pb.UpMessage())  # the ingress's heartbeat
            await asyncio.sleep(TICK_S)
        return "no message from the worker"

    def _take_step(self, step: pb.Step) -> None:
        now_s, address = asyncio.get_running_loop().time(), self.info.address
        for stream_id in step.accepted:
            if (call := self._calls.get(stream_id)) is not None:
                call.is_accepted = True
        if step.accepted:  # nothing else is in the message
            return
        self._gathering.steps(now_s)
        for message in step.deltas:
            call = self._calls.get(message.stream_id)
            if call is not None:  # else it was cancelled meanwhile
                delta = delta_from(message, call.request.request_id)
                delta.engine = address
                self._take(call, delta, now_s)
        for stream_id, token_id in zip(step.stream_ids, step.token_ids, strict=True):
            call = self._calls.get(stream_id)
            if call is not None:
                delta = Delta(call.request.request_id, [token_id], engine=address)
                self._take(call, delta, now_s)

    def _take(self, call: InFlightRequest, delta: Delta, now_s: float) -> None:
        is_first = not call.is_begun
        computed = len(delta.token_ids)
        if is_first:
            computed += call.num_to_prefill
        computed = min(computed, call.num_expected)
        call.num_expected -= computed
        self._own_tokens -= computed
        if call.is_too_much(delta):
            self.cancel(call)
            call.fail(TOO_SLOW)
            return
        call.emitted.extend(delta.token_ids)
        call.add(delta)
        if delta.finish_reason is not None:
            if delta.error == STORE_UNAVAILABLE:
                self._failed_s = now_s
            self._remove(call)
            call.tell(now_s)
        elif is_first or not self._gathering.holds(call, len(self._calls), now_s):
            call.tell(now_s)

    def _end_gathering(self, now_s: float) -> None:
        for call in self._calls.values():
            if call.pending:
                call.tell(now_s)

    def _remove(self, call: InFlightRequest) -> None:
        call.cancel = nothing_to_cancel
        if self._calls.pop(call.stream_id, None) is not None:
            self._own_tokens -= call.num_expected

    def _break(self) -> None:
        """Forget the connection, and report its requests as lost."""
        if self.is_connected:
            self.ended_s = asyncio.get_running_loop().time()
        self.is_connected = False
        if self._messages is not None:
            self._messages.end("this end closes it")
            self._messages = None
        calls = list(self._calls.values())
        for call in calls:
            self._remove(call)
        self._owner.broken(self)
        if calls:
            self._owner.lost(self, calls)
        self._others_tokens = 0
