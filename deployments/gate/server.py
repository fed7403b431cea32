"""The gate's process: one Ray actor, restarted for ever, with a gRPC port for the ingresses.

Ray supervises the actor and tells its address; requests go over gRPC, because a call to an actor
takes several times as long. Decisions are made in service.py and below. A gate that was killed
restarts with the predictor's last snapshot, and admits requests once the ingresses have reported
what each worker runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import ray

from penstock.deployments.gate.links.greeting import Refused, greeted
from penstock.deployments.gate.links.ingress_link import IngressLink
from penstock.deployments.gate.links.port import GatePort, open_port
from penstock.deployments.gate.links.tls import check_ingress
from penstock.deployments.gate.load_meter import GateLoad
from penstock.deployments.gate.service import GateService
from penstock.deployments.gate.snapshots import PredictorSnapshots
from penstock.deployments.gate.status import explain
from penstock.deployments.gate.types import GateSetup
from penstock.deployments.gate.wire import GateAddress
from penstock.deployments.prediction.predictor import LengthPredictor
from penstock.deployments.security.identity import WrongPeer
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb
from penstock.protos.penstock.internal.v1 import gate_pb2_grpc
from penstock.workers.channel.refusals import RefusalLog
from penstock.workers.channel.unproven import Unproven

log = logging.getLogger("penstock.gate")

BEAT_S = 0.25  # interval of the gate's figures to each ingress
WAITING_TICK_S = 0.05  # interval between admission attempts while requests wait
REST = 3.0  # pause after a tick, in multiples of its duration: a quarter of a core at most
INLINE_S = 0.005  # an offer that takes longer to judge is answered with "queued" first
SLICE_S = 0.008  # longest that other messages wait for offers or labels
CONFIRM_S = 0.02  # from a provisional admission to its judgement
LABELS_S = 0.05
SNAPSHOT_S = 60.0
LAST_S = 1.0  # longest that a snapshot waits for what is still to be learnt
FAULT_REST_S = 1.0  # pause after an unexpected exception


class GateServer(gate_pb2_grpc.GateServicer):
    """The actor. Everything happens on its event loop.

    `service` has the setup, the ledgers and the queue; it is replaced as a whole when its state is
    inconsistent. The predictor is kept.
    """

    def __init__(self, setup: GateSetup) -> None:
        self._token = secrets.token_hex(32)
        self._links: dict[str, IngressLink] = {}
        self._unproven: Unproven[IngressLink] = Unproven(IngressLink.refuse)
        self._refusals = RefusalLog(log)
        self._snapshots = PredictorSnapshots()
        self.service = self._new_service(setup, self._snapshots.load(setup))
        self._port: GatePort | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._starting = asyncio.Lock()
        self._wake = asyncio.Event()
        self._offer_s = 0.001  # duration of judging one offer, moving average
        self._tick_s = 0.001  # duration of the last tick
        self._ticked_at = 0.0

    async def where(self, setup: GateSetup) -> GateAddress:
        """Where to connect. Starts listening at the first call.

        A setup of a higher generation is adopted in place, and no ingress notices; any other is
        ignored, and its ingress learns from the answer what is in force.
        """
        async with self._starting:
            if setup.generation > self.service.setup.generation:
                log.info("settings of generation %d are in force", setup.generation)
                self.service.adopt(setup)
            if self._port is None:
                await self._snapshots.restore(setup, self.service.learner)
            port = await self._listen()
        now = self.service.setup
        return GateAddress(
            port.address, self._token, os.getpid(), now.generation, now.digest, port.shown
        )

    async def save(self) -> None:
        """Keep what was learnt so far; actor.py asks for it before it ends the gate.

        What ended just now is learnt first: it may be all that a short life has seen.
        """
        until_s = time.monotonic() + LAST_S
        while self.service.learner.learn_for(SLICE_S) and time.monotonic() < until_s:
            await asyncio.sleep(0)
        await self._snapshots.save(self.service.setup, self.service.learner)

    @property
    def snapshot_fault(self) -> str:
        """Why what was learnt is not kept now; empty: it is."""
        return self._snapshots.fault

    async def pid(self) -> int:
        return os.getpid()

    async def load(self) -> GateLoad:
        """What the autoscaler reads, once a second."""
        return self.service.load(time.monotonic())

    async def _listen(self) -> GatePort:
        """The port, opened anew where a deployment has other certificates."""
        setup = self.service.setup
        if self._port is not None and self._port.certs_dir == setup.certs_dir:
            return self._port
        before = self._port
        self._port = await open_port(
            self, setup.host or ray.util.get_node_ip_address(), setup.certs_dir
        )
        if before is not None:
            await before.server.stop(0)  # its ingresses ask again
            return self._port
        self._tasks = [
            asyncio.ensure_future(self._always(each))
            for each in (self._work, self._beat, self._learn, self._save)
        ]
        # All objects made so far live as long as the process: exclude them from collections.
        gc.collect()
        gc.freeze()
        return self._port

    def _new_service(self, setup: GateSetup, predictor: LengthPredictor) -> GateService:
        return GateService(setup, predictor, self._outgoing, time.monotonic())

    def _rebuild(self, setup: GateSetup) -> None:
        """A new service with the same predictor. Ingresses reconnect, and report what runs."""
        self.service = self._new_service(setup, self.service.learner.predictor)
        for link in self._links.values():
            link.left.set()

    async def _always(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except Exception:
                log.exception("unexpected error in the gate's %s loop", work.__name__.strip("_"))
                await asyncio.sleep(FAULT_REST_S)

    @contextlib.contextmanager
    def _rebuilding_on_fault(self) -> Iterator[None]:
        """An exception while the service changes its state leaves it undefined: rebuild it.

        As after a restart: waiting requests go on without the gate, the predictor is kept.
        """
        service = self.service
        try:
            yield
        except Exception:
            log.critical("gate state is inconsistent; rebuilding it from worker reports")
            if service is self.service:
                self._rebuild(service.setup)
            raise

    async def Connect(self, _: Any, context: Any) -> None:
        """Serve one ingress until either end leaves; its waiting requests are then dropped."""
        link = IngressLink()
        self._unproven.add(link)
        reading = asyncio.ensure_future(self._read(link, context))
        writing = asyncio.ensure_future(self._write(link, context))
        leaving = asyncio.ensure_future(link.left.wait())
        try:
            await asyncio.wait((reading, writing, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._unproven.discard(link)
            for task in (reading, writing, leaving):
                task.cancel()
            if reading.done() and not reading.cancelled() and (error := reading.exception()):
                log.error("cannot handle a message of an ingress", exc_info=error)
            if self._links.get(link.ingress) is link:
                del self._links[link.ingress]
                self.service.ingress_left(link.ingress)
        if link.refused:
            self._refusals.note("ingress", context.peer().rpartition(":")[0], link.refused)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, link.refused)

    async def close(self) -> None:
        """End, for tests: Ray kills the process."""
        for task in self._tasks:
            task.cancel()
        if self._port is not None:
            await self._port.server.stop(0)
        await self._snapshots.close()

    async def _read(self, link: IngressLink, context: Any) -> None:
        try:
            if self._port is not None and self._port.certificate is not None:
                check_ingress(context, self._port.certificate)
            message = await greeted(context, self._token)
        except (Refused, WrongPeer) as refused:
            link.refuse(str(refused))
            return
        if message is None:
            return
        self._unproven.discard(link)
        link.ingress = message.ingress_id
        self._links[link.ingress] = link
        self.service.ingress_joined(link.ingress, message.tokenizer_digest)
        while message is not grpc.aio.EOF:
            self._take(link, message)
            message = await context.read()

    def _take(self, link: IngressLink, message: pb.FromIngress) -> None:
        service = self.service
        with self._rebuilding_on_fault():
            undecided = service.receive(link.ingress, message, time.monotonic())
        takes_s = len(service.inbox) * self._offer_s + self._tick_s
        if undecided and takes_s <= INLINE_S and self._rest_s() <= 0:
            self._turn()
            self._tick()
        if undecided:
            service.report_queued(undecided, link.ingress)
            link.filled.set()
        if service.num_waiting:
            self._wake.set()
        elif service.inbox:  # admitted already: let their worker begin before they are judged
            asyncio.get_running_loop().call_later(CONFIRM_S, self._wake.set)
        for request in message.explain:
            limit = min(request.limit or 32, 1000)
            answer = explain(service.gate, service.num_waiting, time.monotonic(), limit)
            answer.number = request.number
            link.message.explained.append(answer)
            link.filled.set()

    async def _write(self, link: IngressLink, context: Any) -> None:
        while True:
            await link.filled.wait()
            link.filled.clear()
            message, link.message = link.message, pb.ToIngress()
            if link.ingress:
                message.credits.CopyFrom(self.service.credits(link.ingress, time.monotonic()))
            await context.write(message)

    def _outgoing(self, ingress: str) -> pb.ToIngress:
        """The message to `ingress` that is being filled; it is sent soon."""
        link = self._links.get(ingress)
        if link is None:
            return pb.ToIngress()  # the ingress is gone: dropped
        link.filled.set()
        return link.message

    async def _work(self) -> None:
        """Judge offers from the inbox, and try to admit waiting requests."""
        while True:
            service = self.service
            timeout_s = WAITING_TICK_S if service.num_waiting else BEAT_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), timeout_s)
            self._wake.clear()
            self._turn()
            rest_s = self._rest_s()
            if service.inbox:
                self._wake.set()
                await asyncio.sleep(0)
            elif rest_s > 0:
                await asyncio.sleep(rest_s)
            if self._may_tick():
                self._tick()

    def _turn(self) -> None:
        """Judge offers for a slice of time."""
        service = self.service
        began_s = now_s = time.monotonic()
        num = 0
        with self._rebuilding_on_fault():
            while now_s - began_s < SLICE_S and service.judge_next(now_s):
                now_s, num = time.monotonic(), num + 1
        if num:
            self._offer_s += 0.1 * ((now_s - began_s) / num - self._offer_s)

    def _tick(self) -> None:
        began_s = time.monotonic()
        with self._rebuilding_on_fault():
            self.service.tick(began_s)
        self._ticked_at = time.monotonic()
        self._tick_s = self._ticked_at - began_s

    def _rest_s(self) -> float:
        return self._ticked_at + REST * self._tick_s - time.monotonic()

    def _may_tick(self) -> bool:
        return self._rest_s() <= 0 and self.service.are_all_judged(time.monotonic())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            service = self.service
            figures = service.figures()
            figures.snapshot_fault = self.snapshot_fault
            for link in self._links.values():
                link.message.figures.CopyFrom(figures)
                link.filled.set()

    async def _learn(self) -> None:
        while True:
            await asyncio.sleep(LABELS_S)
            self.service.learner.learn_due(SLICE_S, time.monotonic())

    async def _save(self) -> None:
        while True:
            await asyncio.sleep(SNAPSHOT_S)
            await self._snapshots.save(self.service.setup, self.service.learner)
