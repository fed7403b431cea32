"""An ingress as a Serve deployment: its listeners, its heartbeat, and how it drains.

Requests are the request core's (core/) and the front ends' (http/, grpc/). Begin with
`open_listeners`. The driver imports this file, too, to deploy the class, so what only a replica
needs is imported when there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from penstock.deployments.config import ServeConfig
from penstock.deployments.gate.types import GateSetup, digest_of
from penstock.deployments.supervision.ray_workarounds import keep_serve_port_local
from penstock.deployments.supervision.registry import RegistryClient
from penstock.deployments.supervision.replicas import configure_logging, start_failure
from penstock.deployments.supervision.view import ClusterView, IngressInfo, short_node
from penstock.workers.errors import ConfigError, LoadError

if TYPE_CHECKING:
    from penstock.deployments.ingress.models import IngressModel
    from penstock.deployments.security.cluster_links import ClusterCertificate

log = logging.getLogger("penstock.ingress")

BEAT_S = 0.5
STARTING_BEAT_S = 0.1  # while workers are missing: those that start are waited for
CONNECT_S = 5.0  # longest that an ingress which starts waits for connections with the workers


@serve.ingress()
class IngressReplica:
    """What clients reach: HTTP under uvicorn, and gRPC, both on the replica's event loop.

    Serve's own HTTP route gets the same app, so that a proxy or KubeRay finds it there.
    """

    async def __init__(  # type: ignore[misc]
        self, config: ServeConfig, setups: tuple[GateSetup | None, ...], *_workers: Any
    ):
        """`setups`: of the gate of each model; None: it has no gate. `_workers`: Serve's handles on
        the workers, passed so that Serve deploys all as one application. Raises what
        `open_listeners` does."""
        from penstock.deployments.ingress import garbage
        from penstock.deployments.ingress.listeners import open_listeners

        configure_logging(config)
        keep_serve_port_local()
        self._config, self._setups = config, setups
        self._registry = RegistryClient(config.app_name)
        self._ingress_id = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._gate_tasks: list[asyncio.Task[None]] = []
        self._heartbeat: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._view = ClusterView()
        certificate = await self._load_certificate()
        self._models = [
            await self._model(each, setup, certificate)
            for each, setup in zip(config.each_model, setups, strict=True)
        ]
        await self._connect_workers()
        try:
            self._listeners = await open_listeners(
                config,
                self._models,
                lambda: self._view,
                self._ingress_id,
                cluster=None if certificate is None else certificate.certificates,
            )
        except Exception as error:
            message = start_failure("an ingress", error)
            await asyncio.to_thread(self._registry.call_now, "failed", message, "Ingress")
            raise
        open_calls = self._listeners.core.open_calls
        self._collecting = garbage.begin(lambda: open_calls.num)
        self._heartbeat = asyncio.ensure_future(self._beat_forever())

    async def _model(
        self, config: ServeConfig, setup: GateSetup | None, certificate: ClusterCertificate | None
    ) -> IngressModel:
        """The connections for one model. `config`: its own."""
        from penstock.deployments.gate.actor import GateActor
        from penstock.deployments.ingress.dispatch.gate_client import GateClient
        from penstock.deployments.ingress.dispatch.pool import WorkerPool
        from penstock.deployments.ingress.models import IngressModel

        tokenizer = await asyncio.to_thread(_tokenizer_digest, config)
        gate = None
        if setup is not None:
            assert config.gate_answer_ms is not None, "placement.resolve sets it"
            gate = GateClient(
                self._ingress_id,
                GateActor(config.gate_scope, setup).where,
                answer_s=config.gate_answer_ms / 1000,
                tokenizer_digest=tokenizer,
                certificate=certificate,
            )
            self._gate_tasks.append(asyncio.ensure_future(gate.run()))
        pool = WorkerPool(
            self._ingress_id,
            gate,
            may_wake=setup is not None and setup.may_wake,
            tokenizer_digest=tokenizer,
            lost_wait_s=config.lost_wait_s,
            longest_wait_s=config.longest_wait_s,
            tls=None if certificate is None else partial(certificate.client_end, "worker"),
        )
        return IngressModel(config, pool, gate)

    async def _load_certificate(self) -> ClusterCertificate | None:
        """For connections with workers and gate; None: in the clear. Raises ConfigError."""
        from penstock.deployments.security.cluster_links import ClusterCertificate

        folder = self._config.cluster_certs_dir
        if folder is None:
            return None
        try:
            return await asyncio.to_thread(ClusterCertificate, folder, "ingress")
        except ConfigError as error:
            message = start_failure("an ingress", error)
            await asyncio.to_thread(self._registry.call_now, "failed", message, "Ingress")
            raise

    async def _connect_workers(self) -> None:
        """Connect with the workers that serve, before clients can connect with this ingress.

        Otherwise an ingress that joins a cluster would refuse its first requests.
        """
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError, ValueError):
            self._view = await self._registry.view()
        for each in self._models:
            each.update(self._view, len(self._view.ingresses) + 1)
        workers = [info for each in self._models for info in each.workers_in(self._view)]
        num = sum(not info.is_draining for info in workers)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_S):
                while sum(each.pool.num_connected for each in self._models) < num:
                    await asyncio.sleep(0.02)

    def __serve_build_asgi_app__(self) -> Any:
        return self._listeners.app

    async def check_health(self) -> None:
        if self._draining is not None:
            return
        if self._listeners.http_task.done():
            raise RuntimeError("the HTTP listener has ended")
        if self._heartbeat is None or self._heartbeat.done():
            raise RuntimeError("the heartbeat has ended: this ingress no longer follows workers")

    async def _beat_forever(self) -> None:
        """Report to the registry at every heartbeat, and follow its view of the workers.

        While the registry cannot be reached, the workers known so far stay in use. While this
        ingress drains, the heartbeats continue: the registry lists it until it has ended.
        """
        while True:
            try:
                view = await self._registry.ingress_beat(self._info())
            except (ray.exceptions.RayError, TimeoutError, ValueError) as error:
                log.debug("no answer from the registry: %s", type(error).__name__)
            else:
                self._view = view
                runtimes = self._listeners.core.runtimes
                for each, runtime in zip(self._models, runtimes, strict=True):
                    each.update(view, len(view.ingresses))
                    runtime.metrics.keep(info.address for info in each.workers_in(view))
                    if each.config.engine.enable_lora:
                        names = each.adapters_in(view)
                        if names is not None:
                            runtime.served.adapters.names = names
            if self._view.is_draining:
                self._start_drain()
            lacks = any(each.pool.num_connected < each.config.min_workers for each in self._models)
            await asyncio.sleep(STARTING_BEAT_S if lacks or self._lacks_gate else BEAT_S)

    @property
    def _lacks_gate(self) -> bool:
        return any(each.gate is not None and not each.gate.is_connected for each in self._models)

    def _info(self) -> IngressInfo:
        config, metrics = self._config, self._listeners.metrics
        reached = [(each.config.model_name, each.pool.num_connected) for each in self._models]
        setup = next((each for each in self._setups if each is not None), None)
        return IngressInfo(
            ingress_id=self._ingress_id,
            pid=os.getpid(),
            http_address=config.address(config.http_port),
            grpc_address=config.address(config.grpc_port),
            num_workers=sum(num for _, num in reached),
            workers_of=tuple(reached),
            metrics_address=metrics.address if metrics is not None else "",
            num_connections=self._listeners.num_connections,
            node=short_node(ray.get_runtime_context().get_node_id()),
            lacks_gate=self._lacks_gate,
            num_waiting=sum(each.gate.num_waiting for each in self._models if each.gate),
            warnings=self._listeners.warnings.now(),
            is_draining=self._draining is not None,
            generation=0 if setup is None else setup.generation,
            digest=digest_of(self._setups),
            jobs=self._listeners.jobs.own(),
            sampling_defaults=tuple(
                (each.served.name, str(each.sampling_defaults))
                for each in self._listeners.core.runtimes
                if str(each.sampling_defaults)
            ),
            tool_notes=tuple(
                (each.served.name, each.tool_note)
                for each in self._listeners.core.runtimes
                if each.tool_note
            ),
        )

    async def drain(self) -> None:
        """Let requests finish for `drain_s`, then end them with an error.

        May be called more than once: each call returns when the drain is over.
        """
        if self._heartbeat is None:  # the replica never started
            return
        await self._start_drain()

    def _start_drain(self) -> asyncio.Task[None]:
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())
        return self._draining

    async def _drain(self) -> None:
        notice_s, drain_s = self._config.drain_notice_s, self._config.drain_s
        closing_pool = asyncio.ensure_future(self._close_pool_after(notice_s + drain_s))
        await self._listeners.close(notice_s, drain_s)
        closing_pool.cancel()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            self._collecting.cancel()
        await self._close_pools()
        for task in self._gate_tasks:
            task.cancel()
        if self._listeners.metrics is not None:
            await asyncio.to_thread(self._listeners.metrics.close)
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError, ValueError):
            await self._registry.ingress_left(self._ingress_id)

    async def _close_pool_after(self, seconds: float) -> None:
        """End running requests, so that their clients get an error and not a broken connection."""
        await asyncio.sleep(seconds)
        await self._close_pools()

    async def _close_pools(self) -> None:
        await asyncio.gather(*(each.pool.close() for each in self._models))

    async def __del__(self) -> None:  # Serve calls it when it stops a replica
        await self.drain()


def _tokenizer_digest(config: ServeConfig) -> str:
    """Of the configured model; empty if its files cannot be read, which loading reports."""
    from penstock.workers.weights.model_digest import verified_text

    try:
        return verified_text(config.engine)[1]
    except (LoadError, OSError, ValueError):
        return ""
