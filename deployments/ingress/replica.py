"""An ingress as a Serve deployment: both listeners, the way to the workers, and a clean end.

What requests may say, and what becomes of them, is the request core's and the front ends'.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import socket
from typing import Any

import ray
import uvicorn
from ray import serve

from penstock.deployments.config import ServeConfig, read_api_keys
from penstock.deployments.gate.server import GateActor
from penstock.deployments.gate.service import GateSetup
from penstock.deployments.ingress.core.reasoning import find_marks
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.deployments.ingress.grpc import server as grpc_ingress
from penstock.deployments.ingress.http import app as http_ingress
from penstock.deployments.ingress.metrics.collector import PenstockCollector
from penstock.deployments.ingress.metrics.server import MetricsServer
from penstock.deployments.supervision.registry import ClusterView, IngressInfo, RegistryClient
from penstock.deployments.supervision.replicas import configure_logging, hide_serve_port, in_words
from penstock.workers.context_policy import ContextSettings
from penstock.workers.model_config import read_limits
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model

log = logging.getLogger("penstock.ingress")

BEAT_S = 0.5
GATE_ANSWER_MS = 20.0
FAREWELL_S = 1.0  # after draining, for errors to reach clients
# Longer than clients and proxies keep an idle connection (httpx 5 s, most proxies 60): it must be
# they who close it, or a request meets a closed connection.
KEEP_ALIVE_S = 75


@serve.ingress()
class IngressReplica:
    """What clients reach: HTTP under uvicorn, and gRPC, both on the replica's event loop.

    Serve's own HTTP route gets the same app, so that a proxy or KubeRay finds it where it looks.
    """

    async def __init__(  # type: ignore[misc]
        self, config: ServeConfig, setup: GateSetup | None, _workers: Any
    ):
        """`setup`: of the gate; None: there is none. `_workers`: Serve's handle on the workers;
        being given it makes them one application."""
        configure_logging(config)
        hide_serve_port()
        self._config = config
        self._registry = RegistryClient(config.app_name)
        self._ingress_id = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._gate: GateClient | None = None
        self._asking: asyncio.Task[None] | None = None
        if setup is not None:
            actor = GateActor(config.app_name, setup)
            answer_s = (config.gate_answer_ms or GATE_ANSWER_MS) / 1000
            self._gate = GateClient(self._ingress_id, actor.where, answer_s=answer_s)
            self._asking = asyncio.ensure_future(self._gate.run())
        self._pool = WorkerPool(self._ingress_id, self._gate)
        self._is_draining = False
        self._view = ClusterView()
        self._metrics: MetricsServer | None = None
        try:
            await self._open()
        except Exception as error:
            words = in_words("an ingress", error)
            await asyncio.to_thread(self._registry.call_now, "failed", words)
            raise
        self._beating = asyncio.ensure_future(self._beat_forever())

    async def _open(self) -> None:
        """Load the tokenizer, build the request core, and open both listeners."""
        config = self._config
        folder = await asyncio.to_thread(resolve_model, config.engine.model)
        vocab_size, max_model_len = read_limits(folder)
        tokenizer = Tokenizer.load(folder)
        max_model_len = min(max_model_len, config.engine.max_model_len or max_model_len)
        core = RequestCore(
            tokenizer,
            self._pool,
            model_name=config.model_name,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            contexts=ContextSettings.of(config.engine, max_model_len),
            marks=find_marks(config.reasoning_marks, tokenizer),
            learner=self._gate,
        )
        api_keys = read_api_keys(config.api_keys_file) if config.api_keys_file else ()
        self._asgi_app = http_ingress.build_app(
            core,
            api_keys=api_keys,
            workers=lambda: self._view.workers,
            gate=self._gate,
            admission=config.admission,
        )
        self._http = uvicorn.Server(
            uvicorn.Config(
                self._asgi_app,
                lifespan="off",
                access_log=False,
                log_config=None,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=round(config.drain_s + FAREWELL_S),
            )
        )
        listener = _listen(config.host, config.http_port)
        self._http_task = asyncio.ensure_future(self._http.serve(sockets=[listener]))
        self._grpc = await grpc_ingress.start_server(
            core, config.address(config.grpc_port), api_keys=api_keys
        )

        # What is here by now stays; looking through it again and again would cost a few percent.
        gc.collect()
        gc.freeze()
        self._request_metrics = core.metrics
        if config.metrics_port:
            collector = PenstockCollector(core.metrics, lambda: self._view.workers, self._gate)
            # Not on the loop: it asks for the name of the address.
            self._metrics = await asyncio.to_thread(
                MetricsServer, collector, config.metrics_host, config.metrics_port
            )

    def __serve_build_asgi_app__(self) -> Any:
        return self._asgi_app

    async def check_health(self) -> None:
        if self._is_draining:
            return
        if self._http_task.done():
            raise RuntimeError("the HTTP listener has ended")
        if self._beating.done():
            raise RuntimeError("this ingress no longer hears of workers")

    async def _beat_forever(self) -> None:
        """Tell the registry that this ingress lives, and hear which workers do.

        While the registry is away, the workers known so far go on.
        """
        config = self._config
        while True:
            info = IngressInfo(
                ingress_id=self._ingress_id,
                pid=os.getpid(),
                http_address=config.address(config.http_port),
                grpc_address=config.address(config.grpc_port),
                num_workers=self._pool.num_connected,
                metrics_address=self._metrics.address if self._metrics is not None else "",
            )
            try:
                view = await self._registry.ingress_beat(info)
            except (ray.exceptions.RayError, TimeoutError, ValueError) as error:
                log.debug("the registry does not answer: %s", type(error).__name__)
            else:
                self._view = view
                self._pool.update(info for info, _ in view.workers)
                self._request_metrics.keep(info.address for info, _ in view.workers)
                if view.is_draining:
                    break
            await asyncio.sleep(BEAT_S)
        await self.drain()

    async def drain(self) -> None:
        """Take nothing new, and let what runs end for `drain_s`; tell the rest that it cannot."""
        if self._is_draining:
            return
        self._is_draining = True
        drain_s = self._config.drain_s
        self._http.should_exit = True
        closing = asyncio.ensure_future(self._close_pool_after(drain_s))
        await asyncio.gather(self._grpc.stop(drain_s + FAREWELL_S), self._http_task)
        closing.cancel()
        await self._pool.close()
        if self._asking is not None:
            self._asking.cancel()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError, ValueError):
            await self._registry.ingress_left(self._ingress_id)

    async def _close_pool_after(self, seconds: float) -> None:
        """Break off what still runs, so that its clients get an error, not a cut connection."""
        await asyncio.sleep(seconds)
        await self._pool.close()

    async def __del__(self) -> None:
        if hasattr(self, "_beating"):
            self._beating.cancel()
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
