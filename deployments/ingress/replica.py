"""An ingress as a Serve deployment: its listeners, its heartbeat, and how it drains.

Requests are the request core's (core/) and the front ends' (http/, grpc/). Begin with
`open_listeners`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import uvicorn
from ray import serve

from penstock.deployments.config import ServeConfig, read_api_keys
from penstock.deployments.gate.server import GateActor
from penstock.deployments.gate.types import GateSetup
from penstock.deployments.ingress.core.reasoning import find_marks
from penstock.deployments.ingress.core.request_metrics import RequestMetrics
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.deployments.ingress.grpc.server import start_server
from penstock.deployments.ingress.http.app import build_app
from penstock.deployments.ingress.metrics.collector import PenstockCollector
from penstock.deployments.ingress.metrics.server import MetricsServer
from penstock.deployments.supervision.ray_workarounds import keep_serve_port_local
from penstock.deployments.supervision.registry import ClusterView, IngressInfo, RegistryClient
from penstock.deployments.supervision.replicas import configure_logging, start_failure
from penstock.workers.context_policy import ContextSettings
from penstock.workers.model_config import read_limits
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model

log = logging.getLogger("penstock.ingress")

BEAT_S = 0.5
FAREWELL_S = 1.0  # after the drain, for errors to reach clients
# Longer than clients and proxies keep an idle connection (httpx 5 s, most proxies 60 s). The client
# must close it first, or a request can meet a connection that the server is closing.
KEEP_ALIVE_S = 75


@dataclass(frozen=True, slots=True, eq=False)
class Listeners:
    """Everything that listens for one ingress, open. `app` also serves Serve's own HTTP route."""

    app: Any  # ASGI
    http: uvicorn.Server
    http_task: asyncio.Task[None]
    grpc: Any  # grpc.aio.Server
    metrics: MetricsServer | None  # None: metrics are off
    request_metrics: RequestMetrics

    async def close(self, drain_s: float) -> None:
        """Accept nothing new; return when all connections have ended, or `drain_s` is over."""
        self.http.should_exit = True
        await asyncio.gather(self.grpc.stop(drain_s + FAREWELL_S), self.http_task)


async def open_listeners(
    config: ServeConfig,
    pool: WorkerPool,
    gate: GateClient | None,
    view: Callable[[], ClusterView],
) -> Listeners:
    """Load the tokenizer, build the request core, and listen for HTTP, gRPC and Prometheus.

    `view`: what the registry reported last. Raises ConfigError, LoadError or OSError.
    """
    core = await _request_core(config, pool, gate)
    api_keys = read_api_keys(config.api_keys_file) if config.api_keys_file else ()
    app = build_app(
        core,
        api_keys=api_keys,
        workers=lambda: view().workers,
        gate=gate,
        admission=config.admission,
    )
    http = uvicorn.Server(
        uvicorn.Config(
            app,
            lifespan="off",
            access_log=False,
            log_config=None,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=round(config.drain_s + FAREWELL_S),
        )
    )
    listener = _listen(config.host, config.http_port)
    http_task = asyncio.ensure_future(http.serve(sockets=[listener]))
    grpc = await start_server(core, config.address(config.grpc_port), api_keys=api_keys)
    metrics = None
    if config.metrics_port:
        collector = PenstockCollector(core.metrics, lambda: view().workers, gate)
        # In a thread: it looks up the name of the address.
        metrics = await asyncio.to_thread(
            MetricsServer, collector, config.metrics_host, config.metrics_port
        )
    return Listeners(app, http, http_task, grpc, metrics, core.metrics)


async def _request_core(
    config: ServeConfig, pool: WorkerPool, gate: GateClient | None
) -> RequestCore:
    """The request core for the configured model. Raises ConfigError or LoadError."""
    folder = await asyncio.to_thread(resolve_model, config.engine.model)
    vocab_size, max_model_len = read_limits(folder)
    max_model_len = min(max_model_len, config.engine.max_model_len or max_model_len)
    tokenizer = Tokenizer.load(folder)
    return RequestCore(
        tokenizer,
        pool,
        model_name=config.model_name,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        contexts=ContextSettings.of(config.engine, max_model_len),
        marks=find_marks(config.reasoning_marks, tokenizer),
        learner=gate,
    )


