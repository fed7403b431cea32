"""The worker's end of the token path: requests and cancels come in, one message a step goes out.

A grpc.aio server on a thread and event loop of its own. Knows an engine only as EngineLike, and
nothing of models, tensors or text, so that no torch is loaded for it.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import os
import secrets
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc

from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.protos.penstock.internal.v1 import channel_pb2_grpc
from penstock.workers.outbox import MAX_PENDING_TOKENS, Outbox
from penstock.workers.request import Delta, Request
from penstock.workers.stats import EngineStats, WorkerInfo
from penstock.workers.wire import request_from, step_message

log = logging.getLogger("penstock.worker")

TOKEN_KEY = "penstock-worker-token"
REPORT_S = 1.0  # and BUSY_REPORT_S while there is work
BUSY_REPORT_S = 0.1
MAX_MESSAGE_BYTES = 64 << 20
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
)

Announce = Callable[[WorkerInfo, EngineStats], Awaitable[None]]


class EngineLike(Protocol):
    """What the channel needs of an EngineThread."""

    def submit(self, request: Request) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def stats(self) -> EngineStats: ...


@dataclass(slots=True)
class _Route:
    """Where the deltas of one running request go, and how far it has come."""

    link: _Link
    stream_id: int
    name: str  # as its ingress calls it
    num_prompt: int
    max_tokens: int  # 0: no limit was given
    num_expected: int  # tokens still to compute, as far as one can guess
    num_generated: int = 0

    def count(self, delta: Delta) -> None:
        # The first delta says that the whole prompt is computed.
        num_computed = len(delta.token_ids) + (self.num_prompt if not self.num_generated else 0)
        self.num_expected = max(0, self.num_expected - num_computed)
        self.num_generated += len(delta.token_ids)


@dataclass(slots=True, eq=False)
class _Link:
    """The stream of one ingress."""

    number: int
    outbox: Outbox

    def request_id(self, message: pb.Submit | pb.Cancel) -> str:
        """The engine's id: a second attempt is kept apart from the first one's late deltas."""
        return f"{message.request_id}#{self.number}.{message.stream_id}"


class _Pace:
    """How long a step takes of late, from the engine's totals."""

    WEIGHT = 0.3  # of the steps since the last look

    def __init__(self) -> None:
        self.step_s = 0.0
        self._num_steps, self._seconds = 0, 0.0

    def observe(self, stats: EngineStats) -> None:
        seconds, num = sum(stats.step_seconds.values()), stats.num_steps - self._num_steps
        if num > 0:
            newest = (seconds - self._seconds) / num
            self.step_s += (_Pace.WEIGHT if self.step_s else 1.0) * (newest - self.step_s)
        self._num_steps, self._seconds = stats.num_steps, seconds


