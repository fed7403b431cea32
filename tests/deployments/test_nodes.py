"""One application on several Ray nodes: what runs where, and nodes that are killed and join.

Ids are those of the same requests, run alone on the same cluster before.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from penstock.deployments.client import AsyncClient, ClientError
from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig
from tests.deployments.clusters import ENGINE, await_view, prompt
from tests.deployments.nodes import Nodes, deployed, nodes_of
from tests.deployments.ports import free_port

NUM = 24  # requests at once


@pytest.fixture(scope="module")
def worker_nodes(ray_nodes: Nodes) -> list[Any]:
    return [ray_nodes.add(is_for_ingress=True) for _ in range(2)]


@pytest.fixture(scope="module")
def config(ray_nodes: Nodes, worker_nodes: list[Any]) -> ServeConfig:
    return ServeConfig(
        engine=ENGINE,
        ray_address=ray_nodes.address,
        http_port=free_port(),
        grpc_port=free_port(),
        metrics_port=0,
        num_workers=2,
        num_ingress=2,
        app_name="penstock-nodes",
        drain_s=5.0,
    )


@pytest.fixture(scope="module")
def cluster(config: ServeConfig) -> Iterator[Cluster]:
    with deployed(config) as cluster:
        yield cluster


class ClientOfOneConnection(AsyncClient):
    """Shares its connection with no other, so that clients spread over the ingresses."""

    def _connect(self, target: str, credentials: Any) -> Any:
        return grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])


async def answer(target: str, number: int, max_tokens: int) -> tuple[list[int], Any]:
    """Token ids of a greedy answer, and the error that ended it early, if one did."""
    ids: list[int] = []
    try:
        async with ClientOfOneConnection(target) as client:
            async for piece in client.generate(
                prompt(number), temperature=0.0, max_tokens=max_tokens, ignore_eos=True
            ):
                ids += piece.token_ids
    except ClientError as error:
        return ids, error
    return ids, None


def answers(config: ServeConfig, num: int, max_tokens: int) -> list[tuple[list[int], Any]]:
    """Of `num` requests at once."""

    async def scenario() -> list[tuple[list[int], Any]]:
        target = f"127.0.0.1:{config.grpc_port}"
        return await asyncio.gather(*(answer(target, n, max_tokens) for n in range(num)))

    return asyncio.run(scenario())


def test_each_node_has_a_worker_and_an_ingress(cluster, config, worker_nodes):
    expected = sorted(node.node_id for node in worker_nodes)
    assert sorted(nodes_of("Worker")) == expected
    assert sorted(nodes_of("Ingress")) == expected


def test_both_nodes_serve(cluster, config):
    before = {info.pid: sum(s.num_finished.values()) for info, s in cluster.view().workers}
    for ids, error in answers(config, 16, 24):
        assert error is None and len(ids) == 24

    def share(view: Any) -> list[int]:
        return [sum(s.num_finished.values()) - before[i.pid] for i, s in view.workers]

    view = await_view(cluster, lambda view: sum(share(view)) == 16, 120)
    assert min(share(view)) >= 4


@pytest.mark.timeout(600)
def test_a_rolling_update_fails_no_request(cluster, config):
    """Another setting restarts all replicas, a few at a time."""
    alone = [ids for ids, _ in answers(config, NUM, 60)]
    before = cluster.view()
    old_workers = {info.epoch for info, _ in before.workers}
    old_ingresses = {each.ingress_id for each in before.ingresses}

    def is_updated(view: Any) -> bool:
        return (
            not old_workers & {info.epoch for info, _ in view.workers}
            and not old_ingresses & {each.ingress_id for each in view.ingresses}
            and [each.num_workers for each in view.ingresses] == [2, 2]
        )

    async def load_until_updated() -> list[tuple[int, list[int], Any]]:
        target, ended, deadline_s = f"127.0.0.1:{config.grpc_port}", [], time.monotonic() + 180

        async def one_after_another(first: int) -> None:
            number = first
            while not is_updated(await asyncio.to_thread(cluster.view)):
                assert time.monotonic() < deadline_s, cluster.view()
                ended.append((number % NUM, *await answer(target, number % NUM, 60)))
                number += 4

        await asyncio.gather(*(one_after_another(n) for n in range(4)))
        return ended

    Cluster(dataclasses.replace(config, max_queued=77)).deploy()
    ended = asyncio.run(load_until_updated())
    assert len(ended) > 20
    for number, ids, error in ended:
        assert error is None
        assert ids == alone[number]


def test_a_killed_node_costs_the_streams_of_its_ingress_and_one_that_joins_takes_its_place(
    cluster, config, ray_nodes, worker_nodes
):
    alone = [ids for ids, _ in answers(config, NUM, 200)]

    async def scenario() -> list[tuple[list[int], Any]]:
        target = f"127.0.0.1:{config.grpc_port}"
        running = [asyncio.ensure_future(answer(target, n, 200)) for n in range(NUM)]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(ray_nodes.kill, worker_nodes[1])
        return await asyncio.gather(*running)

    ended = asyncio.run(scenario())
    num_whole = 0
    for (ids, error), expected in zip(ended, alone, strict=True):
        assert ids == expected[: len(ids)]
        num_whole += error is None and len(ids) == 200
    assert num_whole >= 1  # about half: those of the other node's ingress
    # Its processes notice the death of their node within a second or two, and end.
    await_view(cluster, lambda view: [each.num_workers for each in view.ingresses] == [1], 120)
    assert [(ids, error) for ids, error in answers(config, NUM, 200) if error] == []

    joined = ray_nodes.add(is_for_ingress=True)
    await_view(
        cluster,
        lambda view: [each.num_workers for each in view.ingresses] == [2, 2],
        120,
    )
    assert sorted(nodes_of("Worker")) == sorted([worker_nodes[0].node_id, joined.node_id])
    assert [ids for ids, _ in answers(config, NUM, 200)] == alone