@serve.ingress()
class IngressReplica:
    """What clients reach: HTTP under uvicorn, and gRPC, both on the replica's event loop.

    Serve's own HTTP route gets the same app, so that a proxy or KubeRay finds it there.
    """

    async def __init__(  # type: ignore[misc]
        self, config: ServeConfig, setup: GateSetup | None, _workers: Any
    ):
        """`setup`: of the gate; None: there is no gate. `_workers`: Serve's handle on the workers,
        passed so that Serve deploys both as one application. Raises what `open_listeners` does."""
        configure_logging(config)
        keep_serve_port_local()
        self._config = config
        self._registry = RegistryClient(config.app_name)
        self._ingress_id = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._gate: GateClient | None = None
        self._gate_task: asyncio.Task[None] | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._view = ClusterView()
        if setup is not None:
            assert config.gate_answer_ms is not None, "placement.resolve sets it"
            actor = GateActor(config.app_name, setup)
            answer_s = config.gate_answer_ms / 1000
            self._gate = GateClient(self._ingress_id, actor.where, answer_s=answer_s)
            self._gate_task = asyncio.ensure_future(self._gate.run())
        self._pool = WorkerPool(self._ingress_id, self._gate)
        try:
            self._listeners = await open_listeners(
                config, self._pool, self._gate, lambda: self._view
            )
        except Exception as error:
            message = start_failure("an ingress", error)
            await asyncio.to_thread(self._registry.call_now, "failed", message)
            raise
        # Objects made so far live as long as the process: keep the collector from visiting them
        # again and again, which costs a few percent.
        gc.collect()
        gc.freeze()
        self._heartbeat = asyncio.ensure_future(self._beat_until_drained())

    def __serve_build_asgi_app__(self) -> Any:
        return self._listeners.app

    async def check_health(self) -> None:
        if self._draining is not None:
            return
        if self._listeners.http_task.done():
            raise RuntimeError("the HTTP listener has ended")
        if self._heartbeat is None or self._heartbeat.done():
            raise RuntimeError("the heartbeat has ended: this ingress no longer follows workers")

    async def _beat_until_drained(self) -> None:
        """Report to the registry every `BEAT_S`, and follow its view of the workers.

        While the registry cannot be reached, the workers known so far stay in use.
        """
        while not self._view.is_draining:
            try:
                view = await self._registry.ingress_beat(self._info())
            except (ray.exceptions.RayError, TimeoutError, ValueError) as error:
                log.debug("no answer from the registry: %s", type(error).__name__)
            else:
                self._view = view
                self._pool.update(info for info, _ in view.workers)
                self._listeners.request_metrics.keep(info.address for info, _ in view.workers)
            if not self._view.is_draining:
                await asyncio.sleep(BEAT_S)
        self._start_drain()

    def _info(self) -> IngressInfo:
        config, metrics = self._config, self._listeners.metrics
        return IngressInfo(
            ingress_id=self._ingress_id,
            pid=os.getpid(),
            http_address=config.address(config.http_port),
            grpc_address=config.address(config.grpc_port),
            num_workers=self._pool.num_connected,
            metrics_address=metrics.address if metrics is not None else "",
        )

    async def drain(self) -> None:
        """Accept nothing new; let requests finish for `drain_s`, then end them with an error.

        May be called more than once: each call returns when the drain is over.
        """
        if self._heartbeat is None:  # the replica never started
            return
        self._heartbeat.cancel()
        await self._start_drain()

    def _start_drain(self) -> asyncio.Task[None]:
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())
        return self._draining

    async def _drain(self) -> None:
        drain_s = self._config.drain_s
        closing_pool = asyncio.ensure_future(self._close_pool_after(drain_s))
        await self._listeners.close(drain_s)
        closing_pool.cancel()
        await self._pool.close()
        if self._gate_task is not None:
            self._gate_task.cancel()
        if self._listeners.metrics is not None:
            await asyncio.to_thread(self._listeners.metrics.close)
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError, ValueError):
            await self._registry.ingress_left(self._ingress_id)

    async def _close_pool_after(self, seconds: float) -> None:
        """End what still runs, so that its clients get an error and not a cut connection."""
        await asyncio.sleep(seconds)
        await self._pool.close()

    async def __del__(self) -> None:  # Serve calls it when it stops a replica
        await self.drain()


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket that other ingress replicas on this machine can share."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    listener.listen(2048)
    return listener
