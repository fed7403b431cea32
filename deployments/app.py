"""The wiring, and the only place of it: the Serve deployments of a cluster, and what each holds.

`serve run penstock.deployments.app:build_app`, `serve deploy deployments/serve.yaml` and
`penstock serve` all come through here. Ray supervises; no token passes through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray import serve

from penstock.deployments.config import ServeConfig, config_from
from penstock.deployments.gate.service import GateSetup
from penstock.deployments.ingress.replica import IngressReplica
from penstock.deployments.supervision.replicas import wants_gpus
from penstock.deployments.worker.replica import WorkerReplica

HEALTH_PERIOD_S = 2.0  # how soon a dead replica is replaced
HEALTH_TIMEOUT_S = 30.0
MAX_START_ATTEMPTS = 3
GATE_ANSWER_BESIDE_WORKERS_MS = 200.0  # who keep all cores busy; their own steps take as long
# Of an ingress: with a loop for Serve and a loop for us, gRPC would wake both for every message.
ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
# Of a worker: OpenMP's threads wait for one another with the CPU in their hands, for up to
# milliseconds. Where somebody else wants a core, as ingress and gate do, that costs both.
SHORT_SPINS = {"GOMP_SPINCOUNT": "1000"}


def build_app(args: Mapping[str, Any] | ServeConfig) -> Any:
    """The Serve application of `args`: a ServeConfig, or its settings by name."""
    return wire(args if isinstance(args, ServeConfig) else config_from(args))


def wire(config: ServeConfig, *, channel_host: str | None = None) -> Any:
    """The Serve application of `config`, for the cluster that this process is connected with.

    Each worker has a GPU, or its share of a node's CPUs and as many threads. Its channel listens on
    `channel_host`, or else on the address that its node has in the cluster.
    """
    resources: dict[str, Any] = {"num_gpus": 1}
    env_vars: dict[str, str] = {}
    if not wants_gpus(config):
        share = _cpus_per_worker(config.num_workers)
        resources = {"num_cpus": share}
        env_vars.update(SHORT_SPINS)
        # Ray would allow a process as many threads as it reserved CPUs; say what is meant.
        cores = config.engine.cores
        threads = config.engine.threads or max(
            1, int(share) if cores is None else len(cores) // config.num_workers
        )
        answer_ms = config.gate_answer_ms or GATE_ANSWER_BESIDE_WORKERS_MS
        config = replace(
            config, engine=replace(config.engine, threads=threads), gate_answer_ms=answer_ms
        )
    if config.engine.threads is not None:  # torch reads it when it is loaded
        env_vars["OMP_NUM_THREADS"] = str(config.engine.threads)
    if env_vars:
        resources["runtime_env"] = {"env_vars": env_vars}
    supervision = {
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "max_constructor_retry_count": MAX_START_ATTEMPTS,
        "graceful_shutdown_timeout_s": config.drain_s + 5,
        "graceful_shutdown_wait_loop_s": 0.1,
    }
    workers = serve.deployment(
        WorkerReplica,
        name="Worker",
        num_replicas=config.num_workers,
        ray_actor_options=resources,
        **supervision,
    ).bind(config, channel_host)
    return serve.deployment(
        IngressReplica,
        name="Ingress",
        num_replicas=config.num_ingress,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": ONE_LOOP}},
        **supervision,
    ).bind(config, gate_setup(config, channel_host), workers)


def gate_setup(config: ServeConfig, host: str | None) -> GateSetup | None:
    """How the gate of `config` is to be; None where requests do without one."""
    if config.admission == "optimistic":
        return None
    return GateSetup(
        admission=config.admission,
        max_queued=config.max_queued,
        longest_wait_s=config.longest_wait_s,
        host=host,
        snapshot_file=config.predictor_file,
    )


def _cpus_per_worker(num_workers: int) -> float:
    """CPUs for each of `num_workers`, spread over the nodes: whole ones where there are enough."""
    if not ray.is_initialized():
        return 1
    cpus = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    cpus = [num for num in cpus if num > 0]
    workers_per_node = -(-num_workers // max(1, len(cpus)))
    share = min(cpus, default=1) / workers_per_node
    return int(share) if share >= 1 else round(share - 0.005, 2)
