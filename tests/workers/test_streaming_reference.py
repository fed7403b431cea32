"""The oracle of the sink window against transformers and against the authors' own cache slicing.

The literal port below runs transformers' forward with rotation switched off, so that its cache
holds K before RoPE; the attention function rotates, and the cache is cut with slices and `cat`
after every forward, as `StartRecentKVCache` does. It shares no layer code with the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from benchmarks.streaming.torch_scorer import CachePolicy, TorchScorer
from tests.workers.checkpoints import (
    ALL,
    FAMILIES,
    make_checkpoint,
    random_model,
    random_prompt,
    reference_greedy,
    reference_logits,
    reference_model,
)
from tests.workers.streaming_reference import (
    SinkWindow,
    StreamingReference,
    greedy,
    int8_rounding,
    logprobs,
    sliding_window_recompute,
    sliding_window_recompute_greedy,
    window_only,
)

TOLERANCE: dict[str, Any] = {"atol": 2e-4, "rtol": 1e-4}


def logits_of(model: Any, ids: Sequence[int], window: SinkWindow | None, **more: Any) -> Tensor:
    reference = StreamingReference(model, window, **more)
    return torch.stack([reference.step(token_id) for token_id in ids])


@functools.cache
def double_model(name: str) -> Any:
    """A fresh model in fp64, whose forward a test may change."""
    model = random_model(*ALL[name]).double()
    model.set_experts_implementation("eager")  # the other ones have no fp64
    return model


# The reference turns all layers by one rope, and scales no queries: these are models for which the
# sink window is refused (test_sink_window.py).
OTHERS = ("ministral", "olmo3", "gemma", "qwen3_next", "qwen3_5")


@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith(OTHERS)])
def test_without_eviction_it_is_transformers(name: str):
    folder = make_checkpoint(name)
    ids = random_prompt(41)
    expected = reference_logits(folder, ids)
    torch.testing.assert_close(logits_of(reference_model(folder), ids, None), expected, **TOLERANCE)
    if name in FAMILIES:
        wide = SinkWindow(sinks=5, window=33, roll=8, block_size=4)
        found = logits_of(reference_model(folder), ids, wide)
        torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
def test_greedy_ids_without_eviction_are_those_of_generate(name: str):
    folder, prompt = make_checkpoint(name), random_prompt(7)
    expected = reference_greedy(folder, prompt, 30)
    model = reference_model(folder)
    assert greedy(model, prompt, 30) == expected
    assert greedy(model, prompt, 30, SinkWindow(4, 32, 16, 4)) == expected
    assert sliding_window_recompute_greedy(model, prompt, 30, 64) == expected


class AuthorsPort:
    """Runs `model` one token a call with the authors' cache (start_size, recent_size)."""

    def __init__(self, model: Any, start_size: int, recent_size: int):
        self.model, self.start_size, self.recent_size = model, start_size, recent_size
        self.past = DynamicCache(config=model.config)

    def step(self, token_id: int) -> Tensor:
        ids = torch.tensor([[token_id]])
        at = torch.tensor([[self.past.get_seq_length()]])
        logits = self.model(ids, past_key_values=self.past, position_ids=at).logits[0, -1]
        for layer in self.past.layers:  # StartRecentKVCache.__call__
            length = layer.keys.shape[2]
            if length > self.start_size + self.recent_size:
                for name in ("keys", "values"):
                    whole = getattr(layer, name)
                    recent = whole[:, :, length - self.recent_size :]
                    cut = torch.cat([whole[:, :, : self.start_size], recent], dim=2)
                    setattr(layer, name, cut)
        return logits


