"""The wiring, and the only place of it: the Serve deployments of a cluster, and their arguments.

`serve run penstock.deployments.app:build_app`, `serve deploy deployments/serve.yaml` and
`penstock serve` all use it. Ray supervises the replicas; no token passes through Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve

from penstock.deployments.config import ServeConfig, config_from
from penstock.deployments.gate.types import GateSetup
from penstock.deployments.ingress.replica import IngressReplica
from penstock.deployments.placement import ReplicaResources, resolve
from penstock.deployments.supervision.ray_workarounds import one_event_loop
from penstock.deployments.supervision.replicas import cluster_resources
from penstock.deployments.worker.replica import WorkerReplica

HEALTH_PERIOD_S = 2.0  # a dead replica is noticed and replaced within it
HEALTH_TIMEOUT_S = 30.0
MAX_START_ATTEMPTS = 3


def build_app(args: Mapping[str, Any] | ServeConfig) -> Any:
    """The Serve application of `args`: a ServeConfig, or its settings by name."""
    return wire(args if isinstance(args, ServeConfig) else config_from(args))


def wire(config: ServeConfig, *, channel_host: str | None = None) -> Any:
    """The Serve application of `config`, for the cluster that this process is connected to.

    `channel_host`: address on which workers and gate listen; None: their node's in the cluster.
    """
    resolved = resolve(config, cluster_resources())
    config = resolved.config
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
        ray_actor_options=resolved.worker.actor_options,
        **supervision,
    ).bind(config, channel_host)
    return serve.deployment(
        IngressReplica,
        name="Ingress",
        num_replicas=config.num_ingress,
        max_ongoing_requests=1000,
        ray_actor_options=ReplicaResources(0, env_vars=one_event_loop()).actor_options,
        **supervision,
    ).bind(config, gate_setup(config, channel_host), workers)


def gate_setup(config: ServeConfig, host: str | None) -> GateSetup | None:
    """The settings of the gate; None with admission optimistic, which needs no gate."""
    if config.admission == "optimistic":
        return None
    return GateSetup(
        admission=config.admission,
        max_queued=config.max_queued,
        longest_wait_s=config.longest_wait_s,
        host=host,
        snapshot_file=config.predictor_file,
    )
