"""The Serve deployment of one worker: Ray supervises it, and it sends heartbeats.

The registry and the expert store receive the heartbeats. workers/worker.py computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import ray

from penstock.deployments.config import ServeConfig
from penstock.deployments.security.cluster_links import ClusterCertificate
from penstock.deployments.supervision.ray_workarounds import keep_serve_port_local
from penstock.deployments.supervision.registry import RegistryClient
from penstock.deployments.supervision.replicas import configure_logging, start_failure
from penstock.deployments.supervision.view import short_node
from penstock.deployments.worker.expert_stores import WorkerStores
from penstock.deployments.worker.far_ranks import far_ranks, group_nodes
from penstock.deployments.worker.start_reports import StartReports
from penstock.deployments.worker.store_heartbeat import StoreHeartbeat
from penstock.workers.experts.expert_file import Manifest
from penstock.workers.stats import AdapterChange, EngineStats, WorkerInfo
from penstock.workers.worker import Worker

log = logging.getLogger("penstock.worker")


class WorkerReplica:
    """A Worker that Ray Serve supervises."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, config: ServeConfig, host: str | None, env_vars: Mapping[str, str]
    ):
        """`env_vars`: set before torch is imported, whose libraries read them then.

        Loading takes a thread: Serve's calls and this class may share an event loop.
        """
        os.environ.update(env_vars)
        configure_logging(config)
        keep_serve_port_local()
        self._drain_s = config.drain_s
        self._registry = RegistryClient(config.app_name)
        self._stores: Sequence[StoreHeartbeat] = ()
        self._is_changing = False  # adapters are being loaded or dropped
        self._node = short_node(ray.get_runtime_context().get_node_id())
        await asyncio.to_thread(self._load, config, host, env_vars)

    def _load(self, config: ServeConfig, host: str | None, env_vars: Mapping[str, str]) -> None:
        """Make the worker; report to the registry how that goes on, and why it fails."""
        starting = StartReports(self._registry, self._node)
        try:
            own_host = host or ray.util.get_node_ip_address()
            self._make(config, own_host, starting, env_vars)
        except Exception as error:
            who = f"a worker of {config.model_name}" if config.key else "a worker"
            message = start_failure(who, error)
            self._registry.call_now("failed", message, config.worker_deployment)
            raise
        finally:
            starting.close()

    def _make(
        self, config: ServeConfig, host: str, starting: StartReports, env_vars: Mapping[str, str]
    ) -> None:
        tls = None
        if config.cluster_certs_dir is not None:
            certificate = ClusterCertificate(config.cluster_certs_dir, "worker")
            tls = partial(certificate.server_end, "ingress")
        stores, manifests = None, tuple[Manifest | None, ...]()
        if config.engine.expert_cache_gb is not None:
            stores = WorkerStores.start(config, group_nodes(config))
            manifests = stores.manifests
        changes = ()
        if config.engine.enable_lora:
            changes = self._registry.call_now("adapter_changes", config.model_name)
        self._worker = Worker.load(
            config.engine,
            model_name=config.model_name,
            host=host,
            announce=self._announce,
            experts=manifests[0] if manifests else None,
            remote_experts=None if stores is None else stores.remote_experts(),
            tls=tls,
            report=starting,
            far=far_ranks(config, host, env_vars, manifests[1:]),
            changes=changes,
        )
        if stores is not None:
            self._stores = stores.heartbeats(self._worker)
            for store in self._stores:
                store.warm()

    async def _announce(self, info: WorkerInfo, stats: EngineStats) -> None:
        """Send heartbeats to the registry and to the worker's expert stores.

        The registry's waits for no store: a worker whose store hangs serves, and stays listed.
        """
        if stats.experts is not None:
            for store in self._stores:
                store.begin_heartbeat(info.epoch, stats.experts)
        changes = await self._registry.worker_beat(replace(info, node=self._node), stats)
        worker = getattr(self, "_worker", None)  # None: it is about to start
        if changes and worker is not None and not self._is_changing:
            self._is_changing = True
            # A large adapter takes longer than a heartbeat may.
            self._change = asyncio.ensure_future(self._change_adapters(worker, changes))

    async def _change_adapters(self, worker: Worker, changes: Sequence[AdapterChange]) -> None:
        try:
            await asyncio.to_thread(worker.change_adapters, changes)
        finally:
            self._is_changing = False

    def check_health(self) -> None:
        self._worker.check_health()

    async def __del__(self) -> None:
        """Drain the worker and stop it; Serve calls this when it stops a replica.

        Meanwhile the worker's heartbeats continue, with `is_draining`. The drain blocks a thread of
        its own: Serve's calls and those heartbeats run on this event loop.
        """
        worker = getattr(self, "_worker", None)
        if worker is None:  # it never started
            return
        log.info("draining: running requests have %g s to finish", self._drain_s)
        num_left = await asyncio.to_thread(worker.drain, self._drain_s)
        if num_left:
            log.warning(
                "%d requests did not end in %g s: they continue on other workers",
                num_left,
                self._drain_s,
            )
        await asyncio.to_thread(worker.stop)
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError, ValueError):
            await self._registry.worker_left(worker.info.epoch)
