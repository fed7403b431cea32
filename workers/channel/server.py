"""The worker's end of the token path: requests and cancels come in, one message a step goes out.

A listener on a thread and event loop of its own, on which messages are read; steps are sent by the
thread of the engine. Knows an engine only as EngineLike, and nothing of models, tensors or text, so
that no torch is loaded for it.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.channel.codec import request_from, step_message
from penstock.workers.channel.framing import MAX_MESSAGE_BYTES, listening
from penstock.workers.channel.outbox import MAX_PENDING_TOKENS
from penstock.workers.channel.peer import IngressPeer, RequestRoute, StepTimeAverage
from penstock.workers.request import Delta, Request
from penstock.workers.stats import EngineStats, WorkerInfo

log = logging.getLogger("penstock.worker")

REPORT_S = 1.0  # and BUSY_REPORT_S where somebody has come or gone
BUSY_REPORT_S = 0.1
SILENCE_TICKS = 100  # of BUSY_REPORT_S; an ingress says twice a second that it lives
HELLO_S = 5.0  # a connection that has not said by then who it is, is closed
NO_ROOM_S = 0.1  # before another try, where the system has no sockets left

Announce = Callable[[WorkerInfo, EngineStats], Awaitable[None]]


class EngineLike(Protocol):
    """What the channel needs of an EngineThread."""

    def submit(self, request: Request) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def stats(self) -> EngineStats: ...


class ChannelServer:
    """The worker's end of the channel: a listener on a thread and event loop of its own.

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
        self._routes: dict[str, RequestRoute] = {}
        self._peers: set[IngressPeer] = set()
        self._peer_numbers = itertools.count()
        self._sequences = itertools.count(1)  # of reports
        self._step_time = StepTimeAverage()
        self._num_changes = 0  # of who is here
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
        """Close the port and every connection."""
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
        by_peer: dict[IngressPeer, list[tuple[int, Delta]]] = {}
        for delta in deltas:
            route = self._routes.get(delta.request_id)
            if route is None:  # cancelled meanwhile
                continue
            route.count(delta)
            if delta.finish_reason is not None:
                self._routes.pop(delta.request_id, None)
                self._num_changes += 1
            by_peer.setdefault(route.peer, []).append((route.stream_id, delta))
        for peer, addressed in by_peer.items():
            peer.outbox.push(addressed)

    def _step_bytes(self, deltas: Mapping[int, Delta]) -> bytes:
        """The deltas of one step, by stream id, as an ingress reads them."""
        step = pb.DownMessage(epoch=self.info.epoch, step=step_message(deltas))
        return step.SerializeToString()

    def _take(self, peer: IngressPeer, data: bytes) -> None:
        """What an ingress has sent. It ends the link if it is for another life of this worker."""
        message = pb.UpMessage.FromString(data)
        peer.num_silent_ticks = 0
        if not peer.name:
            self._greet(peer, message)
        elif message.epoch != self.info.epoch:
            peer.connection.end("it spoke to an earlier life of this worker")
        elif message.HasField("submit"):
            submit = message.submit
            request = request_from(submit, peer.request_id(submit))
            self._routes[request.request_id] = RequestRoute(
                peer,
                submit.stream_id,
                submit.request_id,
                len(request.prompt_ids),
                request.params.max_tokens or 0,
                submit.expected_tokens,
            )
            self._num_changes += 1
            self._engine.submit(request)
        elif message.HasField("cancel"):
            self._cancel(peer.request_id(message.cancel))

    def _ended(self, peer: IngressPeer, why: str) -> None:
        """The connection is gone: cancel whatever its ingress still had here."""
        self._peers.discard(peer)
        left = [id for id, route in list(self._routes.items()) if route.peer is peer]
        for request_id in left:
            self._cancel(request_id)
        if peer.name:
            log.info("ingress %s left (%s); %d requests cancelled", peer.name, why, len(left))

    def _greet(self, peer: IngressPeer, message: pb.UpMessage) -> None:
        """Let in an ingress that has the token and means this life; tell any other why not."""
        if not message.HasField("hello"):
            self._refuse(peer, "the first message is Hello")
        elif not hmac.compare_digest(message.hello.token.encode(), self.info.token.encode()):
            self._refuse(peer, "wrong worker token")
        elif message.epoch != self.info.epoch:
            self._refuse(peer, "this worker began anew")
        else:
            peer.name = message.hello.ingress_id or "without a name"
            peer.connection.max_bytes = MAX_MESSAGE_BYTES
            log.info("ingress %s connected", peer.name)
            welcome = pb.Welcome(model=self.info.model, max_model_len=self.info.max_model_len)
            self._send(peer, pb.DownMessage(welcome=welcome))
            self._send(peer, pb.DownMessage(report=self._report(peer)))

    def _refuse(self, peer: IngressPeer, why: str) -> None:
        self._send(peer, pb.DownMessage(rejection=pb.Rejection(reason=why)))
        peer.connection.end(why)

    def _send(self, peer: IngressPeer, message: pb.DownMessage) -> None:
        message.epoch = self.info.epoch
        peer.connection.send(message.SerializeToString())

    def _cancel(self, request_id: str) -> None:
        if self._routes.pop(request_id, None) is not None:
            self._num_changes += 1
            self._engine.cancel(request_id)

    def _report(self, peer: IngressPeer) -> pb.Report:
        stats = self._engine.stats()
        routes = list(self._routes.values())
        others = sum(route.num_expected for route in routes if route.peer is not peer)
        return pb.Report(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_blocks=stats.num_blocks,
            num_free_blocks=stats.num_blocks - stats.num_live_blocks,
            others_tokens=others,
            sequence=next(self._sequences),
            step_s=self._step_time.step_s,
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
        listener, address = listening(self._host)
        self.info = replace(self.info, address=address)
        self._started.set_result(None)
        tasks = [
            asyncio.ensure_future(each)
            for each in (self._accept(listener), self._announce_forever(), self._report_forever())
        ]
        await self._stopping.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        listener.close()
        for peer in list(self._peers):
            peer.connection.end("this worker stops")

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(listener)
                self._open(connection)
            except OSError as error:
                log.warning("no connection can be taken: %s", error)
                await asyncio.sleep(NO_ROOM_S)

    def _open(self, connection: socket.socket) -> None:
        peer = IngressPeer(
            self._loop,
            connection,
            next(self._peer_numbers),
            on_message=self._take,
            on_end=self._ended,
            as_message=self._step_bytes,
            max_pending_tokens=self._max_pending_tokens,
        )
        self._peers.add(peer)
        self._loop.call_later(HELLO_S, self._expect_hello, peer)

    def _expect_hello(self, peer: IngressPeer) -> None:
        if not peer.name:
            peer.connection.end("it did not say who it is")

    async def _report_forever(self) -> None:
        """Who is here is told within BUSY_REPORT_S; that they go on, every REPORT_S.

        How far each is in between, whoever keeps books tells from its pace: answers that go on
        steadily cost no reports.
        """
        rest_s, num_changes, num_preemptions = 0.0, -1, 0
        while True:
            stats = self._engine.stats()
            if self._routes or num_changes != self._num_changes or rest_s <= 0:
                self._step_time.observe(stats)
            said = (num_changes, num_preemptions)
            num_changes, num_preemptions = self._num_changes, stats.num_preemptions
            is_due = said != (num_changes, num_preemptions) or rest_s <= 0
            if is_due:
                rest_s = REPORT_S
            for peer in list(self._peers):
                # Counts turns of this loop, not seconds: if it was this process that stood still,
                # the ingress has had no chance to be heard.
                peer.num_silent_ticks += 1
                if peer.num_silent_ticks > SILENCE_TICKS:
                    peer.connection.end("nothing was heard of it")
                elif is_due and peer.name and not peer.connection.is_stuck:
                    self._send(peer, pb.DownMessage(report=self._report(peer)))
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
