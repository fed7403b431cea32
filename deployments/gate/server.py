"""The gate's process: one Ray actor, which Ray restarts for ever, with a port for the ingresses.

Ray supervises and tells where the gate is; requests go over gRPC, for a call to an actor takes
several times as long. What is decided, and how, is gate_keeper's and below. A gate that was killed
comes back with what its predictor had saved, and hears from the ingresses what each worker runs
before it lets anybody in.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import hmac
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import ray
from ray.exceptions import RayActorError

from penstock.deployments.gate.service import GateService, GateSetup
from penstock.deployments.gate.wire import TOKEN_KEY, GateAddress
from penstock.deployments.prediction.predictor import LengthPredictor
from penstock.deployments.prediction.snapshot import SnapshotError, restore, snapshot
from penstock.deployments.supervision.registry import CALL_TIMEOUT_S, NAMESPACE
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb
from penstock.protos.penstock.internal.v1 import gate_pb2_grpc

log = logging.getLogger("penstock.gate")

BEAT_S = 0.25  # so often each ingress hears of the gate
WAITING_TICK_S = 0.05  # so often it is looked whether whoever waits fits by now
REST = 3.0  # times as long as a look took, before the next: a quarter of a core at most
INLINE_S = 0.005  # what takes longer is answered with "queued" first
SLICE_S = 0.008  # then other messages have their turn
HELD_S = 0.02  # after which those are judged that were let in unseen
LABELS_S = 0.05
SNAPSHOT_S = 60.0
FAULT_REST_S = 1.0  # after a fault of its own


class GateServer(gate_pb2_grpc.GateServicer):
    """The actor. Everything happens on its event loop."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(32)
        self._links: dict[str, _Link] = {}
        self.service: GateService | None = None
        self._address: str | None = None
        self._server: Any = None
        self._wake = asyncio.Event()
        self._offer_s = 0.001  # that an offer takes, of late
        self._tick_s = 0.001  # and a tick
        self._ticked_at = 0.0
        self._starting = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def where(self, setup: GateSetup) -> GateAddress:
        """Where to connect. The first caller of a life, or one with another setup, starts it."""
        async with self._starting:
            if self.service is None or self.service.setup != setup:
                await self._start(setup)
        assert self._address is not None
        return GateAddress(self._address, self._token, os.getpid())

    async def pid(self) -> int:
        return os.getpid()

    async def _start(self, setup: GateSetup) -> None:
        predictor = self.service.learner.predictor if self.service else _load(setup.snapshot_file)
        self._open_books(setup, predictor)
        if self._address is None:
            server = grpc.aio.server()
            gate_pb2_grpc.add_GateServicer_to_server(self, server)
            host = setup.host or ray.util.get_node_ip_address()
            port = server.add_insecure_port(f"{host}:0")
            await server.start()
            self._server = server
            self._address = f"{host}:{port}"
            self._tasks = [
                asyncio.ensure_future(self._always(each))
                for each in (self._work, self._beat, self._learn, self._save)
            ]
            # What is here by now stays; looking through it again and again would cost each offer.
            gc.collect()
            gc.freeze()
            log.info("the gate listens on %s", self._address)

    def _open_books(self, setup: GateSetup, predictor: LengthPredictor) -> None:
        self.service = GateService(setup, predictor, self._outgoing, time.monotonic())
        for link in self._links.values():
            link.left.set()  # they come again, and say what workers run

    async def _always(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except Exception:
                log.exception("a fault in the gate's %s", work.__name__.strip("_"))
                await asyncio.sleep(FAULT_REST_S)

    @contextlib.contextmanager
    def _judging(self) -> Iterator[None]:
        """A fault while the books are used leaves them as nobody knows: new ones are opened.

        As after a restart: who waits goes on without the gate, what was learnt is kept.
        """
        service = self.service
        assert service is not None
        try:
            yield
        except Exception:
            log.critical("the gate's books are at fault, and are made anew from what workers say")
            if service is self.service:
                self._open_books(service.setup, service.learner.predictor)
            raise

    async def Connect(self, _: Any, context: Any) -> None:
        """Serve one ingress until either end leaves; what waits of it is then dropped."""
        await self._check(context)
        link = _Link()
        reading = asyncio.ensure_future(self._read(link, context))
        writing = asyncio.ensure_future(self._write(link, context))
        leaving = asyncio.ensure_future(link.left.wait())
        try:
            await asyncio.wait((reading, writing, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, writing, leaving):
                task.cancel()
            if reading.done() and not reading.cancelled() and (error := reading.exception()):
                log.error("a fault with what an ingress told", exc_info=error)
            if self._links.get(link.ingress) is link:
                del self._links[link.ingress]
                if self.service is not None:
                    self.service.ingress_left(link.ingress)

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        await self._check(context)
        assert self.service is not None
        return self.service.explain(time.monotonic(), min(request.limit or 32, 1000))

    async def close(self) -> None:
        """End, for tests: Ray kills the process."""
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            await self._server.stop(0)

    async def _check(self, context: Any) -> None:
        shown = dict(context.invocation_metadata()).get(TOKEN_KEY, "")
        if self.service is None or not hmac.compare_digest(
            str(shown).encode(), self._token.encode()
        ):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong gate token")

    async def _read(self, link: _Link, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            service = self.service
            assert service is not None
            if not link.ingress:
                link.ingress = message.ingress_id
                self._links[link.ingress] = link
                service.ingress_joined(link.ingress)
            with self._judging():
                service.receive(link.ingress, message, time.monotonic())
            asking = [
                each.request_id
                for each in message.offers
                if not (each.HasField("credit_epoch") or each.text_follows)
            ]
            takes_s = len(service.inbox) * self._offer_s + self._tick_s
            if asking and takes_s <= INLINE_S and self._rest_s() <= 0:
                self._turn()
                self._tick()
            if asking:
                service.report_queued(asking, link.ingress)
                link.filled.set()
            if service.num_waiting:
                self._wake.set()
            elif service.inbox:  # they are in: their worker's first step goes before the books
                asyncio.get_running_loop().call_later(HELD_S, self._wake.set)

    async def _write(self, link: _Link, context: Any) -> None:
        while True:
            await link.filled.wait()
            link.filled.clear()
            message, link.message = link.message, pb.ToIngress()
            if link.ingress and self.service is not None:
                message.credits.CopyFrom(self.service.credits(link.ingress, time.monotonic()))
            await context.write(message)

    def _outgoing(self, ingress: str) -> pb.ToIngress:
        """The message to `ingress` that is being made; it is sent soon."""
        link = self._links.get(ingress)
        if link is None:
            return pb.ToIngress()  # gone: nobody hears it
        link.filled.set()
        return link.message

    async def _work(self) -> None:
        """Offers that came faster than they could be judged; and those that wait."""
        while True:
            service = self.service
            assert service is not None
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
        assert service is not None
        began_s = now_s = time.monotonic()
        num = 0
        with self._judging():
            while now_s - began_s < SLICE_S and service.judge_next(now_s):
                now_s, num = time.monotonic(), num + 1
        if num:
            self._offer_s += 0.1 * ((now_s - began_s) / num - self._offer_s)

    def _tick(self) -> None:
        assert self.service is not None
        began_s = time.monotonic()
        with self._judging():
            self.service.tick(began_s)
        self._ticked_at = time.monotonic()
        self._tick_s = self._ticked_at - began_s

    def _rest_s(self) -> float:
        return self._ticked_at + REST * self._tick_s - time.monotonic()

    def _may_tick(self) -> bool:
        assert self.service is not None
        return self._rest_s() <= 0 and self.service.are_all_judged(time.monotonic())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            service = self.service
            assert service is not None
            figures = service.figures()
            for link in self._links.values():
                link.message.figures.CopyFrom(figures)
                link.filled.set()

    async def _learn(self) -> None:
        while True:
            await asyncio.sleep(LABELS_S)
            service, began_s = self.service, time.monotonic()
            assert service is not None
            while time.monotonic() - began_s < SLICE_S and service.learner.learn():
                pass

    async def _save(self) -> None:
        saved = 0
        while True:
            await asyncio.sleep(SNAPSHOT_S)
            service = self.service
            assert service is not None
            file, learnt = service.setup.snapshot_file, service.learner.num_learnt
            if file is None or learnt == saved:
                continue
            saved = learnt
            still = copy.deepcopy(
                service.learner.predictor
            )  # the thread reads it while others learn
            try:
                await asyncio.to_thread(_save_to, file, still)
            except OSError as error:
                log.warning("cannot save what was learnt to %s: %s", file, error.strerror)


class _Link:
    """The stream of one ingress."""

    def __init__(self) -> None:
        self.ingress = ""
        self.message = pb.ToIngress()
        self.filled = asyncio.Event()
        self.left = asyncio.Event()


def _load(file: str | None) -> LengthPredictor:
    """What an earlier life had learnt, or nothing."""
    if file is None or not Path(file).exists():
        return LengthPredictor()
    try:
        return restore(Path(file).read_bytes())
    except (OSError, SnapshotError) as error:
        log.warning("%s is not used: %s", file, error)
        return LengthPredictor()


def _save_to(file: str, predictor: LengthPredictor) -> None:
    """Whole or not at all."""
    made = Path(f"{file}.{os.getpid()}")
    made.write_bytes(snapshot(predictor))
    made.replace(file)


class GateActor:
    """One cluster's gate, from any process of it: made by whoever asks first, as the registry."""

    def __init__(self, app_name: str, setup: GateSetup):
        self._name = f"{app_name}-gate"
        self._setup = setup
        self._handle: Any = None

    async def where(self) -> GateAddress:
        """Where the gate is. Raises Ray's errors or TimeoutError while it is away."""
        # Looking up a name waits for Ray's control plane, which may be away: never on the loop.
        actor = self._handle or await asyncio.to_thread(self._actor)
        try:
            address: GateAddress = await asyncio.wait_for(
                actor.where.remote(self._setup), CALL_TIMEOUT_S
            )
        except RayActorError:
            self._handle = None
            raise
        return address

    def _actor(self) -> Any:
        if self._handle is None:
            options = {
                "name": self._name,
                "namespace": NAMESPACE,
                "get_if_exists": True,
                "lifetime": "detached",
                "max_restarts": -1,
                "num_cpus": 0,
            }
            self._handle = ray.remote(GateServer).options(**options).remote()
        return self._handle


def end_gate(app_name: str) -> None:
    """Take the gate of an application away, if there is one."""
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(f"{app_name}-gate", namespace=NAMESPACE))