class ChannelServer(channel_pb2_grpc.WorkerChannelServicer):
    """The worker's end of the channel: a grpc.aio server on a thread and event loop of its own.

    `announce` is called every second with who this worker is and how it does; it may fail.
    """

    def __init__(
        self,
        host: str,
        model: str,
        max_model_len: int,
        announce: Announce | None = None,
        max_pending_tokens: int = MAX_PENDING_TOKENS,
        *,
        weights: str = "",
        weight_bytes: int = 0,
    ):
        self._host = host
        self._announce = announce
        self._max_pending_tokens = max_pending_tokens
        self._engine: EngineLike
        self._routes: dict[str, _Route] = {}
        self._links: set[_Link] = set()
        self._link_numbers = itertools.count()
        self._sequences = itertools.count(1)  # of reports
        self._pace = _Pace()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="penstock-channel", daemon=True)
        self.info = WorkerInfo(
            address="",
            epoch=secrets.randbits(64),
            token=secrets.token_hex(32),
            pid=os.getpid(),
            model=model,
            max_model_len=max_model_len,
            weights=weights,
            weight_bytes=weight_bytes,
        )

    def start(self, engine: EngineLike) -> None:
        """Open the port; returns once it accepts. Raises RuntimeError if it cannot be opened."""
        self._engine = engine
        self._thread.start()
        self._started.result(timeout=30)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Close the port and every link."""
        if self._thread.is_alive():
            self.break_off()
            self._thread.join(timeout_s)

    def break_off(self) -> None:
        """Have the port and every link closed at once; from any thread, never waits.

        Ingresses take it for the loss of this worker: they end what it began, and have the rest
        done elsewhere.
        """
        self._loop.call_soon_threadsafe(self._stopping.set)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_requests(self) -> int:
        """Requests that ingresses wait for."""
        return len(self._routes)

    def deliver(self, deltas: list[Delta]) -> None:
        """Send the deltas of one engine step on their ways; on the engine thread, never blocks."""
        by_link: dict[_Link, list[tuple[int, Delta]]] = {}
        for delta in deltas:
            route = self._routes.get(delta.request_id)
            if route is None:  # cancelled meanwhile
                continue
            route.count(delta)
            if delta.finish_reason is not None:
                self._routes.pop(delta.request_id, None)
            by_link.setdefault(route.link, []).append((route.stream_id, delta))
        for link, addressed in by_link.items():
            link.outbox.push(addressed)

    async def Connect(self, _: Any, context: Any) -> None:
        """Serve one ingress until either end leaves; then cancel whatever it still had here."""
        shown = dict(context.invocation_metadata()).get(TOKEN_KEY, "")
        if not hmac.compare_digest(str(shown).encode(), self.info.token.encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong worker token")
        hello = await context.read()
        if hello is grpc.aio.EOF or not hello.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message is Hello")
        if hello.epoch != self.info.epoch:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this worker began anew")
        link = _Link(next(self._link_numbers), Outbox(self._loop, self._max_pending_tokens))
        self._links.add(link)
        log.info("ingress %s connected", hello.hello.ingress_id)
        ends = [
            asyncio.ensure_future(self._read(link, context)),
            asyncio.ensure_future(self._write(link, context)),
            asyncio.ensure_future(link.outbox.overflowed.wait()),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            self._links.discard(link)
            left = [id for id, route in list(self._routes.items()) if route.link is link]
            for request_id in left:
                self._cancel(request_id)
            log.info("ingress %s left; %d requests cancelled", hello.hello.ingress_id, len(left))
        if link.outbox.overflowed.is_set():
            log.warning("ingress %s did not read; cut off", hello.hello.ingress_id)
            # Its last write is stuck, and no status can overtake that; it will notice the silence.
            raise asyncio.CancelledError

    async def _read(self, link: _Link, context: Any) -> None:
        """Take in what the ingress sends, until it leaves or speaks to another epoch."""
        while (message := await context.read()) is not grpc.aio.EOF:
            if message.epoch != self.info.epoch:
                return
            if message.HasField("submit"):
                submit = message.submit
                request = request_from(submit, link.request_id(submit))
                self._routes[request.request_id] = _Route(
                    link,
                    submit.stream_id,
                    submit.request_id,
                    len(request.prompt_ids),
                    request.params.max_tokens or 0,
                    submit.expected_tokens,
                )
                self._engine.submit(request)
            elif message.HasField("cancel"):
                self._cancel(link.request_id(message.cancel))

    def _cancel(self, request_id: str) -> None:
        if self._routes.pop(request_id, None) is not None:
            self._engine.cancel(request_id)

    async def _write(self, link: _Link, context: Any) -> None:
        """Send Welcome, then a message per engine step, and the reports."""
        epoch = self.info.epoch
        welcome = pb.Welcome(model=self.info.model, max_model_len=self.info.max_model_len)
        await context.write(pb.DownMessage(epoch=epoch, welcome=welcome))
        link.outbox.ask_report()
        while True:
            pending, report_due = await link.outbox.take()
            if pending:
                await context.write(pb.DownMessage(epoch=epoch, step=step_message(pending)))
            if report_due:
                await context.write(pb.DownMessage(epoch=epoch, report=self._report(link)))

    def _report(self, link: _Link) -> pb.Report:
        stats = self._engine.stats()
        routes = list(self._routes.values())
        others = sum(route.num_expected for route in routes if route.link is not link)
        return pb.Report(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_blocks=stats.num_blocks,
            num_free_blocks=stats.num_blocks - stats.num_live_blocks,
            others_tokens=others,
            sequence=next(self._sequences),
            step_s=self._pace.step_s,
            num_preemptions=stats.num_preemptions,
            block_size=stats.block_size,
            max_num_seqs=stats.max_num_seqs,
            # From what was handed out: a long step of the engine must not hide who has come.
            request_ids=[route.name for route in routes],
            generated=[route.num_generated for route in routes],
            prompt_tokens=[route.num_prompt for route in routes],
            max_tokens=[route.max_tokens for route in routes],
        )

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:
            log.exception("the channel stopped")
            if not self._started.done():
                self._started.set_exception(error)

    async def _serve(self) -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        channel_pb2_grpc.add_WorkerChannelServicer_to_server(self, server)
        port = server.add_insecure_port(f"{self._host}:0")
        await server.start()
        self.info = replace(self.info, address=f"{self._host}:{port}")
        self._started.set_result(None)
        announcing = asyncio.ensure_future(self._announce_forever())
        reporting = asyncio.ensure_future(self._report_forever())
        await self._stopping.wait()
        announcing.cancel()
        reporting.cancel()
        await server.stop(grace=0)

    async def _report_forever(self) -> None:
        rest_s, was_busy = 0.0, False
        while True:
            is_busy = bool(self._routes)
            if is_busy or was_busy or rest_s <= 0:  # the last of them is told, too
                self._pace.observe(self._engine.stats())
                for link in self._links:
                    link.outbox.ask_report()
                rest_s = REPORT_S
            was_busy = is_busy
            rest_s -= BUSY_REPORT_S
            await asyncio.sleep(BUSY_REPORT_S)

    async def _announce_forever(self) -> None:
        """Tell the registry every second; while it is away, streams go on without it."""
        heard = True
        while self._announce is not None:
            try:
                await self._announce(self.info, self._engine.stats())
                heard = True
            except Exception as error:
                if heard:
                    log.warning("the registry does not answer: %s", type(error).__name__)
                heard = False
            await asyncio.sleep(REPORT_S)
