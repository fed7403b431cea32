"""The ranks of a worker's group on other nodes of the Ray cluster: a Ray actor starts them there.

The worker's placement group has a bundle on each of the nodes; the worker itself is in the first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.deployments.config import ServeConfig
from penstock.deployments.supervision.replicas import configure_logging
from penstock.workers.engine.group.process import RankProcess
from penstock.workers.experts.expert_file import Manifest

if TYPE_CHECKING:
    from penstock.workers.engine.group.far import FarRanks

log = logging.getLogger("penstock.worker")

START_S = 60.0  # for an actor and a process of it to start


class RankHost:
    """Starts ranks on its node. They end with it, and Ray ends it with the worker that made it."""

    def __init__(self, config: ServeConfig, env_vars: Mapping[str, str]):
        os.environ.update(env_vars)
        configure_logging(config)
        self._processes: list[RankProcess] = []

    def start(self, address: str, secret: str) -> None:
        self._processes.append(RankProcess(str(os.getpid()), address, secret=secret))


class NodeOfGroup:
    """One other node, as workers/engine/group/far.py has it."""

    def __init__(
        self,
        group: PlacementGroup,
        bundle: int,
        config: ServeConfig,
        env_vars: Mapping[str, str],
        experts: Manifest | None,
    ):
        """`experts`: of the expert store on that node."""
        self.experts = experts
        resources = group.bundle_specs[bundle]
        self._actor = (
            ray.remote(RankHost)
            .options(
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle
                ),
            )
            .remote(config, dict(env_vars))
        )

    def start(self, address: str, secret: str) -> None:
        ray.get(self._actor.start.remote(address, secret), timeout=START_S)

    def end(self) -> None:
        ray.kill(self._actor)


def group_nodes(config: ServeConfig) -> list[str]:
    """Ids of the nodes of this worker's group, its own first."""
    if config.engine.nodes_per_worker == 1:
        return [ray.get_runtime_context().get_node_id()]
    table = ray.util.placement_group_table(_placement_group())
    by_bundle: dict[int, str] = table["bundles_to_node_id"]
    return [by_bundle[bundle] for bundle in sorted(by_bundle)]


def far_ranks(
    config: ServeConfig,
    host: str,
    env_vars: Mapping[str, str],
    experts: Sequence[Manifest | None] = (),
) -> FarRanks | None:
    """The other nodes of this worker's placement group; None without `nodes_per_worker`.
    `experts`: of the expert store of each, if there are stores."""
    num_nodes = config.engine.nodes_per_worker
    if num_nodes == 1:
        return None
    from penstock.workers.engine.group.far import FarRanks  # this loads torch

    group = _placement_group()
    log.info("the worker's ranks are on %d nodes", num_nodes)
    machines = tuple(
        NodeOfGroup(group, bundle, config, env_vars, manifest)
        for bundle, manifest in zip_longest(range(1, num_nodes), experts)
    )
    return FarRanks(host, machines)


def _placement_group() -> PlacementGroup:
    group = ray.util.get_current_placement_group()
    assert group is not None, "app.py gives such a worker a placement group"
    return group
