"""One expert store for two nodes: the worker elsewhere gets its experts over the network.

The store is suspended, too: workers stay listed, and no stream is lost. The one on the store's node
computes from the file that it has mapped. The other one gives its requests back within seconds, and
they continue where the experts are.

The oracle is the plain engine in this process, which has all experts in its own memory.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from penstock.deployments.client import AsyncClient
from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig
from penstock.deployments.experts.client import ExpertStoreClient
from penstock.deployments.experts.spec import StoreSpec
from penstock.deployments.supervision.view import ClusterView
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from tests.deployments.clusters import await_view
from tests.deployments.nodes import Nodes, deployed, nodes_of
from tests.deployments.ports import free_port

ENGINE = EngineConfig(
    model="builtin-moe", weights="fp32", device="cpu", num_blocks=300, max_num_seqs=8, threads=1,
    expert_cache_gb=0.006, expert_prefetch="on", expert_store="one",
)  # fmt: skip
PROMPTS = [list(range(9 + n, 19 + n)) for n in range(8)]
NUM_TOKENS = 40
PAUSE_S = 0.5  # between rounds: tests beside this one need the CPUs, too


def plain_ids() -> list[list[int]]:
    torch.set_num_threads(1)
    config = EngineConfig(weights="fp32", device="cpu", num_blocks=300, max_num_seqs=8)
    engine = Engine(config, load_model("builtin-moe", weights="fp32", progress=False))
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    ids: dict[str, list[int]] = {str(n): [] for n in range(len(PROMPTS))}
    for n, prompt in enumerate(PROMPTS):
        engine.add(Request(str(n), tuple(prompt), params))
    while engine.has_work():
        for delta in engine.step():
            ids[delta.request_id] += delta.token_ids
    return list(ids.values())


async def answers(target: str) -> list[list[int]]:
    async with AsyncClient(target) as client:

        async def one(prompt: list[int]) -> list[int]:
            pieces = client.generate(
                prompt, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True
            )
            return [token async for piece in pieces for token in piece.token_ids]

        return list(await asyncio.gather(*map(one, PROMPTS)))


@contextmanager
def suspended(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class Watch:
    """Looks at the registry all the time, and keeps the least number of workers that it listed."""

    def __init__(self, cluster: Cluster):
        self.least = 99
        self._cluster, self._is_over = cluster, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(0.2):
            self.least = min(self.least, len(self._cluster.view().workers))


@pytest.fixture(scope="module")
def config(ray_nodes: Nodes) -> ServeConfig:
    for _ in range(2):
        ray_nodes.add(num_cpus=1)
    return ServeConfig(
        engine=ENGINE,
        ray_address=ray_nodes.address,
        http_port=free_port(),
        grpc_port=free_port(),
        metrics_port=0,
        num_workers=2,
        app_name="penstock-far-store",
        drain_s=2.0,
    )


@pytest.fixture(scope="module")
def cluster(config: ServeConfig) -> Iterator[Cluster]:
    with deployed(config) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def store(cluster: Cluster, config: ServeConfig) -> ExpertStoreClient:
    spec = StoreSpec(config.app_name, "builtin-moe", "fp32", "cpu", "/dev/shm", is_single=True)
    return ExpertStoreClient(spec)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return plain_ids()


def test_a_worker_without_a_store_on_its_node_gives_the_same_ids(cluster, config, store, expected):
    store_node = store.ask("node")
    workers = nodes_of("Worker")
    assert sorted(store_node == node for node in workers) == [False, True], (store_node, workers)
    assert asyncio.run(answers(f"127.0.0.1:{config.grpc_port}")) == expected

    def has_far_figures(view: ClusterView) -> bool:
        stats = {info.node: experts for info, s in view.workers if (experts := s.experts)}
        far = [experts for node, experts in stats.items() if not store_node.startswith(node)]
        return bool(far) and all(each.num_misses > 0 and each.demand_bytes > 0 for each in far)

    view = await_view(cluster, has_far_figures, 60)
    assert not any(s.experts is not None and s.experts.num_corrupted for _, s in view.workers)


def test_workers_whose_store_hangs_stay_listed_and_their_streams_end_the_same(
    cluster, config, store, expected
):
    target, pid = f"127.0.0.1:{config.grpc_port}", store.call_now("view").pid
    assert asyncio.run(answers(target)) == expected
    with Watch(cluster) as watch:
        with suspended(pid):
            until_s = time.monotonic() + 10.0
            rounds = 0
            while time.monotonic() < until_s or rounds < 2:
                assert asyncio.run(answers(target)) == expected
                rounds += 1
                time.sleep(PAUSE_S)
        await_view(
            cluster,
            lambda view: all(s.experts and s.experts.num_misses for _, s in view.workers),
            60,
        )
        assert asyncio.run(answers(target)) == expected
    assert watch.least == 2, "a worker was no longer listed"
