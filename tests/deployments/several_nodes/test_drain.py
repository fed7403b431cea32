"""Workers that are taken away on several Ray nodes: streams end as usual, and nodes become idle.

Ids are those of the same requests, run alone on the same cluster before.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import ray
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.deployments.app import application
from penstock.deployments.client import AsyncClient
from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig
from penstock.deployments.experts.client import ExpertStoreClient
from penstock.deployments.experts.spec import StoreSpec, app_folder
from penstock.deployments.supervision.actors import NAMESPACE
from penstock.deployments.supervision.ray_workarounds import deploy_application
from penstock.deployments.supervision.replicas import cluster_resources
from penstock.deployments.supervision.view import ClusterView
from tests.deployments.clusters import await_view, generate
from tests.deployments.nodes import Nodes
from tests.deployments.waiting import eventually

LONG, NUM_LONG = 700, 8


class Watcher:
    """Notes every view of the registry that differs from the one before."""

    def __init__(self, cluster: Cluster):
        self.views: list[dict[int, bool]] = []  # whether it drains, by epoch
        self._cluster, self._is_over = cluster, False
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over:
            seen = {info.epoch: info.is_draining for info, _ in self._cluster.view().workers}
            if not self.views or self.views[-1] != seen:
                self.views.append(seen)
            time.sleep(0.05)


def scale(config: ServeConfig, num_workers: int) -> None:
    """As `serve deploy` does with another number in the file: no replica is restarted."""
    deploy_application(application(replace(config, num_workers=num_workers), cluster_resources()))


def scaled(cluster: Cluster, config: ServeConfig, num_workers: int) -> None:
    """Scale the cluster, and wait until it has `num_workers` workers that each ingress reaches."""

    def is_so(view: ClusterView) -> bool:
        reach = [each.num_workers for each in view.ingresses]
        return len(view.workers) == num_workers and reach == [num_workers] * 2

    if not is_so(cluster.view()):
        scale(config, num_workers)
        await_view(cluster, is_so, 240)


def test_a_worker_that_is_taken_away_finishes_its_streams_and_no_request_fails(cluster, config):
    async def scenario() -> Any:
        async with AsyncClient(f"127.0.0.1:{config.grpc_port}") as client:
            alone = [(await generate(client, n, LONG))[0] for n in range(NUM_LONG)]
            started = [asyncio.Event() for _ in range(NUM_LONG)]
            running = [
                asyncio.ensure_future(generate(client, n, LONG, started[n]))
                for n in range(NUM_LONG)
            ]
            for event in started:
                await event.wait()
            held = [stats.num_running for _, stats in cluster.view().workers]
            await asyncio.to_thread(scale, config, 1)
            late: list[Any] = []
            while not all(each.done() for each in running):
                late.append(await generate(client, 100 + len(late) % 4, 12))
            repeated = [await generate(client, 100 + n, 12) for n in range(4)]
            return alone, await asyncio.gather(*running), late, repeated, held

    scaled(cluster, config, 2)  # an attempt before this one may have taken one away
    before = {info.epoch for info, _ in cluster.view().workers}
    with Watcher(cluster) as watcher:
        alone, answers, late, repeated, held = asyncio.run(scenario())
        await_view(cluster, lambda view: len(view.workers) == 1, 120)
        time.sleep(2.5)  # a late heartbeat would list it again
    assert len(before) == 2 and len(held) == 2
    for (ids, error), expected in zip(answers, alone, strict=True):
        assert error is None and ids == expected and len(ids) == LONG
    assert len(late) >= 8
    for n, (ids, error) in enumerate(late):
        assert error is None and ids == repeated[n % 4][0] and len(ids) == 12
    # Both as they were, then one drains, then it is gone, for good.
    states = [sorted(each.values()) for each in watcher.views]
    assert states == [[False, False], [False, True], [False]]
    assert set(watcher.views[-1]) < before


def test_a_worker_that_is_added_takes_requests_and_none_was_restarted(cluster, config):
    scaled(cluster, config, 1)  # an attempt before this one may have added one
    (kept,) = (info.epoch for info, _ in cluster.view().workers)
    scale(config, 2)

    def is_whole(view: ClusterView) -> bool:
        return len(view.workers) == 2 and [e.num_workers for e in view.ingresses] == [2, 2]

    view = await_view(cluster, is_whole, 120)
    assert kept in {info.epoch for info, _ in view.workers}

    async def scenario() -> Any:
        async with AsyncClient(f"127.0.0.1:{config.grpc_port}") as client:
            return await asyncio.gather(*(generate(client, n, 24) for n in range(16)))

    assert all(error is None and len(ids) == 24 for ids, error in asyncio.run(scenario()))

    def finished(view: ClusterView) -> list[int]:
        return [sum(s.num_finished.values()) for i, s in view.workers if i.epoch != kept]

    await_view(cluster, lambda view: sum(finished(view)) >= 4, 120)


def test_gate_and_registry_are_on_the_head_node(cluster, config):
    head = next(each for each in ray.nodes() if "node:__internal_head__" in each["Resources"])
    for role in ("gate", "registry"):
        actor = ray.get_actor(f"{config.app_name}-{role}", namespace=NAMESPACE)
        state = ray._private.state.state.actor_table(actor._actor_id.hex())
        assert state["Address"]["NodeID"] == head["NodeID"], role


def test_an_expert_store_without_workers_ends_its_node_becomes_idle_and_it_comes_back(ray_nodes):
    node = ray_nodes.add()
    spec = StoreSpec("penstock-drain-store", "builtin-moe", "fp32", "cpu", "/dev/shm", idle_s=3.0)
    folder = app_folder(spec.folder, spec.app_name)

    @ray.remote(num_cpus=1)
    def use() -> tuple[int, str]:
        """What a worker of that node does, which then dies: nothing keeps the store."""
        client = ExpertStoreClient(spec)
        manifest = client.manifest()
        return client.call_now("view").pid, manifest.path

    there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    pids = []
    for _ in range(2):
        pid, _ = ray.get(use.options(scheduling_strategy=there).remote(), timeout=60)
        pids.append(pid)
        assert list(folder.iterdir())
        eventually(lambda: is_idle(ray_nodes, node), 240, "the node becomes idle")
        eventually(lambda: not list(folder.iterdir()), 20, "its files are removed")
    assert pids[0] != pids[1]
    ray_nodes.kill(node)


def is_idle(nodes: Nodes, node: Any) -> bool:
    """As the cluster's autoscaler sees it."""
    status = get_cluster_status(nodes.address)
    return node.node_id in {each.node_id for each in status.idle_nodes}
