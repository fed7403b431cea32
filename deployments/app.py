"""The wiring, and the only place of it: the Serve deployments of a cluster, and their arguments.

`serve run penstock.deployments.app:build_app`, `serve deploy deployments/serve.yaml` and
`penstock serve` all use it. Ray supervises the replicas; no token passes through Ray.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray import serve

from penstock.deployments.autoscale.starts import PRIOR_S
from penstock.deployments.config import ServeConfig, config_from
from penstock.deployments.config_values import settings_that_differ
from penstock.deployments.gate.types import GateSetup, digest_of
from penstock.deployments.hub_model import pinned
from penstock.deployments.ingress.replica import IngressReplica
from penstock.deployments.model_entries import MODELS
from penstock.deployments.placement import ClusterResources, resolve_each
from penstock.deployments.state.url import redis_options
from penstock.deployments.supervision.ray_workarounds import one_event_loop, require_token_auth
from penstock.deployments.supervision.registry import RegistryClient
from penstock.deployments.supervision.replicas import cluster_resources
from penstock.deployments.worker.replica import WorkerReplica

log = logging.getLogger("penstock.app")

HEALTH_PERIOD_S = 2.0  # a dead replica is noticed and replaced within it
HEALTH_TIMEOUT_S = 10.0  # of each; Serve stops a replica that missed three in a row
MAX_START_ATTEMPTS = 3
TARGET_WAIT_S = 5.0
NODE_START_S = 180.0  # of a worker on a node that has to be started first, before one was seen
POLICIES = "penstock.deployments.autoscale.serve_policy"
# By default glibc gives threads up to eight heaps a core, and no thread uses what another one has
# freed in its own: an ingress, with its 45 threads, came to hold as much freed memory as memory in
# use (docs/benchmarks/results.md). Python's lock serialises most allocations anyway. One heap is
# grown and shrunk in larger steps than glibc's, each of which is a system call. Read when a process
# starts; other C libraries ignore it.
ONE_HEAP = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TOP_PAD_": str(1 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 20),
}
STOP_SLACK_S = 10.0  # for a replica to deregister after its drain, before Serve kills it


def build_app(args: Mapping[str, Any] | ServeConfig) -> Any:
    """The Serve application of `args`: a ServeConfig, or its settings by name."""
    return wire(args if isinstance(args, ServeConfig) else config_from(args))


def application(config: ServeConfig, cluster: ClusterResources | None) -> dict[str, Any]:
    """The application as an entry of Serve's configuration file, which `serve deploy` reads.

    The numbers of replicas stand beside the arguments: a change of arguments restarts all replicas,
    a change of numbers none.
    """
    arguments = settings_that_differ(config)
    arguments.pop("num_ingress", None)
    of_models = arguments.get(MODELS, [arguments])
    for resolved, of_model in zip(resolve_each(config, cluster), of_models, strict=True):
        of_model.pop("num_workers", None)
        if resolved.config.min_workers == 0:  # gate and ingresses must know only this of the range
            of_model["num_workers"] = "0:1"
        if not resolved.worker.num_gpus:
            of_model["cpus_per_worker"] = resolved.worker.num_cpus
    return {
        "name": config.app_name,
        "route_prefix": "/" if config.app_name == ServeConfig.app_name else f"/{config.app_name}",
        "import_path": "penstock.deployments.app:build_app",
        "args": arguments,
        "deployments": [
            *(
                {"name": each.worker_deployment, **worker_scale(each, cluster)}
                for each in config.each_model
            ),
            {"name": "Ingress", **ingress_scale(config)},
        ],
    }


def wire(
    config: ServeConfig,
    *,
    channel_host: str | None = None,
    forked_with: Mapping[str, str] | None = None,
) -> Any:
    """The Serve application of `config`, for the cluster that this process is connected to.

    `channel_host`: address on which workers and gate listen; None: their node's in the cluster.
    `forked_with`: variables with which worker processes are forked, if Ray is asked for them.
    """
    config.check_access()
    if not config.insecure:
        require_token_auth()
    config = pinned(config)
    cluster = cluster_resources()
    _warn_of_clear_links(config, cluster)
    models = resolve_each(config, cluster)
    setups = tuple(gate_setup(each.config, channel_host) for each in models)
    if any(setups) and cluster is not None:
        registry = RegistryClient(config.app_name)
        generation = registry.call_when_up("begin", digest_of(setups))
        setups = tuple(each and replace(each, generation=generation) for each in setups)
    supervision = _supervision(config)
    workers = [
        serve.deployment(
            WorkerReplica,
            name=each.config.worker_deployment,
            ray_actor_options=each.worker.actor_options(
                forked_with if forked_with == each.worker.env_vars else None
            ),
            **each.worker.bundles(each.config.engine.nodes_per_worker),
            max_surge_percent=each.config.surge_percent,
            **worker_scale(each.config, cluster),
            **supervision,
        ).bind(each.config, channel_host, dict(each.worker.env_vars))
        for each in models
    ]
    if config.models:
        config = replace(config, models=tuple(each.config for each in models))
    else:
        config = models[0].config
    ingress = models[0].ingress
    return serve.deployment(
        IngressReplica,
        name="Ingress",
        max_ongoing_requests=1000,
        ray_actor_options=ingress.actor_options(one_event_loop() | ONE_HEAP),
        # Two ingresses share the ports of a node, unless nodes are declared for one each.
        max_surge_percent=0 if ingress.resources else 100,
        **ingress_scale(config),
        **supervision,
    ).bind(config, setups, *workers)


def _supervision(config: ServeConfig) -> dict[str, Any]:
    """How Serve watches replicas, and stops them."""
    return {
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "max_constructor_retry_count": MAX_START_ATTEMPTS,
        "graceful_shutdown_timeout_s": config.drain_notice_s + config.drain_s + STOP_SLACK_S,
        "graceful_shutdown_wait_loop_s": 0.1,
    }


def worker_scale(config: ServeConfig, cluster: ClusterResources | None = None) -> dict[str, Any]:
    """Serve's options for the number of workers: fixed, or decided by our policy."""
    if not config.is_autoscaled:
        return {"num_replicas": config.num_workers}
    return _autoscaled(
        config.min_workers,
        config.max_workers,
        "WorkerScaling",
        {
            "app_name": config.app_name,
            **({"gate_scope": config.gate_scope} if config.key else {}),
            "target_wait_s": target_wait_s(config),
            "down_window_s": config.scale_down_after_s,
            "zero_after_s": config.scale_to_zero_after_s,
            "start_s": NODE_START_S if cluster is not None and cluster.declared else PRIOR_S,
        },
    )


