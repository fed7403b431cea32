"""What each worker gets of the cluster: CPUs or a GPU, threads, and its environment.

Pure: `app.wire` reads the cluster, and binds what `resolve` decides. That happens once, when the
application is built: for nodes that come later, deploy again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.deployments.config import ServeConfig

GATE_ANSWER_MS = 20.0
GATE_ANSWER_BESIDE_WORKERS_MS = 200.0  # workers keep all cores busy, and a step takes as long
# OpenMP's threads wait for one another by spinning, for up to milliseconds. Where ingress and gate
# want the core, that delays both sides.
SHORT_SPINS = {"GOMP_SPINCOUNT": "1000"}


@dataclass(frozen=True, slots=True)
class Node:
    """One living node: what Ray has registered of it, used or not."""

    num_cpus: float = 0
    num_gpus: float = 0


@dataclass(frozen=True, slots=True)
class ClusterResources:
    """The living nodes of a cluster."""

    nodes: tuple[Node, ...] = ()

    @property
    def num_gpus(self) -> float:
        return sum(node.num_gpus for node in self.nodes)

    @staticmethod
    def of_ray(nodes: Sequence[Mapping[str, Any]]) -> ClusterResources:
        """From `ray.nodes()`."""
        alive = [node["Resources"] for node in nodes if node["Alive"]]
        return ClusterResources(
            tuple(Node(each.get("CPU", 0), each.get("GPU", 0)) for each in alive)
        )


@dataclass(frozen=True, slots=True)
class ReplicaResources:
    """What Ray reserves for one replica, and the environment of its process."""

    num_cpus: float
    num_gpus: float = 0
    env_vars: Mapping[str, str] = field(default_factory=dict)

    @property
    def actor_options(self) -> dict[str, Any]:
        """As Serve's `ray_actor_options`."""
        options: dict[str, Any] = {"num_cpus": self.num_cpus}
        if self.num_gpus:
            options["num_gpus"] = self.num_gpus
        if self.env_vars:
            options["runtime_env"] = {"env_vars": dict(self.env_vars)}
        return options


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A configuration whose automatic values are decided, and what its replicas get."""

    config: ServeConfig
    worker: ReplicaResources


def resolve(config: ServeConfig, cluster: ClusterResources | None) -> ResolvedConfig:
    """Decide what `config` leaves open. `cluster`: None where this process is connected with none.

    A worker has a GPU, or an equal share of its node's CPUs and as many threads.
    """
    engine, on_gpu = config.engine, uses_gpus(config, cluster)
    num_cpus, threads, env_vars = 1.0, engine.threads, {}
    if not on_gpu:
        num_cpus = 1.0 if cluster is None else _cpus_per_worker(config.num_workers, cluster)
        cores = engine.cores
        # Ray would set as many threads as it reserved CPUs; the number may be another one.
        threads = threads or max(
            1, int(num_cpus) if cores is None else len(cores) // config.num_workers
        )
        env_vars = dict(SHORT_SPINS)
    if threads is not None:  # read by OpenMP when torch is imported
        env_vars["OMP_NUM_THREADS"] = str(threads)
    answer_ms = GATE_ANSWER_MS if on_gpu else GATE_ANSWER_BESIDE_WORKERS_MS
    return ResolvedConfig(
        replace(
            config,
            engine=replace(engine, threads=threads),
            gate_answer_ms=config.gate_answer_ms or answer_ms,
        ),
        ReplicaResources(num_cpus, num_gpus=1 if on_gpu else 0, env_vars=env_vars),
    )


def uses_gpus(config: ServeConfig, cluster: ClusterResources | None) -> bool:
    """Whether each worker gets a GPU of its own."""
    if config.engine.device != "auto":
        return config.engine.device == "cuda"
    return cluster is not None and cluster.num_gpus >= 1


def _cpus_per_worker(num_workers: int, cluster: ClusterResources) -> float:
    """CPUs for each worker, spread over the nodes that have any: whole ones where they suffice."""
    cpus = [node.num_cpus for node in cluster.nodes if node.num_cpus > 0]
    workers_per_node = -(-num_workers // max(1, len(cpus)))
    share = min(cpus, default=1) / workers_per_node
    return int(share) if share >= 1 else round(share - 0.005, 2)
