"""The expert stores that fill a worker's expert caches: that of its node, or one elsewhere, and
those of other nodes that have ranks of its group, each with the experts of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from penstock.deployments.config import ServeConfig
from penstock.deployments.experts.client import ExpertStoreClient
from penstock.deployments.experts.remote import RemoteExperts
from penstock.deployments.experts.spec import StoreSpec
from penstock.deployments.placement import uses_gpus
from penstock.deployments.supervision.replicas import cluster_resources
from penstock.deployments.worker.store_heartbeat import StoreHeartbeat
from penstock.workers.experts.expert_file import ExpertShare, Manifest, RowSource, copies_for
from penstock.workers.quantization import int4_options
from penstock.workers.weights.model_digest import verified_folder
from penstock.workers.worker import Worker


@dataclass(frozen=True, slots=True)
class WorkerStores:
    """A store for each machine of the worker's group, the first being the worker's own; None where
    no rank of the machine has experts."""

    clients: tuple[ExpertStoreClient | None, ...]
    manifests: tuple[Manifest | None, ...]

    @classmethod
    def start(cls, config: ServeConfig, nodes: Sequence[str]) -> WorkerStores:
        """Wait until all have their experts. `nodes`: ids of those that the group has.

        Raises as ExpertStoreClient.manifest, and ConfigError for a model that cannot be divided.
        """
        spec = _spec(config)
        clients: list[ExpertStoreClient | None] = [ExpertStoreClient(spec, nodes[0])]
        if len(nodes) > 1:
            shares = _shares(config, len(nodes))
            clients = [
                ExpertStoreClient(replace(spec, shares=each), node) if each else None
                for node, each in zip(nodes, shares, strict=True)
            ]
        with ThreadPoolExecutor(len(clients)) as pool:  # each reads its part at the same time
            return cls(tuple(clients), tuple(pool.map(_manifest, clients)))

    def remote_experts(self) -> RowSource | None:
        """For a store of all nodes that is not on this one; else None: its file can be mapped."""
        client, manifest = self.clients[0], self.manifests[0]
        if client is None or manifest is None or client.is_on_this_node():
            return None
        return RemoteExperts(client, manifest)

    def heartbeats(self, worker: Worker) -> list[StoreHeartbeat]:
        """A heartbeat for each of these stores."""
        return [
            StoreHeartbeat(client, worker, manifest.epoch, machine)
            for machine, (client, manifest) in enumerate(zip(self.clients, self.manifests))
            if client is not None and manifest is not None
        ]


def _manifest(client: ExpertStoreClient | None) -> Manifest | None:
    return None if client is None else client.manifest_for_start()


def _shares(config: ServeConfig, num_nodes: int) -> list[tuple[ExpertShare, ...]]:
    """Of each machine of a group."""
    from penstock.workers.engine.group.expert_shares import shares_of_machine  # these load torch
    from penstock.workers.model_config import ModelConfig

    model = ModelConfig.from_pretrained(verified_folder(config.engine))
    return [shares_of_machine(config.engine, model, machine) for machine in range(num_nodes)]


def _spec(config: ServeConfig) -> StoreSpec:
    engine = config.engine
    return StoreSpec(
        config.app_name,
        engine.model,
        engine.weights,
        "cuda" if uses_gpus(config, cluster_resources()) else "cpu",
        engine.expert_store_dir,
        copies=copies_for(engine.moe_mode, engine.weights, engine.moe_copies),
        is_single=engine.expert_store == "one",
        revision=engine.revision,
        download_dir=engine.download_dir,
        int4=int4_options(engine),
    )
