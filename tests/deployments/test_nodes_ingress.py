"""Ingresses follow the nodes that clients reach: one that joins a cluster, and one that is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.deployments.client import AsyncClient
from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig
from penstock.deployments.supervision.view import ClusterView
from tests.deployments.clusters import ENGINE, await_view, generate
from tests.deployments.nodes import ClientOfOneConnection, Nodes, deployed, nodes_of
from tests.deployments.ports import free_port

NUM = 24  # connections: the kernel spreads them over the ingresses that share the port


@pytest.fixture(scope="module")
def first(ray_nodes: Nodes) -> Any:
    return ray_nodes.add(is_for_ingress=True)


@pytest.fixture(scope="module")
def config(ray_nodes: Nodes, first: Any) -> ServeConfig:
    return ServeConfig(
        engine=ENGINE,
        ray_address=ray_nodes.address,
        http_port=free_port(),
        grpc_port=free_port(),
        metrics_port=0,
        num_ingress="1:3",
        app_name="penstock-ingresses",
        drain_s=5.0,
    )


@pytest.fixture(scope="module")
def cluster(config: ServeConfig) -> Iterator[Cluster]:
    with deployed(config) as cluster:
        yield cluster


async def connections(cluster: Cluster, config: ServeConfig) -> list[int]:
    """Of each ingress, while NUM clients have a stream of gRPC each, and nothing uses HTTP."""
    target = f"127.0.0.1:{config.grpc_port}"

    async def stream(number: int) -> None:
        async with ClientOfOneConnection(target) as client:
            _, error = await generate(client, number, 400)
            assert error is None

    def numbers(view: ClusterView) -> list[int]:
        return sorted(each.num_connections for each in view.ingresses)

    streams = [asyncio.ensure_future(stream(number)) for number in range(NUM)]
    view = await asyncio.to_thread(await_view, cluster, lambda view: sum(numbers(view)) == NUM, 60)
    await asyncio.gather(*streams)
    await asyncio.to_thread(await_view, cluster, lambda view: sum(numbers(view)) == 0, 60)
    return numbers(view)


async def answered(config: ServeConfig) -> list[list[int]]:
    async with AsyncClient(f"127.0.0.1:{config.grpc_port}") as client:
        got = [await generate(client, number, 20) for number in range(4)]
    assert all(error is None for _, error in got)
    return [ids for ids, _ in got]


@pytest.mark.timeout(900)
def test_an_ingress_starts_on_a_node_that_joins_and_the_first_one_serves_without_it(
    cluster, config, ray_nodes, first
):
    alone = asyncio.run(answered(config))
    assert asyncio.run(connections(cluster, config)) == [NUM]
    joined = ray_nodes.add(num_cpus=0, is_for_ingress=True)
    view = await_view(
        cluster, lambda view: [each.num_workers for each in view.ingresses] == [1, 1], 120
    )
    assert sorted(nodes_of("Ingress")) == sorted([first.node_id, joined.node_id])
    (report,) = (each for each in view.scaling if each.deployment == "Ingress")
    assert (report.number, report.minimum, report.maximum) == (2, 1, 3)
    assert "2 nodes for ingresses" in report.reason
    assert min(asyncio.run(connections(cluster, config))) >= 1  # both serve

    ray_nodes.kill(joined)
    await_view(cluster, lambda view: len(view.ingresses) == 1, 120)
    assert asyncio.run(answered(config)) == alone
