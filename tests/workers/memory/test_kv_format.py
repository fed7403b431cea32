"""KV in int8 and fp8 through the engine: the ids are those of a model whose K (behind RoPE) and V
make the round trip, whatever the schedule.

Rounding to codes is a jump: where two ways to sum in fp32 differ in the last bit, a value at the
edge of a code can fall to either side, and logits move by 0.01. So the slow reference is followed
along the engine's ids, and may prefer another token by that little; between schedules of one
engine, where every row has the same bits, ids are equal.
"""

from __future__ import annotations

import random
import secrets
from typing import Any

import pytest
import torch

from penstock.kernels.quant import dequantize_kv, quantize_kv
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.errors import ConfigError
from penstock.workers.memory.arena import Arena, BlockLayout
from penstock.workers.memory.kv_format import DTYPES, kv_format
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from tests.workers import streaming_reference as slow
from tests.workers.answers import poison_released
from tests.workers.checkpoints import make_checkpoint, random_prompt, reference_model
from tests.workers.commit_rules import stays_by_chance

BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def models():
    loaded = {}

    def get(name):
        if name not in loaded:
            folder = make_checkpoint(name)
            model = load_model(str(folder), weights="fp32", progress=False)
            loaded[name] = (model, reference_model(folder))
        return loaded[name]

    return get


def round_trip(kv, group):
    """What the cache gives back, as the slow reference wants it; group 0 is the head."""

    def one(x):
        return dequantize_kv(*quantize_kv(x, DTYPES[kv], group or x.shape[-1]))

    return lambda k, v: (one(k), one(v))


def make_engine(model, rule=None, **settings):
    """An engine whose fresh memory, and what it gives back, has NaN for every scale."""
    given = {"num_blocks": 96, "block_size": BLOCK_SIZE, "kv": "int8", "kv_group": "8", **settings}
    engine = Engine(EngineConfig(**given), model, rule)
    engine.arena.storage.fill_(0xFF)
    poison_released(engine)
    return engine


def run(engine, requests):
    for request in requests:
        engine.add(request)
    ids: dict[str, list[int]] = {r.request_id: [] for r in requests}
    while engine.has_work():
        for delta in engine.step():
            ids[delta.request_id] += delta.token_ids
        engine.check()
    assert engine.pool.num_live == 0
    engine.close()
    return ids


def greedy(num_tokens, **settings):
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **settings)


def follow(reference, prompt, ids, window=None, rounding=None):
    """By how much the slow reference would have preferred another token, at each of `ids`."""
    slow_model = slow.StreamingReference(reference, window, rounding)
    gaps = []
    for token_id in prompt:
        logits = slow_model.step(token_id)
    for token_id in ids:
        gaps.append(float(logits.max() - logits[token_id]))
        logits = slow_model.step(token_id)
    return gaps


def agrees(gaps):
    return max(gaps) < 0.05 and sum(gap == 0 for gap in gaps) >= 0.9 * len(gaps)


@pytest.mark.parametrize(("family", "kv", "group"), [
    ("llama", "int8", "head"), ("llama", "fp8", "8"), ("qwen2", "int8", "8"),
    ("qwen3", "fp8", "head"), ("mixtral", "int8", "8"), ("olmoe", "int8", "head"),
    ("llama-yarn", "fp8", "8"), ("mistral-window", "int8", "8"),
])  # fmt: skip
def test_every_family(models, family, kv, group):
    model, reference = models(family)
    prompt = random_prompt(40, seed=5)
    ids = run(make_engine(model, kv=kv, kv_group=group), [Request("r", tuple(prompt), greedy(16))])[
        "r"
    ]
    rounding = round_trip(kv, 0 if group == "head" else int(group))
    assert agrees(follow(reference, prompt, ids, rounding=rounding))


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_logprobs_show_the_round_trip(models, kv):
    """They are the reference's as far as its codes are, and far from those without rounding."""
    model, reference = models("llama")
    prompt = random_prompt(40, seed=7)
    engine = make_engine(model, kv=kv)
    engine.add(Request("r", tuple(prompt), greedy(1, prompt_logprobs=0)))
    got = torch.tensor([each.logprob for each in engine.step()[0].prompt_logprobs])
    error = (got - slow.logprobs(reference, prompt, None, round_trip(kv, 8))).abs()
    plain = (got - slow.logprobs(reference, prompt)).abs()
    assert error.median() < plain.median() / 30 and error.max() < 0.1 and plain.median() > 0.01


