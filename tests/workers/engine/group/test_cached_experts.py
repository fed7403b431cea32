"""Expert caches in a group: each rank has one, of its own experts, and loads what it lacks.

The oracle is one process with all experts in memory. Real processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.workers.config import EngineConfig
from penstock.workers.engine import load
from penstock.workers.engine.engine import Engine
from penstock.workers.errors import ConfigError
from penstock.workers.models.shards.decoder import ShardDecoder
from tests.workers.checkpoints import make_checkpoint
from tests.workers.engine.group.forked_ranks import forked_ranks
from tests.workers.engine.group.test_group import engine_of, run

CACHE_GB = 0.0002  # a few experts of the models here
FEW_GB = 0.00004  # quantised


def both(name: str, cut: dict[str, int], folder: Path, **options: Any) -> tuple[Any, Any]:
    model = str(make_checkpoint(name))
    one = engine_of(model, 1, **options)
    cache_gb = FEW_GB if "weights" in options else CACHE_GB
    cached = {"expert_cache_gb": cache_gb, "expert_store_dir": str(folder)}
    with forked_ranks():
        group = engine_of(model, cut.get("tensor_parallel_size", 1), **options, **cut, **cached)
    try:
        assert not list(folder.iterdir()), "the file of experts has a name still"
        found = run(one, logprobs=1), run(group, logprobs=1)
        check_cache(group)
        return found
    finally:
        one.close()
        group.close()


def check_cache(group: Engine) -> None:
    """It holds some of the first rank's experts, and no others were ever asked of it."""
    routed = group.model.routed
    assert routed is not None and routed.cache.num_slots < routed.cache.manifest.num_all
    counts = routed.cache.counts
    assert counts.num_misses > 0 and counts.num_prefetched == 0
    assert isinstance(group.model, ShardDecoder)
    span = group.model.shard.experts
    assert {expert for _, expert in counts.uses} <= set(range(span.first, span.end))


@pytest.mark.parametrize(
    ("name", "cut", "options"),
    [
        ("olmoe", {"tensor_parallel_size": 2}, {}),
        ("qwen2_moe", {"tensor_parallel_size": 2}, {"weights": "int8"}),
        ("qwen3_moe", {"tensor_parallel_size": 2}, {"weights": "int4", "num_blocks": 26}),
        ("olmoe-4-kv", {"tensor_parallel_size": 3}, {"max_num_batched_tokens": 8}),
        ("olmoe", {"pipeline_parallel_size": 2}, {}),
        ("mixtral", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {}),
    ],
)
def test_ids_of_one_process(name, cut, options, tmp_path):
    one, group = both(name, cut, tmp_path, **options)
    assert group == one


def test_by_collective_operations(monkeypatch, tmp_path):
    """What GPUs use, by gloo."""
    monkeypatch.setattr(load, "transport_of", lambda device, is_far: "gloo")
    one, group = both("olmoe", {"tensor_parallel_size": 2}, tmp_path)
    assert group == one


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"moe_mode": "quantized"}, "expert_cache_gb cannot be combined with moe_mode quantized"),
        ({"expert_store": "one"}, "cannot be combined with expert_store one"),
        ({"nodes_per_worker": 2}, "cannot be combined with nodes_per_worker 2"),
        ({"moe_thresholds": "x.json"}, "cannot be combined with moe_thresholds x.json"),
    ],
)
def test_settings_that_cannot_be(values, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{"tensor_parallel_size": 2, "expert_cache_gb": 1.0, **values})
