"""One application on several Ray nodes: what runs where, and nodes that are killed and join.

Ids are those of the same requests, run alone on the same cluster before.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from typing import Any

import pytest

from penstock.deployments.supervision.view import ClusterView
from tests.deployments.clusters import await_view
from tests.deployments.nodes import nodes_of
from tests.deployments.rolling import NUM, answer, answers, updated_under_load

ROOM = itertools.count(77)  # for `max_queued`: another one at each attempt of a test
LONG = 1200  # tokens: streams outlast the seconds after which a killed node's ingress ends
SHORT = 60


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


@pytest.mark.timeout(900)
def test_a_rolling_update_fails_no_request(cluster, config):
    """Another setting restarts all replicas, a few at a time."""
    alone = [ids for ids, _ in answers(config, NUM, 60)]
    changed = dataclasses.replace(config, max_queued=next(ROOM))
    ended = updated_under_load(cluster, config, changed)
    assert len(ended) > 20
    for number, ids, error in ended:
        assert error is None
        assert ids == alone[number]


def test_a_killed_node_costs_the_streams_of_its_ingress_and_one_that_joins_takes_its_place(
    cluster, config, ray_nodes, worker_nodes
):
    alive = {each.node for each in cluster.view().nodes}
    if worker_nodes[1] not in ray_nodes or worker_nodes[1].node_id[:8] not in alive:
        # An attempt before this one killed it, or the one that joined has ended since.
        worker_nodes[1] = ray_nodes.add(is_for_ingress=True)
        await_view(
            cluster, lambda view: [each.num_workers for each in view.ingresses] == [2, 2], 120
        )
    alone = [ids for ids, _ in answers(config, NUM, LONG)]
    lost_node = worker_nodes[1].node_id[:8]

    def streams(view: ClusterView) -> dict[str, int]:
        """By the node of their ingress."""
        return {each.node: each.num_connections for each in view.ingresses}

    async def scenario() -> tuple[list[tuple[list[int], Any]], int]:
        target = f"127.0.0.1:{config.grpc_port}"
        running = [asyncio.ensure_future(answer(target, n, LONG)) for n in range(NUM)]
        view = await asyncio.to_thread(
            await_view, cluster, lambda view: sum(streams(view).values()) == NUM, 60
        )
        await asyncio.to_thread(ray_nodes.kill, worker_nodes[1])
        return await asyncio.gather(*running), streams(view)[lost_node]

    ended, num_lost = asyncio.run(scenario())
    assert 0 < num_lost < NUM, num_lost
    for (ids, error), expected in zip(ended, alone, strict=True):
        assert ids == (expected if error is None else expected[: len(ids)])
    # The streams of the other node's ingress are whole, also those that its node's worker ran.
    errors = [error for _, error in ended if error is not None]
    assert len(errors) == num_lost
    assert {error.status.name for error in errors} == {"UNAVAILABLE"}
    # Its processes notice the death of their node within a second or two, and end.
    await_view(cluster, lambda view: [each.num_workers for each in view.ingresses] == [1], 120)
    assert answers(config, NUM, SHORT) == [(ids[:SHORT], None) for ids in alone]

    joined = worker_nodes[1] = ray_nodes.add(is_for_ingress=True)
    await_view(
        cluster,
        lambda view: [each.num_workers for each in view.ingresses] == [2, 2],
        120,
    )
    assert sorted(nodes_of("Worker")) == sorted([worker_nodes[0].node_id, joined.node_id])
    assert answers(config, NUM, SHORT) == [(ids[:SHORT], None) for ids in alone]