def mixed_requests():
    """Ordinary requests that begin alike, and sink windows."""
    shared, requests = random_prompt(48, seed=77), []
    for i in range(8):
        prompt = tuple(shared[: (0, 40, 48)[i % 3]] + random_prompt(5 + 13 * (i % 5), seed=200 + i))
        num_new = 12 + 3 * i
        params = greedy(num_new)
        if i % 3 == 2:
            sinks, window, roll = ((4, 24, 8), (1, 9, 1), (8, 32, 32))[i // 3]
            params = greedy(
                num_new, context_policy="sink_window", sinks=sinks, window=window, roll=roll
            )
        requests.append(Request(f"r{i}", prompt, params))
    return requests


@pytest.fixture(scope="module")
def mixed_truth(models):
    """The ids of each request alone, and those of one of each kind against the slow reference."""
    model, reference = models("llama")
    truth: dict[str, dict[str, list[int]]] = {}
    for kv in ("int8", "fp8"):
        truth[kv] = {}
        for request in mixed_requests():
            truth[kv] |= run(make_engine(model, kv=kv), [request])
        for request in mixed_requests()[2:4]:
            p = request.params
            shape = p.context_policy and slow.SinkWindow(p.sinks, p.window, p.roll, BLOCK_SIZE)
            ids = truth[kv][request.request_id]
            assert agrees(follow(reference, request.prompt_ids, ids, shape, round_trip(kv, 8)))
    return truth


DEFERRED = {"kv_commit": "deferred", "ridge_tokens": 4096}
SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "starved": {"num_blocks": 20, "prefix_cache": False},
    "starved, prefix cache": {"num_blocks": 20, "max_num_batched_tokens": 32, "max_num_seqs": 8},
    "starved, swapped": {"num_blocks": 20, "prefix_cache": False, "host_kv_gb": 0.01},
    "starved, loaded": {"num_blocks": 20, "host_kv_gb": 0.01, "kv_restore": "load"},
    "always deferred": {**DEFERRED, "kv_defer_mode": "always"},
    "starved, deferred": {**DEFERRED, "num_blocks": 20},
    "random commits": {"kv_commit": "deferred", "kv_defer_mode": "always"},
}


@pytest.mark.parametrize(("schedule", "kv"), [
    *((schedule, "int8") for schedule in SCHEDULES),
    *((schedule, "fp8") for schedule in ("chunks of 7", "starved, deferred", "random commits")),
])  # fmt: skip
def test_any_schedule(models, mixed_truth, schedule, kv):
    """Chunked, batched, preempted, swapped, deferred, rolled, with prefix hits: the same ids."""
    rule = stays_by_chance(random.Random(3)) if schedule == "random commits" else None
    engine = make_engine(models("llama")[0], rule, kv=kv, **SCHEDULES[schedule])
    want = mixed_truth[kv]
    assert run(engine, mixed_requests()) == want
    stats = engine.stats()
    if schedule.startswith("starved"):
        assert stats.num_preemptions or stats.num_preemptions_avoided, "the pool was not starved"
    if "deferred" in schedule or "commits" in schedule:
        assert stats.num_recomputed_tokens > 0
    if "host_kv_gb" in SCHEDULES[schedule]:
        assert stats.num_loaded_tokens > 0
    if engine.cache.prefix_cache and not schedule.startswith("starved"):
        assert run(engine, mixed_requests()) == want, "with prefix hits"
        assert engine.stats().num_prefix_hit_tokens > 0


