"""An update of a model's weights under load: each answer is of the one model or of the other."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.deployments.cluster import Cluster
from penstock.deployments.config import ServeConfig
from penstock.deployments.supervision.view import ClusterView
from penstock.workers.weights.hub import resolve_model
from tests.deployments.clusters import ENGINE
from tests.deployments.nodes import Nodes, deployed
from tests.deployments.ports import free_port
from tests.deployments.rolling import NUM, Ended, answers, updated_under_load

NUM_TOKENS = 60


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with other weights: same tokenizer, other answers."""
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(resolve_model("builtin"), folder)
    (file,) = folder.glob("*.safetensors")
    weights, noise = load_file(file), torch.Generator().manual_seed(1)
    for name, value in weights.items():
        if value.ndim == 2:
            drawn = torch.randn(value.shape, generator=noise) * 0.2 * value.float().std()
            weights[name] = (value.float() + drawn).to(value.dtype)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def config(ray_nodes: Nodes) -> ServeConfig:
    for _ in range(2):
        ray_nodes.add(is_for_ingress=True)
    return ServeConfig(
        engine=ENGINE,
        ray_address=ray_nodes.address,
        http_port=free_port(),
        grpc_port=free_port(),
        metrics_port=0,
        num_workers=2,
        num_ingress=2,
        cpus_per_worker=0.5,  # leaves room for a surge
        app_name="penstock-update",
        drain_s=30.0,
        surge_percent=0,
    )


@pytest.fixture(scope="module")
def cluster(config: ServeConfig) -> Iterator[Cluster]:
    with deployed(config) as cluster:
        yield cluster


def references(config: ServeConfig) -> list[list[int]]:
    """Ids of the model that is deployed now."""
    got = answers(config, NUM, NUM_TOKENS)
    assert all(error is None for _, error in got)
    return [ids for ids, _ in got]


def num_of_each(ended: list[Ended], old: list[list[int]], new: list[list[int]]) -> tuple[int, int]:
    """Answers of either model. Fails if one is of neither, or ended with an error."""
    for number, ids, error in ended:
        assert error is None
        assert ids in (old[number], new[number]), number
    num_old = sum(ids == old[number] for number, ids, _ in ended)
    return num_old, len(ended) - num_old


def num_serving(view: ClusterView) -> int:
    return sum(not info.is_draining for info, _ in view.workers)


@pytest.mark.timeout(900)
def test_each_request_is_answered_by_one_of_the_two_models(cluster, config, other_model):
    old = references(config)
    other = replace(config, engine=replace(ENGINE, model=str(other_model)))
    ended, views = updated_under_load(cluster, config, other, NUM_TOKENS)
    new = references(config)
    assert all(a != b for a, b in zip(old, new, strict=True))
    num_old, num_new = num_of_each(ended, old, new)
    assert num_old >= 4 and num_new >= 1
    digests = {info.model_digest for view in views for info, _ in view.workers}
    assert len(digests) == 2 and len({each.partition("-")[0] for each in digests}) == 1

    # Back, with new workers started before the old ones stop.
    ended, views = updated_under_load(
        cluster, other, replace(config, surge_percent=100), NUM_TOKENS
    )
    assert references(config) == old
    num_new, num_old = num_of_each(ended, new, old)
    assert num_old >= 1 and num_new >= 4
    assert max(map(num_serving, views)) > 2
