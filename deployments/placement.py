"""The resources of each replica: CPUs or a GPU, threads, environment, kind of node.

Pure: `app.wire` reads the cluster, and binds what `resolve` decides. That happens once, when the
application is built. So decisions follow what is declared (settings, and the node types that an
autoscaler may start), and the present nodes only where nothing is declared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.deployments.config import ServeConfig
from penstock.workers.errors import ConfigError

GATE_ANSWER_MS = 20.0
GATE_ANSWER_BESIDE_WORKERS_MS = 200.0  # workers keep all cores busy, and a step takes as long
INGRESS_RESOURCE = "penstock_ingress"  # declared by operators on nodes that clients reach
# OpenMP's threads wait for one another by spinning, for up to milliseconds. Where ingress and gate
# want the core, that delays both sides.
SHORT_SPINS = {"GOMP_SPINCOUNT": "1000"}


@dataclass(frozen=True, slots=True)
class Node:
    """One living node: its resources in Ray, used or not."""

    num_cpus: float = 0
    num_gpus: float = 0
    is_for_ingress: bool = False  # has the resource `penstock_ingress`


@dataclass(frozen=True, slots=True)
class ClusterResources:
    """The living nodes of a cluster, and what its autoscaler may add."""

    nodes: tuple[Node, ...] = ()
    declared: Mapping[str, float] = field(default_factory=dict)  # most of all nodes, by resource

    @property
    def num_gpus(self) -> float:
        return sum(node.num_gpus for node in self.nodes)

    @property
    def can_have_gpus(self) -> bool:
        """Whether a node has a GPU, or a node type that can be started has one."""
        return self.num_gpus >= 1 or self.declared.get("GPU", 0) >= 1

    @property
    def has_ingress_nodes(self) -> bool:
        """Whether operators declared on which nodes an ingress may run."""
        declared = self.declared.get(INGRESS_RESOURCE, 0) > 0
        return declared or any(node.is_for_ingress for node in self.nodes)

    @staticmethod
    def of_ray(
        nodes: Sequence[Mapping[str, Any]], declared: Mapping[str, float] | None = None
    ) -> ClusterResources:
        """From `ray.nodes()`, and the largest resources of the autoscaler's configuration."""
        alive = [node["Resources"] for node in nodes if node["Alive"]]
        return ClusterResources(
            tuple(
                Node(each.get("CPU", 0), each.get("GPU", 0), each.get(INGRESS_RESOURCE, 0) > 0)
                for each in alive
            ),
            declared or {},
        )


