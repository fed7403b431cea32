"""Models with 64 and 128 experts, eight of them for each token, as OLMoE and Qwen3-MoE have."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from penstock.workers.config import EngineConfig, MoeMode
from penstock.workers.engine.engine import Engine
from penstock.workers.experts.build import ExpertSettings
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from tests.workers.answers import answers, ids_of
from tests.workers.checkpoints import make_checkpoint, random_prompt, reference_greedy
from tests.workers.experts.moe_cases import plain, poison

NAMES = {"olmoe-64": 64, "qwen3_moe-128": 128}
NUM_NEW = 8
PROMPTS = {str(n): random_prompt(n) for n in (3, 8, 21)}


def serve(name: str, **options: Any):
    """Ids by request of three that run together, and the expert cache's figures."""
    settings = ExpertSettings(prefetch=True, **options)
    model = load_model(make_checkpoint(name), weights="fp32", progress=False, experts=settings)
    assert model.routed is not None
    poison(model.routed.cache)
    model.routed.meter.clock = lambda: 0.0  # prefetches are never withheld
    engine = Engine(
        EngineConfig(
            num_blocks=14, block_size=4, max_num_seqs=3, max_num_batched_tokens=16,
            moe_mode=cast(MoeMode, settings.mode), expert_cache_gb=1.0,
        ),
        model,
    )  # fmt: skip
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True)
    found = answers(engine, [Request(name, tuple(each), params) for name, each in PROMPTS.items()])
    stats = engine.stats().experts
    model.routed.cache.check()
    engine.close()
    assert stats is not None
    return {name: ids_of(deltas) for name, deltas in found.items()}, stats


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [0.02, 0.3])
def test_ids_of_transformers(name, share):
    """A cache of a few experts of each layer, and one of fewer than a token needs of one layer."""
    num_all = NAMES[name] * plain(name).config.num_layers
    found, stats = serve(name, num_slots=max(2, round(share * num_all)))
    for request_id, prompt in PROMPTS.items():
        assert found[request_id] == reference_greedy(make_checkpoint(name), prompt, NUM_NEW)
    assert stats.num_experts == num_all and stats.num_misses and stats.num_prefetched


@pytest.mark.parametrize("name", NAMES)
def test_sparse_answers(name, thresholds):
    """All neurons kept: transformers' ids, from a pool; a third kept: as many are left out."""
    num_all = NAMES[name] * plain(name).config.num_layers
    options = {"mode": "sparse", "thresholds": thresholds(name), "num_slots": num_all // 4}
    found, stats = serve(name, keep=1.0, **options)
    for request_id, prompt in PROMPTS.items():
        assert found[request_id] == reference_greedy(make_checkpoint(name), prompt, NUM_NEW)
    assert stats.num_sparse_neurons and not stats.num_skipped_neurons
    alone, stats = serve(name, keep=0.3, **options)
    assert 0.6 < stats.num_skipped_neurons / stats.num_sparse_neurons < 0.8
    assert serve(name, keep=0.3, **{**options, "num_slots": num_all})[0] == alone


@pytest.mark.parametrize("name", NAMES)
def test_routers_choose_as_many_as_the_model_says(name):
    model = plain(name)
    assert model.config.num_experts == NAMES[name]
    assert model.config.num_experts_per_token == 8
    with torch.inference_mode():
        weights, ids = model.layers[0].mlp.choose(torch.randn(5, model.config.hidden_size))
    assert ids.shape == weights.shape == (5, 8)
