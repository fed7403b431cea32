"""Inexact modes of cached experts in a group: what one process with the same mode answers.

Ids, logprobs and counts of neurons. Real processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.workers.engine import load
from penstock.workers.engine.engine import Engine
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.experts.neurons.thresholds import Calibration
from penstock.workers.models.shards.decoder import ShardDecoder
from penstock.workers.request import Request, SamplingParams
from tests.workers.answers import answers, ids_of
from tests.workers.checkpoints import make_checkpoint
from tests.workers.engine.group.forked_ranks import forked_ranks
from tests.workers.engine.group.test_far_ranks import Here, group_of
from tests.workers.engine.group.test_group import PROMPTS, engine_of

CACHE_GB = 0.0003  # a few experts of the models here
NUM_NEW = 10


def asked(engine: Engine) -> dict[str, Any]:
    """All prompts together: every second one is sampled, and the second and fourth are exact."""
    requests = []
    for number, (name, prompt) in enumerate(PROMPTS.items()):
        params = SamplingParams(
            temperature=0.9 * (number % 2), seed=number, max_tokens=NUM_NEW, ignore_eos=True,
            logprobs=2, moe_mode="exact" if number % 2 else None,
        )  # fmt: skip
        requests.append(Request(name, prompt, params))
    found = answers(engine, requests)
    engine.check()
    return {
        name: (
            ids_of(deltas),
            [each for delta in deltas for each in delta.logprobs],
            (deltas[-1].moe_mode, deltas[-1].num_neurons, deltas[-1].num_skipped_neurons),
        )
        for name, deltas in found.items()
    }


def both(
    name: str,
    cut: dict[str, int],
    file: str | None,
    folder: Path,
    **options: Any,
) -> dict[str, Any]:
    """Of a group, once it is known to be that of one process, which is not that of exact mode."""
    model, found = str(make_checkpoint(name)), []
    options |= {"moe_thresholds": file, "moe_keep": 0.3, "expert_store_dir": str(folder)}
    options["expert_cache_gb"] = CACHE_GB
    plain = {key: value for key, value in options.items() if not key.startswith(("moe", "expert"))}
    with forked_ranks():
        for ranks, more in ((cut, options), ({}, options), ({}, plain)):
            engine = engine_of(model, ranks.get("tensor_parallel_size", 1), **{**more, **ranks})
            try:
                found.append(asked(engine) if more is options else exact(engine))
                if ranks:
                    check_own(engine)
                assert engine.scheduler.num_preemptions or "kv_commit" not in options
            finally:
                engine.close()
    group, one, exactly = found
    assert group == one
    assert not list(folder.iterdir()), "a file of experts has a name still"
    assert {each: group[each][:2] for each in ("40", "65")} == {
        each: exactly[each] for each in ("40", "65")
    }
    assert any(group[each][1] != exactly[each][1] for each in group), "nothing was inexact"
    return group


def check_own(group: Engine) -> None:
    """The first rank has what it needs of its own experts, if there are some, and of no others."""
    routed = group.model.routed
    assert isinstance(group.model, ShardDecoder) and group.model.has_expert_caches
    if routed is None:
        return
    span, facts = group.model.shard.experts, routed.cache.manifest
    own = set(range(span.first, span.end))
    assert {each.expert % facts.num_experts for each in facts.entries} == own
    assert {expert % facts.num_experts for _, expert in routed.cache.counts.uses} <= own
    if routed.cache.pool is not None:
        assert {expert for _, expert in routed.cache.pool.experts} == own
        assert routed.cache.pool.num_places <= facts.num_all * facts.inner
    routed.cache.check()


def exact(engine: Engine) -> dict[str, Any]:
    """What the plain model answers."""
    assert not engine.model.has_expert_caches
    return {name: each[:2] for name, each in asked(engine).items()}


@pytest.mark.parametrize(
    ("name", "mode", "cut", "options"),
    [
        ("olmoe", "sparse", {"tensor_parallel_size": 2}, {"max_num_batched_tokens": 8}),
        ("olmoe", "streamed", {"tensor_parallel_size": 2}, {"expert_prefetch": "on"}),
        ("olmoe", "sparse", {"tensor_parallel_size": 2}, {"weights": "int8"}),
        # Five experts on three ranks, and sequences that are preempted and computed again.
        ("olmoe-4-kv", "quantized", {"tensor_parallel_size": 3}, {"num_blocks": 20}),
        ("olmoe-4-kv", "sparse", {"tensor_parallel_size": 3},
         {"num_blocks": 20, "kv_commit": "eager", "expert_prefetch": "on"}),
        # Some ranks have no experts.
        ("olmoe-4-kv", "sparse", {"tensor_parallel_size": 6}, {}),
        ("olmoe-4-kv", "quantized", {"tensor_parallel_size": 6}, {}),
        # Steps in parts.
        ("olmoe", "sparse", {"pipeline_parallel_size": 2}, {"expert_prefetch": "on"}),
        ("olmoe", "streamed", {"pipeline_parallel_size": 2}, {}),
        ("mixtral", "quantized", {"pipeline_parallel_size": 2}, {}),
        ("mixtral", "sparse", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {}),
        # The first rank's layer is dense.
        ("glm4_moe-groups", "sparse", {"pipeline_parallel_size": 3}, {}),
    ],
)  # fmt: skip
def test_answers_of_one_process(
    name: str, mode: str, cut: dict[str, int], options: dict[str, Any],
    thresholds: Callable[[str], str], tmp_path: Path,
) -> None:  # fmt: skip
    file = None if mode == "quantized" else thresholds(name)
    group = both(name, cut, file, tmp_path, moe_mode=mode, **options)
    assert group["3"][2][0] == mode and group["40"][2] == ("exact", 0, 0)
    _, num, num_skipped = group["3"][2]
    assert 0.4 * num < num_skipped < num if mode == "sparse" else num == num_skipped == 0


def test_by_collective_operations(
    monkeypatch: pytest.MonkeyPatch, thresholds: Callable[[str], str], tmp_path: Path
) -> None:
    """What GPUs use, by gloo."""
    monkeypatch.setattr(load, "transport_of", lambda device, is_far: "gloo")
    both("olmoe", {"tensor_parallel_size": 2}, thresholds("olmoe"), tmp_path, moe_mode="sparse")


def test_the_first_rank_has_read_the_thresholds(
    thresholds: Callable[[str], str], tmp_path: Path
) -> None:
    """Other machines need no such file, and a different one there changes nothing."""
    options = {
        "moe_mode": "sparse", "moe_thresholds": thresholds("olmoe"), "moe_keep": 0.3,
        "expert_cache_gb": CACHE_GB, "expert_store_dir": str(tmp_path),
    }  # fmt: skip
    model, found = str(make_checkpoint("olmoe")), []
    with forked_ranks(f"{__name__}:read_no_thresholds"):
        group = group_of(model, 2, (Here(),), **options)
    for engine in (group, engine_of(model, 1, **options)):
        try:
            found.append(asked(engine))
        finally:
            engine.close()
    assert found[0] == found[1]
    with pytest.raises(LoadError, match=r"nowhere\.json is missing"):
        engine_of(model, 2, **{**options, "moe_thresholds": str(tmp_path / "nowhere.json")})


def read_no_thresholds() -> None:
    """In a rank, before it begins."""

    def refuse(_: Path) -> Calibration:
        raise LoadError("this machine has no thresholds")

    pytest.MonkeyPatch().setattr(Calibration, "load", refuse)


def test_an_unsuitable_format_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="moe_mode quantized needs the single neurons"):
        engine_of(
            str(make_checkpoint("olmoe")), 2, moe_mode="quantized", weights="int8",
            expert_cache_gb=CACHE_GB, expert_store_dir=str(tmp_path),
        )  # fmt: skip
    assert not list(tmp_path.iterdir())