def test_bytes_of_a_token_are_the_published_ones():
    """PPL's KV cache: LLaMA-7B, and 70B with 8 KV heads (research/ppl.md, section 3.5)."""

    def token_bytes(num_layers, num_kv_heads, dtype, group=None):
        return BlockLayout(num_layers, num_kv_heads, 16, 128, dtype, group).token_bytes

    int8, fp16 = torch.int8, torch.float16
    assert token_bytes(32, 32, fp16) == 524_288
    assert [token_bytes(32, 32, int8, g) for g in (8, 64)] == [327_680, 270_336]
    assert token_bytes(80, 8, fp16) == 327_680
    assert [token_bytes(80, 8, int8, g) for g in (8, 64)] == [204_800, 168_960]
    assert token_bytes(80, 8, torch.float8_e4m3fn, 64) == 168_960


@pytest.mark.parametrize(("dtype", "group"), [
    (torch.int8, 8), (torch.float8_e4m3fn, 24), (torch.float32, None),
])  # fmt: skip
def test_parts_of_a_block_are_disjoint_and_fill_it(dtype, group):
    layout = BlockLayout(3, 2, 4, 24, dtype, group)
    arena = Arena(layout, 5, torch.device("cpu"))
    arena.storage.zero_()
    layers = arena.kv_layers()
    for layer in layers:
        parts = [layer.k, layer.v]
        if group is not None:
            assert layer.scales is not None and layer.scales.k.dtype == torch.float16
            assert layer.scales.k.shape == (5, 2, 4, 24 // group)
            parts += [layer.scales.k, layer.scales.v]
        for part in parts:
            mine = part.view(torch.uint8)[3]
            assert not mine.count_nonzero()  # no sequence has written here
            mine.fill_(1)
    size = layout.block_bytes
    assert int(arena.storage.count_nonzero()) == 4 * layout.token_bytes <= size
    assert int(arena.block(3).count_nonzero()) == 4 * layout.token_bytes > size - 512


def test_blocks_of_another_format_have_other_keys(models, monkeypatch):
    """Were secrets alike, tokens would still not find a block in other numbers."""
    monkeypatch.setattr(secrets, "token_bytes", lambda n: bytes(n))
    model, _ = models("llama")
    formats = [("auto", "auto"), ("int8", "8"), ("int8", "head"), ("fp8", "8")]
    roots = [make_engine(model, kv=kv, kv_group=group).cache._root for kv, group in formats * 2]
    assert len(set(roots)) == len(formats) and roots[:4] == roots[4:]


def test_formats_are_chosen_and_refused():
    assert kv_format("auto", "auto", 64, torch.bfloat16).dtype == torch.bfloat16
    assert kv_format("int8", "auto", 128, torch.bfloat16).group == 32
    assert kv_format("fp8", "auto", 80, torch.float32).group == 80
    assert kv_format("int8", "head", 96, torch.float32).group == 96
    with pytest.raises(ConfigError, match=r"head dimension, which is 80; set it to 8, head"):
        kv_format("int8", "64", 80, torch.float32)
    with pytest.raises(ConfigError, match="set kv to int8 or fp8"):
        kv_format("auto", "64", 128, torch.float32)
    with pytest.raises(ConfigError, match="kv must be one of"):
        EngineConfig(kv="int4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_group must be one of"):
        EngineConfig(kv="int8", kv_group="16")  # type: ignore[arg-type]


def test_the_same_bytes_admit_more(models):
    """6144 bytes a block in fp32, in int8 1920, rounded up to 2048: three times the sequences."""
    model, _ = models("llama")
    most = {}
    for kv, group in (("auto", "auto"), ("int8", "8")):
        layout = make_engine(model, kv=kv, kv_group=group).arena.layout
        engine = make_engine(model, kv=kv, kv_group=group, max_num_seqs=100,
                             activation_memory="separate",  # no block is kept for activations
                             num_blocks=30 * 6144 // layout.block_bytes)  # fmt: skip
        for i in range(100):
            engine.add(Request(f"r{i}", tuple(random_prompt(4, i)), greedy(3)))
        engine.step()
        most[kv] = engine.stats().num_running
    assert most == {"auto": 30, "int8": 90}
