"""The cluster that the files of this folder share, in their order: a head without CPUs, two nodes
with a worker and an ingress each. A start costs more than most tests here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig
from tests.deployments.clusters import ENGINE
from tests.deployments.nodes import Nodes, deployed
from tests.deployments.ports import free_port


@pytest.fixture(scope="package")
def ray_nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


@pytest.fixture(scope="package")
def worker_nodes(ray_nodes: Nodes) -> list[Any]:
    return [ray_nodes.add(is_for_ingress=True) for _ in range(2)]


@pytest.fixture(scope="package")
def config(ray_nodes: Nodes, worker_nodes: list[Any]) -> ServeConfig:
    return ServeConfig(
        engine=ENGINE,
        ray_address=ray_nodes.address,
        http_port=free_port(),
        grpc_port=free_port(),
        metrics_port=0,
        num_workers=2,
        cpus_per_worker=1,
        num_ingress=2,
        app_name="penstock-nodes",
        drain_s=60.0,
    )


@pytest.fixture(scope="package")
def cluster(config: ServeConfig) -> Iterator[Cluster]:
    with deployed(config) as cluster:
        yield cluster