def ingress_scale(config: ServeConfig) -> dict[str, Any]:
    """Serve's options for the number of ingresses."""
    if isinstance(config.num_ingress, int):
        return {"num_replicas": config.num_ingress}
    return _autoscaled(
        config.min_ingress,
        config.max_ingress,
        "IngressScaling",
        {"app_name": config.app_name},
    )


def _autoscaled(low: int, high: int, policy: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "autoscaling_config": {
            "min_replicas": low,
            "max_replicas": high,
            # The policy has its own hysteresis; Serve's would come on top.
            "upscale_delay_s": 0,
            "downscale_delay_s": 0,
            "policy": {
                "policy_function": f"{POLICIES}:{policy}",
                "policy_kwargs": arguments,
            },
        }
    }


def target_wait_s(config: ServeConfig) -> float:
    """How long a request may wait before more workers are started."""
    return config.target_wait_s or config.longest_wait_s or TARGET_WAIT_S


def gate_setup(config: ServeConfig, host: str | None) -> GateSetup | None:
    """The settings of the gate; None with admission optimistic, which needs no gate."""
    if config.admission == "optimistic":
        return None
    return GateSetup(
        admission=config.admission,
        max_queued=config.max_queued,
        # A request that would wait longer than it may is refused at once, with a Retry-After.
        longest_wait_s=min(
            config.longest_wait_s or config.longest_possible_wait_s, config.longest_possible_wait_s
        ),
        host=host,
        snapshot_file=config.predictor_file,
        snapshot_of=(config.app_name, config.model_name),
        state=redis_options(config),
        snapshot_key=f"predictor/{config.gate_scope}",
        may_wake=config.min_workers == 0,
        certs_dir=config.cluster_certs_dir,
    )


def _warn_of_clear_links(config: ServeConfig, cluster: ClusterResources | None) -> None:
    num_nodes = 0 if cluster is None else len(cluster.nodes)
    if config.cluster_certs_dir is None and num_nodes > 1:
        log.warning(
            "cluster_certs_dir is not set, and the cluster has %d machines: prompts and answers go "
            "between them in the clear. `penstock certs init` makes certificates",
            num_nodes,
        )