@pytest.fixture
def authors_model(request: pytest.FixtureRequest):
    """A model that caches K before RoPE and rotates the whole cache with arange in every layer."""
    model = double_model(request.param)
    rotary = model.model.rotary_emb
    rotate_for_real = type(rotary).forward

    def no_rotation(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        shape = (*position_ids.shape, model.config.head_dim)
        return torch.ones(shape, dtype=x.dtype), torch.zeros(shape, dtype=x.dtype)

    def pos_shift(module, q, k, v, mask, scaling, **_):
        places = torch.arange(k.shape[2])[None]
        cos, sin = rotate_for_real(rotary, k, places)
        _, k = apply_rotary_pos_emb(k, k, cos, sin)
        q, _ = apply_rotary_pos_emb(q, q, cos[:, -1:], sin[:, -1:])
        k, v = (repeat_kv(each, module.num_key_value_groups) for each in (k, v))
        weights = (q @ k.transpose(2, 3) * scaling).softmax(dim=-1)
        return (weights @ v).transpose(1, 2), weights

    ALL_ATTENTION_FUNCTIONS.register("authors_pos_shift", pos_shift)
    rotary.forward = no_rotation
    model.set_attn_implementation("authors_pos_shift")
    yield model
    del rotary.forward
    model.set_attn_implementation("eager")


@pytest.mark.parametrize(("sinks", "recent"), [(4, 12), (1, 15), (0, 16), (7, 1), (4, 200)])
@pytest.mark.parametrize("authors_model", ["mistral", "qwen3"], indirect=True)
@torch.inference_mode()
def test_roll_of_one_is_the_authors_cache_slicing(authors_model: Any, sinks: int, recent: int):
    """fp64, 90 tokens, most of them after the first eviction."""
    ids = random_prompt(90)
    port = AuthorsPort(authors_model, sinks, recent)
    expected = torch.stack([port.step(token_id) for token_id in ids])
    found = logits_of(authors_model, ids, SinkWindow(sinks, recent + 1))
    # transformers rounds the angle to fp32 before the cosine; it is at most 100 here.
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    assert port.past.get_seq_length() == min(len(ids), sinks + recent)
    if sinks + recent < 90:  # one key more or less is another result
        other = logits_of(authors_model, ids, SinkWindow(sinks, recent + 2))
        assert (other - expected).abs().max() > 0.1


@pytest.mark.parametrize(
    ("sinks", "block_size", "window", "roll"), [(4, 4, 12, 4), (5, 4, 12, 8), (0, 4, 8, 4)]
)
def test_what_is_kept_is_what_the_formulas_say(sinks: int, block_size: int, window: int, roll: int):
    reference = StreamingReference(
        reference_model(make_checkpoint("llama")), SinkWindow(sinks, window, roll, block_size)
    )
    first = -(-sinks // block_size) * block_size
    for t, token_id in enumerate(random_prompt(70)):
        reference.step(token_id)
        start = first + roll * -(-max(0, t + 1 - first - window) // roll)
        end = sinks if start > first else first
        evicted = start - sinks if start > first else 0
        assert reference.positions == [p for p in range(t + 1) if p < end or p >= start]
        assert len(reference.positions) - 1 == t - evicted  # where the query stands


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "olmoe-clip", "llama-yarn-mscale"])
def test_a_window_of_the_model_is_recomputed_differently(name: str):
    """Not the same thing: cached tokens keep what they took from evicted ones, in all layers but
    the first. With one layer it is the same."""
    model = reference_model(make_checkpoint(name))
    ids = random_prompt(50)
    cached = logprobs(model, ids, window_only(16))
    recomputed = sliding_window_recompute(model, ids, 16)
    torch.testing.assert_close(cached[:16], recomputed[:16], **TOLERANCE)
    assert (cached[16:] - recomputed[16:]).abs().max() > 0.05
    model_type, settings = ALL[name]
    single = random_model(model_type, {**settings, "num_hidden_layers": 1})
    torch.testing.assert_close(
        logprobs(single, ids, window_only(16)),
        sliding_window_recompute(single, ids, 16),
        **TOLERANCE,
    )


@torch.inference_mode()
def test_teacher_forced_logprobs_are_those_of_transformers():
    folder, ids = make_checkpoint("llama"), random_prompt(30)
    expected = (
        reference_logits(folder, ids).log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    )
    model = reference_model(folder)
    torch.testing.assert_close(logprobs(model, ids), expected[:, 0], **TOLERANCE)
    found = sliding_window_recompute(model, ids, 30)
    torch.testing.assert_close(found, expected[:, 0], **TOLERANCE)


@pytest.mark.parametrize("name", ["qwen3", "llama-yarn-mscale"])
def test_rounding_sees_k_at_its_absolute_position(name: str):
    model = double_model(name)
    ids, window = random_prompt(40), SinkWindow(4, 12, 4, 4)
    exact = logits_of(model, ids, window)
    seen: list[Tensor] = []

    def note(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(k)
        return k, v

    # Turned there and back again, nothing has changed.
    torch.testing.assert_close(logits_of(model, ids, window, round_kv=note), exact)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([ids]), past_key_values=cache)
    layers = model.config.num_hidden_layers
    first_layer = torch.stack(seen[::layers], dim=1)  # [kv_heads, T, dim]
    torch.testing.assert_close(first_layer, cache.layers[0].keys[0], atol=1e-4, rtol=1e-5)
    rounded = logits_of(model, ids, window, round_kv=int8_rounding(8))
    error = (rounded - exact).square().mean().sqrt() / exact.std()
    assert 1e-4 < error < 0.2


@pytest.mark.parametrize(
    "policy",
    [
        CachePolicy("full"),
        CachePolicy("none", sinks=0, window=24, roll=8, block_size=8),
        CachePolicy("one", sinks=1, window=16, roll=8, block_size=8),
        CachePolicy("ragged", sinks=5, window=12, roll=4, block_size=4),
        CachePolicy("whole", sinks=8, window=16, roll=16, block_size=8),
        CachePolicy("authors", sinks=4, window=13, roll=1, block_size=1),
    ],
    ids=lambda policy: policy.name,
)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
def test_the_benchmarks_chunked_scorer_is_the_reference(name: str, policy: CachePolicy):
    """Two queries and the closed formula against a list that forgets: odd chunks, fp64."""
    model = double_model(name)
    ids = random_prompt(100)
    window = None
    if policy.window is not None:
        window = SinkWindow(policy.sinks, policy.window, policy.roll, policy.block_size)
    expected = logits_of(model, ids, window)[:-1].log_softmax(-1)
    expected = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    for chunk in (5, 64):
        found = TorchScorer(model, chunk=chunk).score(ids, policy)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
