"""A model with an expert cache computes the same bits and ids as the plain model.

With any capacity, whatever is prefetched, and where one expert is damaged.
"""

from __future__ import annotations

import dataclasses
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.experts.build import ExpertSettings
from penstock.workers.experts.writer import write_expert_file
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from tests.workers.answers import answers, ids_of
from tests.workers.checkpoints import make_checkpoint, random_prompt, reference_greedy
from tests.workers.experts.moe_cases import (
    BIASED,
    MOE,
    Garbage,
    experts_of,
    flip,
    logits_of,
    plain,
    poison,
)
from tests.workers.models.test_decoder import folder_of

FP32 = torch.float32
NUM_NEW = 12


@pytest.mark.parametrize("name", MOE)
@settings(max_examples=6, deadline=None)
@given(
    num_slots=st.sampled_from([1, 2, 3, 4, 7, 15]),
    prefetch=st.sampled_from(["off", "on", "garbage", "neurons of garbage"]),
    is_fair=st.booleans(),
    seed=st.integers(0, 99),
)
def test_exact_is_the_plain_model(name, num_slots, prefetch, is_fair, seed):
    """Bit for bit, with any capacity, and whatever is prefetched."""
    experts = ExpertSettings(num_slots=num_slots, prefetch=prefetch != "off", is_fair=is_fair)
    model = load_model(folder_of(name), weights="fp32", progress=False, experts=experts)
    routed: Any = model.routed  # whose parts are exchanged
    if "garbage" in prefetch:
        routed.predictor = Garbage(seed)
    if "neurons" in prefetch:
        routed.selector = types.SimpleNamespace(active=None)
    poison(routed.cache)
    try:
        prompt = random_prompt(9, seed)
        got = logits_of(model, prompt, 5)
        routed.cache.check()
    finally:
        routed.close()
    assert torch.equal(got, logits_of(plain(name), prompt, 5))


@pytest.mark.parametrize("name", [*MOE, *BIASED, "gpt_oss-window", "glm4_moe-groups"])
def test_ids_of_transformers(name):
    """Through the engine, several sequences at once, preempted and all."""
    folder, num_slots = make_checkpoint(name), 2
    experts = ExpertSettings(num_slots=num_slots)
    model = load_model(folder, weights="fp32", progress=False, experts=experts)
    engine = Engine(
        EngineConfig(num_blocks=14, block_size=4, max_num_seqs=3, max_num_batched_tokens=16), model
    )
    prompts = {str(n): random_prompt(n) for n in (3, 8, 21)}
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True)
    got = answers(engine, [Request(name, tuple(each), params) for name, each in prompts.items()])
    stats = engine.stats().experts
    engine.close()
    for request_id, prompt in prompts.items():
        assert ids_of(got[request_id]) == reference_greedy(folder, prompt, NUM_NEW)
    assert stats is not None
    assert stats.num_misses and stats.demand_bytes and stats.num_slots == num_slots
    assert not [t for t in threading.enumerate() if t.name == "penstock-experts"]


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_built_in(weights):
    """A bf16 checkpoint: its own bytes in the expert file, whatever the model computes in."""
    experts = ExpertSettings(num_slots=5)
    model = load_model("builtin-moe", weights=weights, progress=False, experts=experts)
    assert model.routed is not None
    poison(model.routed.cache)
    assert model.routed.cache.manifest.dtype == "bf16"
    prompt = random_prompt(13)
    got = logits_of(model, prompt, 5)
    model.routed.close()
    assert torch.equal(got, logits_of(plain("builtin-moe", weights), prompt, 5))


def test_a_corrupted_expert_ends_those_that_need_it(tmp_path, caplog):
    """With an error that the log explains; who is not routed there goes on, and ids are right."""
    folder, path = make_checkpoint("olmoe"), tmp_path / "a"
    manifest = write_expert_file(experts_of(folder), path, FP32)
    prompts = {n: random_prompt(1, seed=n) for n in range(8)}
    routes = {n: _routes(folder, prompt) for n, prompt in prompts.items()}
    key = next(k for k in routes[0] if any(k not in routes[n] for n in prompts))
    entry = next(e for e in manifest.entries if (e.layer, e.expert) == key)
    flip(path, entry.offset + 77)
    experts = ExpertSettings(num_slots=4, manifest=manifest)
    model = load_model(folder, weights="fp32", progress=False, experts=experts)
    engine = Engine(EngineConfig(num_blocks=64, block_size=4, max_num_seqs=8), model)
    for n, prompt in prompts.items():
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        engine.add(Request(str(n), tuple(prompt), params))
    got = {}
    while engine.has_work():
        got.update({int(delta.request_id): delta for delta in engine.step()})
    engine.close()
    for n, prompt in prompts.items():
        if key in routes[n]:
            assert got[n].error == "internal_error"
        else:
            assert got[n].token_ids == reference_greedy(folder, prompt, 1)
    assert 0 < sum(key in routes[n] for n in prompts) < len(prompts)
    assert f"layer {key[0]}, expert {key[1]} is corrupted" in caplog.text
    stats = engine.stats().experts
    assert stats is not None and stats.num_corrupted


def _routes(folder: Path, prompt: Sequence[int]) -> set[tuple[int, int]]:
    """The experts that one token goes through."""
    experts = ExpertSettings(num_slots=15, prefetch=False)
    model = load_model(folder, weights="fp32", progress=False, experts=experts)
    assert model.routed is not None
    logits_of(model, prompt, 0)
    model.routed.close()
    return {slot.key for slot in model.routed.cache.table if slot.key is not None}


def test_what_cannot_be_served(tmp_path):
    experts = ExpertSettings(cache_gb=1.0)
    sparse = dataclasses.replace(experts, mode="sparse")
    with pytest.raises(ConfigError, match=r"moe_mode sparse .* have biases"):
        load_model(make_checkpoint("gpt_oss"), progress=False, experts=sparse)
    with pytest.raises(ConfigError, match="mixture-of-experts models, and this one is dense"):
        load_model("builtin", progress=False, experts=experts)
    manifest = write_expert_file(experts_of(make_checkpoint("olmoe")), tmp_path / "a", FP32)
    other = dataclasses.replace(experts, manifest=manifest)
    with pytest.raises(LoadError, match="made from other files"):
        load_model(make_checkpoint("mixtral"), weights="fp32", progress=False, experts=other)
