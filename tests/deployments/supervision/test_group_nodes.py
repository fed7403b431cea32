"""One worker whose two ranks, or two stages, are on two Ray nodes: the answers of one process, its
return, its expert stores, its adapters, and a model with linear attention."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util import list_named_actors

from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig
from penstock.deployments.experts.reload import reload_stores
from penstock.deployments.supervision.actors import NAMESPACE
from penstock.deployments.supervision.view import ClusterView
from penstock.workers.config import EngineConfig
from penstock.workers.experts.expert_file import Manifest
from penstock.workers.weights.hub import resolve_model
from tests.deployments.clusters import ENGINE, await_view, prompt
from tests.deployments.nodes import Nodes, deployed, nodes_of, nodes_of_class
from tests.deployments.ports import free_port
from tests.deployments.rolling import NUM, answers
from tests.workers.adapters.peft_files import merged, write_adapter
from tests.workers.checkpoints import FAMILIES, random_model, reference_greedy
from tests.workers.text.tokenizers_of import checkpoint

TOKENS = 40
FEW = 5  # prompts, where the oracle is slower
CACHE_GB = 0.004  # some experts of the built-in model


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Nodes]:
    made = Nodes()
    for _ in range(2):
        made.add(is_for_ingress=True)
    yield made
    made.close()


def config_of(
    nodes: Nodes,
    num_nodes: int,
    cut: str = "tensor_parallel_size",
    engine: EngineConfig = ENGINE,
) -> ServeConfig:
    values: dict[str, Any] = {cut: num_nodes, "nodes_per_worker": num_nodes}
    return ServeConfig(
        engine=dataclasses.replace(engine, **values),
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


@pytest.mark.timeout(900)
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


def stores_of(config: ServeConfig) -> dict[str, Manifest]:
    """What the expert stores of an application hold, by the node of each."""
    names = [each["name"] for each in list_named_actors(all_namespaces=True)]
    found = {}
    for name in names:
        if name.startswith(f"{config.app_name}-experts-"):
            actor = ray.get_actor(name, NAMESPACE)
            found[ray.get(actor.node.remote())] = ray.get(actor.manifest.remote())
    return found


def epochs_of(view: ClusterView) -> list[int]:
    """Of the files from which the first rank of each worker fills its expert cache."""
    return [stats.experts.epoch for _, stats in view.workers if stats.experts is not None]


@pytest.mark.timeout(900)
def test_the_experts_of_a_group_lie_where_its_ranks_are(two_nodes: Nodes, tmp_path: Path) -> None:
    """Each node's store has those of its rank, with copies, and all ranks follow it to another
    epoch."""
    cached = dataclasses.replace(
        ENGINE, model="builtin-moe", expert_store_dir=str(tmp_path), expert_cache_gb=CACHE_GB,
        moe_mode="quantized",
    )  # fmt: skip
    one = config_of(two_nodes, 1, engine=cached)
    group = config_of(two_nodes, 2, engine=cached)
    with deployed(one):
        alone = answers(one, NUM, TOKENS)
    with deployed(group) as cluster:
        places = nodes_of("Worker") + nodes_of_class("RankHost")
        stores = stores_of(group)
        assert set(stores) == set(places) and len(stores) == 2
        own, far = (set(stores[node].experts()) for node in places)
        facts = stores[places[0]]
        assert len(facts.entries) == 2 * len(own) and facts.copies == "int8"
        assert len(own | far) == len(facts.layers) * facts.num_experts and not own & far
        assert answers(group, NUM, TOKENS) == alone
        reloaded = asyncio.run(reload_stores(group.app_name))
        assert [each.epoch for each in reloaded] == [2, 2]
        await_view(cluster, lambda view: epochs_of(view) == [2], 60)  # without a request
        assert answers(group, NUM, TOKENS) == alone


@pytest.mark.timeout(900)
def test_adapters_and_states_of_a_group_over_two_nodes(two_nodes: Nodes, tmp_path: Path) -> None:
    """Each rank has its part. The oracle is transformers, in fp32."""
    base = resolve_model("builtin")
    adapter = write_adapter(tmp_path / "one", base, rank=3, seed=3, lora_alpha=1.2)
    adapted = dataclasses.replace(ENGINE, enable_lora=True, lora_modules=f"one={adapter}")
    group = config_of(two_nodes, 2, engine=adapted)
    with deployed(group) as cluster:
        (worker,) = cluster.view().workers
        assert all(each.adapter_bytes > 0 for each in worker[1].ranks)
        expected = (base, "builtin"), (merged(adapter, base, tmp_path / "merged"), "one")
        for folder, name in expected:
            assert answers(group, FEW, TOKENS, name) == greedy(folder)
    folder = tmp_path / "linear"
    shutil.copytree(checkpoint("byte_level"), folder)
    model_type, shape = FAMILIES["qwen3_5_text"]
    random_model(model_type, {**shape, "vocab_size": 2048}).save_pretrained(folder)
    linear = dataclasses.replace(ENGINE, model=str(folder))
    stages = config_of(two_nodes, 2, "pipeline_parallel_size", linear)
    with deployed(stages) as cluster:
        (worker,) = cluster.view().workers
        assert all(each.state_bytes > 0 for each in worker[1].ranks)
        assert answers(stages, FEW, TOKENS) == greedy(folder)


def greedy(folder: Path) -> list[tuple[list[int], None]]:
    return [(reference_greedy(folder, prompt(number), TOKENS), None) for number in range(FEW)]
