"""The worker's end of the token path: receives requests and cancels, sends one message a step.

A listener on a thread and event loop of its own, on which messages are read; the engine's thread
sends the steps. Knows an engine only as EngineLike, so that tests and the ingress need no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.channel.codec import request_from
from penstock.workers.channel.encrypted import TlsSource
from penstock.workers.channel.framing import listening
from penstock.workers.channel.listener import ChannelListener, PeerHandlers
from penstock.workers.channel.peer import MAX_PENDING_BYTES, IngressPeer, RequestRoute
from penstock.workers.channel.reports import StepTimeAverage, report_message
from penstock.workers.request import DECLINED, Delta, FinishReason, Request
from penstock.workers.stats import NO_FACTS, EngineFacts, EngineStats, WorkerInfo

log = logging.getLogger("penstock.worker")

REPORT_S = 1.0  # or BUSY_REPORT_S, where a request has arrived or ended
BUSY_REPORT_S = 0.1
SILENCE_TICKS = 100  # of BUSY_REPORT_S; an ingress sends a heartbeat twice a second

Announce = Callable[[WorkerInfo, EngineStats], Awaitable[None]]


class EngineLike(Protocol):
    """What the channel needs of an EngineThread."""

    def submit(self, request: Request) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def stats(self) -> EngineStats: ...
    @property
    def is_stalled(self) -> bool: ...


class ChannelServer:
    """The worker's end of the channel: a listener on a thread and event loop of its own.

    `announce` is the heartbeat: called every second with this worker's info and stats; it may fail.
    An ingress that leaves more than `max_pending_bytes` of deltas unread is disconnected.
    """

    def __init__(
        self,
        host: str,
        model: str,
        max_model_len: int,
        announce: Announce | None = None,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        *,
        weights: str = "",
        numerics: str = "",
        weight_bytes: int = 0,
        model_digest: str = "",
        engine: EngineFacts = NO_FACTS,
        tls: TlsSource | None = None,
    ):
        """`tls`: for each new connection; None: they are in the clear."""
        self._host = host
        self._announce = announce
        self._engine: EngineLike
        self._routes: dict[str, RequestRoute] = {}
        self._report_numbers = itertools.count(1)
        self._step_time = StepTimeAverage()
        self._num_changes = 0  # requests that arrived or ended
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._heartbeat_due = asyncio.Event()
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
            numerics=numerics,
            weight_bytes=weight_bytes,
            model_digest=model_digest,
            is_encrypted=tls is not None,
            engine=engine,
        )
        handlers = PeerHandlers(self._welcome, self._take, self._ended)
        self._connections = ChannelListener(self._loop, self.info, handlers, max_pending_bytes, tls)

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

    def drain(self) -> None:
        """Accept no new request from now on; running requests continue. From any thread.

        Ingresses get a report and the registry a heartbeat at once. A request that an ingress has
        sent before its report is declined, and the ingress sends it to another worker.
        """
        self._loop.call_soon_threadsafe(self._begin_drain)

    def break_off(self) -> None:
        """Have the port and every connection closed at once; from any thread, never blocks.

        Ingresses treat it as the loss of this worker: requests that have a token end with an error,
        the others are sent to another worker.
        """
        self._loop.call_soon_threadsafe(self._stopping.set)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._routes)

    def deliver(self, deltas: list[Delta]) -> None:
        """Send the deltas of one step to their ingresses; on the engine thread, never blocks."""
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

    def accepted(self, request_ids: list[str]) -> None:
        """Tell their ingresses that the engine computes these requests now; on its thread."""
        by_peer: dict[IngressPeer, list[int]] = {}
        for request_id in request_ids:
            route = self._routes.get(request_id)
            if route is not None:
                by_peer.setdefault(route.peer, []).append(route.stream_id)
        for peer, stream_ids in by_peer.items():
            self._send(peer, pb.DownMessage(step=pb.Step(accepted=stream_ids)))

    def _take(self, peer: IngressPeer, data: bytes) -> None:
        """Handle a message of an ingress. One for another epoch ends the connection."""
        message = pb.UpMessage.FromString(data)
        peer.num_silent_ticks = 0
        peer.outbox.heard += 1
        if message.number != peer.outbox.heard:
            peer.connection.end("a message of it was lost")
        elif message.epoch != self.info.epoch:
            peer.connection.end("it addressed an earlier epoch of this worker")
        elif message.HasField("submit") and self.info.is_draining:
            name, stream_id = message.submit.request_id, message.submit.stream_id
            peer.outbox.push([(stream_id, Delta(name, [], FinishReason.ERROR, error=DECLINED))])
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
                len(request.emitted_ids),
            )
            self._num_changes += 1
            self._engine.submit(request)
        elif message.HasField("cancel"):
            self._cancel(peer.request_id(message.cancel))

    def _ended(self, peer: IngressPeer, why: str) -> None:
        """The connection has ended: cancel all requests of its ingress."""
        left = [id for id, route in list(self._routes.items()) if route.peer is peer]
        for request_id in left:
            self._cancel(request_id)
        log.info("ingress %s left (%s); %d requests cancelled", peer.name, why, len(left))

    def update_info(self, **fields: Any) -> None:
        """Change fields of `info`, and have a heartbeat tell of it at once; from any thread."""

        def update() -> None:
            self.info = replace(self.info, **fields)
            self._heartbeat_due.set()

        self._loop.call_soon_threadsafe(update)

    def _begin_drain(self) -> None:
        self.info = replace(self.info, is_draining=True)
        for peer in list(self._connections.peers):  # its report arrives before any decline
            self._send(peer, pb.DownMessage(report=self._report(peer)))
        self._heartbeat_due.set()

    def _welcome(self, peer: IngressPeer, proof: bytes) -> None:
        log.info("ingress %s connected", peer.name)
        welcome = pb.Welcome(
            model=self.info.model, max_model_len=self.info.max_model_len, proof=proof
        )
        self._send(peer, pb.DownMessage(welcome=welcome))
        self._send(peer, pb.DownMessage(report=self._report(peer)))

    def _send(self, peer: IngressPeer, message: pb.DownMessage) -> None:
        message.epoch, message.heard = self.info.epoch, peer.outbox.heard
        peer.connection.send(message.SerializeToString())

    def _cancel(self, request_id: str) -> None:
        if self._routes.pop(request_id, None) is not None:
            self._num_changes += 1
            self._engine.cancel(request_id)

    def _report(self, peer: IngressPeer) -> pb.Report:
        routes = list(self._routes.values())
        number, step_s = next(self._report_numbers), self._step_time.step_s
        return report_message(
            self._engine.stats(),
            routes,
            peer,
            number,
            step_s,
            is_draining=self.info.is_draining,
            is_stalled=self._engine.is_stalled,
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
        accepting = self._connections.accept(listener)
        tasks = [
            asyncio.ensure_future(each)
            for each in (accepting, self._announce_forever(), self._report_forever())
        ]
        await self._stopping.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        listener.close()
        self._connections.close()

    async def _report_forever(self) -> None:
        """Report arrivals, ends and preemptions within BUSY_REPORT_S, and the rest every REPORT_S.

        In between, the gate extrapolates each request's length from the step time: answers that
        grow steadily cost no reports.
        """
        rest_s, num_changes, num_preemptions = 0.0, -1, 0
        while True:
            stats = self._engine.stats()
            if self._routes or num_changes != self._num_changes or rest_s <= 0:
                self._step_time.observe(stats)
            reported = (num_changes, num_preemptions)
            num_changes, num_preemptions = self._num_changes, stats.num_preemptions
            is_due = reported != (num_changes, num_preemptions) or rest_s <= 0
            if is_due:
                rest_s = REPORT_S
            for peer in list(self._connections.peers):
                # Counts turns of this loop, not seconds: if this process was suspended, messages
                # of the ingress have not been read yet.
                peer.num_silent_ticks += 1
                if peer.num_silent_ticks > SILENCE_TICKS:
                    peer.connection.end("it sent no heartbeat")
                elif is_due and not peer.connection.is_stuck:
                    self._send(peer, pb.DownMessage(report=self._report(peer)))
            rest_s -= BUSY_REPORT_S
            await asyncio.sleep(BUSY_REPORT_S)

    async def _announce_forever(self) -> None:
        """Send a heartbeat to the registry every REPORT_S, and at once when this worker drains.

        Without the registry, streams continue.
        """
        is_reachable = True
        while self._announce is not None:
            try:
                await self._announce(self.info, self._engine.stats())
                is_reachable = True
            except Exception as error:
                if is_reachable:
                    log.warning("the registry is unreachable: %s", type(error).__name__)
                is_reachable = False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._heartbeat_due.wait(), REPORT_S)
            self._heartbeat_due.clear()
