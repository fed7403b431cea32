"""Expert caches in a group: each rank has one, of its own experts, and loads what it lacks.

The oracle is one process with all experts in memory. Real processes.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.workers.config import EngineConfig
from penstock.workers.engine import load
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.group.expert_shares import shares_of_machine
from penstock.workers.engine.load import load_engine
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.experts.expert_file import ExpertFile, ExpertShare, Manifest
from penstock.workers.experts.writer import read_manifest, write_expert_file
from penstock.workers.models.shards.decoder import ShardDecoder
from penstock.workers.stats import ExpertStats
from tests.workers.checkpoints import make_checkpoint
from tests.workers.engine.group.forked_ranks import forked_ranks
from tests.workers.engine.group.test_group import engine_of, run
from tests.workers.experts.moe_cases import experts_of

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
    assert routed is not None
    counts, facts = routed.cache.counts, routed.cache.manifest
    layers = {layer for layer, _ in facts.experts()}
    assert counts.num_misses > 0 and (counts.num_prefetched > 0 or len(layers) == 1)
    assert isinstance(group.model, ShardDecoder)
    span = group.model.shard.experts
    assert {expert for _, expert in counts.uses} <= set(range(span.first, span.end))
    assert {expert for _, expert in facts.experts()} == set(range(span.first, span.end))
    assert routed.cache.num_slots < facts.num_all


@pytest.mark.parametrize(
    ("name", "cut", "options"),
    [
        ("olmoe", {"tensor_parallel_size": 2}, {}),
        ("qwen2_moe", {"tensor_parallel_size": 2}, {"weights": "int8"}),
        ("qwen3_moe", {"tensor_parallel_size": 2}, {"weights": "int4", "num_blocks": 26}),
        ("olmoe-4-kv", {"tensor_parallel_size": 3}, {"max_num_batched_tokens": 8}),
        ("olmoe", {"pipeline_parallel_size": 2}, {}),
        ("mixtral", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {}),
        # Some ranks have no experts: there are five, and the second layer has none.
        ("olmoe-4-kv", {"tensor_parallel_size": 6}, {}),
        ("qwen2_moe-normed", {"pipeline_parallel_size": 3}, {"weights": "int8"}),
    ],
)
def test_ids_of_one_process(name, cut, options, tmp_path):
    one, group = both(name, cut, tmp_path, **options)
    assert group == one


def uses_of(stats: ExpertStats | None) -> int:
    return 0 if stats is None else stats.num_hits + stats.num_partial + stats.num_misses


def test_statistics_of_all_ranks(tmp_path):
    """The sums of what each has, also of ranks that have no experts: there are five, and the second
    layer has none."""
    model = str(make_checkpoint("olmoe-4-kv"))
    facts = experts_of(Path(model))
    num_experts = len(facts.layers) * facts.config.num_experts
    options = {"expert_cache_gb": CACHE_GB, "expert_store_dir": str(tmp_path)}
    with forked_ranks():
        group = engine_of(model, 6, **options)
    try:
        run(group)
        assert group.model.routed is not None
        own, until_s = group.model.routed.stats(), time.monotonic() + 60.0
        while uses_of(found := group.stats().experts) <= uses_of(own):
            assert time.monotonic() < until_s, f"after a minute: {found}"
            time.sleep(0.05)
        assert found is not None and found.num_experts == num_experts > own.num_experts
        assert found.slot_bytes == own.slot_bytes and found.num_slots > own.num_slots
    finally:
        group.close()


def test_another_epoch_of_the_file(tmp_path):
    """All ranks read the new file from then on: what is left of the old one is garbage."""
    folder = make_checkpoint("olmoe")
    one = engine_of(str(folder), 1)
    old, new = (
        write_expert_file(experts_of(folder), tmp_path / str(epoch), torch.float32, epoch=epoch)
        for epoch in (1, 2)
    )
    config = dataclasses.replace(one.config, tensor_parallel_size=2, expert_cache_gb=CACHE_GB)
    with forked_ranks():
        group = load_engine(config, experts=old)
    try:
        found = run(one)
        assert run(group) == found
        group.model.use_experts(new)
        Path(old.path).write_bytes(bytes(old.num_bytes))
        assert run(group) == found
    finally:
        one.close()
        group.close()


def test_a_file_of_some_ranks(tmp_path):
    """It has their experts only, and nothing is read out of it that it lacks."""
    folder = make_checkpoint("olmoe")
    config = EngineConfig(
        tensor_parallel_size=3, pipeline_parallel_size=2, nodes_per_worker=3, expert_cache_gb=1.0
    )
    experts = experts_of(folder)
    whole = write_expert_file(experts, tmp_path / "all", torch.float32)
    model, num_experts = experts.config, experts.config.num_experts
    held: list[tuple[int, int]] = []
    for machine in range(3):
        shares = shares_of_machine(config, model, machine)
        path = tmp_path / str(machine)
        part = write_expert_file(experts, path, torch.float32, shares=shares)
        assert Manifest.from_json(part.to_json()) == part == read_manifest(path)
        rows, all_rows = ExpertFile(part), ExpertFile(whole)
        for layer, expert in part.experts():
            assert (rows.rows(layer, expert) == all_rows.rows(layer, expert)).all()
        for share in shares:
            assert set(part.part([share]).experts()) <= set(part.experts())
        with pytest.raises(LoadError, match="lacks experts that this rank computes"):
            part.part([ExpertShare(0, model.num_layers, 0, num_experts)])
        assert part.num_bytes < whole.num_bytes
        held += part.experts()
    assert sorted(held) == sorted(whole.experts()) and len(set(held)) == len(held)


def test_predicted_neurons(thresholds, tmp_path):
    """Each rank prefetches those of its own experts, and loads the rest of them on demand."""
    options = {"moe_thresholds": thresholds("olmoe"), "moe_keep": 0.3, "expert_prefetch": "on"}
    one, group = both("olmoe", {"tensor_parallel_size": 2}, tmp_path, **options)
    assert group == one


def test_by_collective_operations(monkeypatch, tmp_path):
    """What GPUs use, by gloo."""
    monkeypatch.setattr(load, "transport_of", lambda device, is_far: "gloo")
    one, group = both("olmoe", {"tensor_parallel_size": 2}, tmp_path)
    assert group == one


def test_one_store_for_all_machines_is_refused():
    """Each machine has the experts of its own ranks."""
    with pytest.raises(ConfigError, match="cannot be combined with expert_store one: each machine"):
        EngineConfig(tensor_parallel_size=2, expert_cache_gb=1.0, expert_store="one")
