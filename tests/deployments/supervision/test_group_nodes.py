"""One worker whose two ranks, or two stages, are on two Ray nodes: the answers of one process, and
its return."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig
from tests.deployments.clusters import ENGINE, await_view
from tests.deployments.nodes import Nodes, deployed, nodes_of, nodes_of_class
from tests.deployments.ports import free_port
from tests.deployments.rolling import NUM, answers

TOKENS = 40


@pytest.fixture
def two_nodes() -> Iterator[Nodes]:
    made = Nodes()
    for _ in range(2):
        made.add(is_for_ingress=True)
    yield made
    made.close()


def config_of(nodes: Nodes, num_nodes: int, cut: str = "tensor_parallel_size") -> ServeConfig:
    values: dict[str, Any] = {cut: num_nodes, "nodes_per_worker": num_nodes}
    return ServeConfig(
        engine=dataclasses.replace(ENGINE, **values),
        ray_address=nodes.address,
        http_port=free_port(), grpc_port=free_port(), metrics_port=0,
        num_workers=1, cpus_per_worker=1, num_ingress=1,
        app_name=f"penstock-group-{num_nodes}-{cut[0]}",
    )  # fmt: skip


def far_rank(cluster: Cluster) -> psutil.Process:
    """The process that computes on the other node."""
    (found,) = (
        each
        for each in psutil.process_iter(["cmdline"])
        if "penstock.workers.engine.group.follower" in (each.info["cmdline"] or ())
        and (parent := each.parent()) is not None
        and "RankHost" in " ".join(parent.cmdline())
    )
    return found


@pytest.mark.timeout(400)
def test_a_group_over_two_nodes(two_nodes: Nodes) -> None:
    one, group = config_of(two_nodes, 1), config_of(two_nodes, 2)
    with deployed(one):
        alone = answers(one, NUM, TOKENS)
    assert all(error is None and len(ids) == TOKENS for ids, error in alone)
    with deployed(group) as cluster:
        places = nodes_of("Worker") + nodes_of_class("RankHost")
        assert len(set(places)) == 2
        (worker,) = cluster.view().workers
        assert len(worker[1].ranks) == 2
        assert answers(group, NUM, TOKENS) == alone
        before, killed = worker[0].epoch, far_rank(cluster)
        killed.kill()
        await_view(
            cluster,
            lambda view: (
                [info.epoch for info, _ in view.workers] not in ([], [before])
                and [each.num_workers for each in view.ingresses] == [1]
            ),
            180,
        )
        assert answers(group, NUM, TOKENS) == alone
        last = far_rank(cluster)
    stages = config_of(two_nodes, 2, "pipeline_parallel_size")
    with deployed(stages) as cluster:
        (worker,) = cluster.view().workers
        assert len(worker[1].ranks) == 2
        assert answers(stages, NUM, TOKENS) == alone
    deadline_s = time.monotonic() + 30
    while last.is_running() and last.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "a rank outlived its worker"
        time.sleep(0.2)
