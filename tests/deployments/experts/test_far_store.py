"""One expert store for two nodes: the worker elsewhere gets its experts over the network.

The oracle is the plain engine in this process, which has all experts in its own memory.
"""

from __future__ import annotations

import asyncio

import torch

from penstock.deployments.client import AsyncClient
from penstock.deployments.config import ServeConfig
from penstock.deployments.experts.client import ExpertStoreClient
from penstock.deployments.experts.spec import StoreSpec
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from tests.deployments.nodes import deployed, nodes_of
from tests.deployments.ports import free_port

ENGINE = EngineConfig(
    model="builtin-moe", weights="fp32", device="cpu", num_blocks=300, max_num_seqs=8, threads=1,
    expert_cache_gb=0.006, expert_prefetch=True, expert_store="one",
)  # fmt: skip
PROMPTS = [list(range(9 + n, 19 + n)) for n in range(8)]
NUM_TOKENS = 40


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


def test_a_worker_without_a_store_on_its_node_gives_the_same_ids(ray_nodes):
    for _ in range(2):
        ray_nodes.add(num_cpus=1)
    config = ServeConfig(
        engine=ENGINE,
        ray_address=ray_nodes.address,
        http_port=free_port(),
        grpc_port=free_port(),
        metrics_port=0,
        num_workers=2,
        app_name="penstock-far-store",
        drain_s=2.0,
    )
    with deployed(config) as cluster:
        worker_nodes = nodes_of("Worker")
        assert len(set(worker_nodes)) == 2
        spec = StoreSpec(config.app_name, "builtin-moe", "fp32", "cpu", "/dev/shm", is_single=True)
        store_node = ExpertStoreClient(spec).ask("node")
        assert sum(node != store_node for node in worker_nodes) >= 1
        assert asyncio.run(answers(f"127.0.0.1:{config.grpc_port}")) == plain_ids()
        stats = {info.node: experts for info, s in cluster.view().workers if (experts := s.experts)}
    far = [experts for node, experts in stats.items() if not store_node.startswith(node)]
    assert far and all(each.num_misses > 0 and each.demand_bytes > 0 for each in far)
    assert sum(each.num_corrupted for each in stats.values()) == 0
