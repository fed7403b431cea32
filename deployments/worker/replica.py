"""The Serve deployment of one worker: Ray supervises it, and it sends heartbeats.

The registry and the expert store receive the heartbeats. workers/worker.py computes.
"""

from __future__ import annotations

import contextlib

import ray

from penstock.deployments.config import ServeConfig
from penstock.deployments.experts.client import ExpertStoreClient
from penstock.deployments.experts.remote import RemoteExperts
from penstock.deployments.experts.spec import StoreSpec
from penstock.deployments.placement import uses_gpus
from penstock.deployments.supervision.ray_workarounds import keep_serve_port_local
from penstock.deployments.supervision.registry import RegistryClient
from penstock.deployments.supervision.replicas import (
    cluster_resources,
    configure_logging,
    start_failure,
)
from penstock.deployments.worker.store_heartbeat import StoreHeartbeat
from penstock.workers.stats import EngineStats, WorkerInfo
from penstock.workers.worker import Worker


class WorkerReplica:
    """A Worker that Ray Serve supervises."""

    def __init__(self, config: ServeConfig, host: str | None):
        configure_logging(config)
        keep_serve_port_local()
        self._drain_s = config.drain_s
        self._registry = RegistryClient(config.app_name)
        self._store: StoreHeartbeat | None = None
        try:
            client = _store_client(config)
            manifest, far = None, None
            if client is not None:
                manifest = client.manifest()
                far = None if client.is_on_this_node() else RemoteExperts(client, manifest)
            self._worker = Worker.load(
                config.engine,
                model_name=config.model_name,
                host=host or ray.util.get_node_ip_address(),
                announce=self._announce,
                experts=manifest,
                remote_experts=far,
            )
            if client is not None and manifest is not None:
                self._store = StoreHeartbeat(client, self._worker, manifest.epoch)
                self._store.warm()
        except Exception as error:
            self._registry.call_now("failed", start_failure("a worker", error))
            raise

    async def _announce(self, info: WorkerInfo, stats: EngineStats) -> None:
        """Send heartbeats to the registry and to the expert store of this node."""
        if self._store is not None and stats.experts is not None:
            await self._store.heartbeat(info.epoch, stats.experts)
        await self._registry.worker_beat(info, stats)

    def check_health(self) -> None:
        self._worker.check_health()

    def __del__(self) -> None:
        """Serve stops this replica: requests in flight may end first."""
        worker = getattr(self, "_worker", None)
        if worker is not None:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError, ValueError):
                self._registry.call_now("worker_left", worker.info.epoch)
            worker.stop(drain_s=self._drain_s)


def _store_client(config: ServeConfig) -> ExpertStoreClient | None:
    """The expert store of this node, if the experts are to come from one."""
    engine = config.engine
    if engine.expert_cache_gb is None:
        return None
    device = "cuda" if uses_gpus(config, cluster_resources()) else "cpu"
    spec = StoreSpec(
        config.app_name,
        engine.model,
        engine.weights,
        device,
        engine.expert_store_dir,
        has_int8_copies=engine.moe_mode == "quantized",
        is_single=engine.expert_store == "one",
    )
    return ExpertStoreClient(spec)