@dataclass(frozen=True, slots=True)
class ReplicaResources:
    """What Ray reserves for one replica.

    env_vars: what the replica sets itself, before it imports what reads them: an environment that
    Ray has to make costs a process of its own, started anew.
    """

    num_cpus: float
    num_gpus: float = 0
    env_vars: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)  # custom ones

    def bundles(self, num_nodes: int) -> dict[str, Any]:
        """Serve's options for a replica that has these resources on each of several nodes."""
        if num_nodes == 1:
            return {}
        bundle = {"CPU": self.num_cpus, **({"GPU": self.num_gpus} if self.num_gpus else {})}
        return {
            "placement_group_bundles": [dict(bundle) for _ in range(num_nodes)],
            "placement_group_strategy": "STRICT_SPREAD",
        }

    def actor_options(self, env_vars: Mapping[str, str] | None = None) -> dict[str, Any]:
        """As Serve's `ray_actor_options`. `env_vars`: for Ray to set when it starts the process."""
        options: dict[str, Any] = {"num_cpus": self.num_cpus}
        if self.num_gpus:
            options["num_gpus"] = self.num_gpus
        if self.resources:
            options["resources"] = dict(self.resources)
        if env_vars:
            options["runtime_env"] = {"env_vars": dict(env_vars)}
        return options


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A configuration whose automatic values are decided, and the resources of its replicas."""

    config: ServeConfig
    worker: ReplicaResources
    ingress: ReplicaResources


def resolve(
    config: ServeConfig, cluster: ClusterResources | None, num_workers: int | None = None
) -> ResolvedConfig:
    """Decide what `config` leaves open. `cluster`: None in a process without one. `num_workers`:
    of all models, which share the CPUs; None: there is one model.

    A worker has a GPU, or one for each of its ranks, or an equal share of its node's CPUs and as
    many threads. Where nodes have the resource `penstock_ingress`, ingresses run there only, one a
    node. Raises ConfigError if the cluster has nothing that a worker could run on.
    """
    engine, on_gpu = config.engine, uses_gpus(config, cluster)
    num_cpus, threads, env_vars = 1.0, engine.threads, {}
    if not on_gpu:
        num_workers = (num_workers or config.max_workers) * engine.nodes_per_worker
        num_cpus = config.cpus_per_worker or _cpus_per_worker(num_workers, cluster)
        cores = engine.cores
        # Ray would set as many threads as it reserved CPUs; the number may be another one.
        threads = threads or max(
            1, int(num_cpus) if cores is None else len(cores) // config.max_workers
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
        ReplicaResources(
            num_cpus,
            num_gpus=engine.num_ranks // engine.nodes_per_worker if on_gpu else 0,
            env_vars=env_vars,
        ),
        _ingress(cluster),
    )


def resolve_each(
    config: ServeConfig, cluster: ClusterResources | None
) -> tuple[ResolvedConfig, ...]:
    """`resolve` for each model; workers on CPUs have equal shares, whichever model is theirs."""
    on_cpus = [each for each in config.each_model if not uses_gpus(each, cluster)]
    total = sum(each.max_workers for each in on_cpus)
    return tuple(resolve(each, cluster, total) for each in config.each_model)


def variables_of_workers(config: ServeConfig, cluster: ClusterResources) -> Mapping[str, str]:
    """Those of every worker on the CPUs of a single machine.

    {} where workers differ in them, use GPUs, or have cores of their own: OpenMP counts its
    process's cores when it is loaded.
    """
    workers = [each.worker for each in resolve_each(config, cluster)]
    variables = workers[0].env_vars
    differ = any(each.env_vars != variables or each.num_gpus for each in workers)
    has_cores = any(each.engine.cores for each in config.each_model)
    return {} if differ or has_cores else variables


def _ingress(cluster: ClusterResources | None) -> ReplicaResources:
    """The resources of an ingress: no CPU, because it must not wait for a free one."""
    if cluster is None or not cluster.has_ingress_nodes:
        return ReplicaResources(0)
    # Such a node has 1 of the resource, so a second ingress does not fit. With Serve's
    # max_replicas_per_node instead, the autoscaler would start nodes of any type.
    return ReplicaResources(0, resources={INGRESS_RESOURCE: 1})


def uses_gpus(config: ServeConfig, cluster: ClusterResources | None) -> bool:
    """Whether each worker gets a GPU of its own."""
    if config.engine.device != "auto":
        return config.engine.device == "cuda"
    return cluster is not None and cluster.can_have_gpus


def _cpus_per_worker(num_workers: int, cluster: ClusterResources | None) -> float:
    """CPUs for each worker, spread over the nodes that have any: whole ones where they suffice."""
    if cluster is None:
        return 1.0
    cpus = [node.num_cpus for node in cluster.nodes if node.num_cpus > 0]
    if not cpus and cluster.nodes:
        raise ConfigError(
            "no node of the cluster has a GPU or a CPU for a worker: add a node, or set what a "
            "worker needs on nodes that join later, by --device cuda or --cpus-per-worker"
        )
    workers_per_node = -(-num_workers // max(1, len(cpus)))
    share = min(cpus, default=1) / workers_per_node
    return int(share) if share >= 1 else round(share - 0.005, 2)
