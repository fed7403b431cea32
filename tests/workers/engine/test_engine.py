"""The engine's truth: whatever the schedule, the ids are those of transformers in fp32."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.kernels.delta_types import DeltaState
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.errors import ConfigError
from penstock.workers.models.loader import load_model
from penstock.workers.request import FinishReason, Request, RequestError, SamplingParams
from penstock.workers.weights.hub import resolve_model
from tests.workers.checkpoints import (
    FAMILIES,
    VOCAB_SIZE,
    make_checkpoint,
    random_prompt,
    reference_greedy,
    reference_logits,
)

BUILTIN = ("builtin", "builtin-moe")
VARIANTS = ("gpt_oss-window", "glm4_moe-groups", "qwen3_next-dense")
LENGTHS = [1, 2, 15, 16, 17, 33, 50, 64, 7, 1, 40, 23]
PROMPTS = [tuple(random_prompt(length, seed)) for seed, length in enumerate(LENGTHS)]
NUM_NEW = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)


def folder_of(name):
    return resolve_model(name) if name in BUILTIN else make_checkpoint(name)


@pytest.fixture(scope="module")
def models():
    loaded = {}

    def get(name):
        if name not in loaded:
            loaded[name] = load_model(str(folder_of(name)), weights="fp32", progress=False)
        return loaded[name]

    return get


def make_engine(model, **settings):
    """An engine whose fresh memory is all NaN."""
    engine = Engine(EngineConfig(**{"num_blocks": 256, "block_size": 16, **settings}), model)
    engine.arena.storage.fill_(0xFF)
    poison_states(engine)
    return engine


def poison_states(engine):
    """Fill the slots of recurrent states with NaN."""
    for layer in engine.executor.kv_layers:
        if isinstance(layer, DeltaState):
            layer.matrix.fill_(float("nan"))
            layer.last.fill_(float("nan"))


def run(engine, requests):
    """Ids and last delta of each request; the block ledger is checked on every step."""
    for request in requests:
        engine.add(request)
    ids: dict[str, list[int]] = {r.request_id: [] for r in requests}
    last = {}
    while engine.has_work():
        for delta in engine.step():
            ids[delta.request_id] += delta.token_ids
            last[delta.request_id] = delta
        engine.check()
    return ids, last


def drained(engine):
    """All deltas until no work is left."""
    deltas = []
    while engine.has_work():
        deltas += engine.step()
    return deltas


def requests_for(prompts, params=GREEDY):
    return [Request(f"r{i}", tuple(prompt), params) for i, prompt in enumerate(prompts)]


SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of 1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "chunks of 64": {"max_num_batched_tokens": 64, "max_num_seqs": 12},
    "block size 1": {"block_size": 1, "num_blocks": 2000},
    "separate activations": {"activation_memory": "separate", "max_num_seqs": 4},
    "short tail": {"num_blocks": 44, "block_size": 4, "max_num_seqs": 4, "prefix_cache": False},
    "a step ahead": {"async_scheduling": "on"},
    "a step ahead, chunks of 7": {"async_scheduling": "on", "max_num_batched_tokens": 7,
                                  "max_num_seqs": 4},
    "starved, a step ahead": {"async_scheduling": "on", "num_blocks": 21, "block_size": 4},
    "deferred": {"kv_commit": "deferred", "kv_defer_mode": "always", "ridge_tokens": 3},
    "starved": {"num_blocks": 21, "block_size": 4, "prefix_cache": False},
    "starved, prefix cache": {"num_blocks": 21, "block_size": 4, "max_num_batched_tokens": 16,
                              "max_num_seqs": 8},
}  # fmt: skip
# As long as half of the other schedules together. The decoder takes a chunk of one token of every
# family in tests/workers/models/test_decoder.py.
NAIVE, IN_NAIVE_RUNS = "chunks of 1", ("llama", "olmoe", "gpt_oss-window", "qwen3_next", "builtin")


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS, *BUILTIN])
def test_ids_are_transformers(models, family):
    """Chunked, batched, preempted and prefix-cached runs of every family and built-in; a naive run
    of each kind of layer."""
    folder, model = folder_of(family), models(family)
    want = [reference_greedy(folder, prompt, NUM_NEW) for prompt in PROMPTS]
    for name, settings in SCHEDULES.items():
        if name == NAIVE and family not in IN_NAIVE_RUNS:
            continue
        engine = make_engine(model, **settings)
        ids, last = run(engine, requests_for(PROMPTS))
        for i, expected in enumerate(want):
            assert ids[f"r{i}"] == expected, f"{name}: prompt {i}"
            assert last[f"r{i}"].finish_reason is FinishReason.LENGTH
        if name.startswith("starved"):
            assert engine.stats().num_preemptions > 0, "the pool was not starved"
        if engine.cache.prefix_cache and not name.startswith("starved"):
            again, last = run(engine, requests_for(PROMPTS))
            assert list(again.values()) == want, f"{name}: with prefix hits"
            full = (LENGTHS[7] - 1) // engine.config.block_size * engine.config.block_size
            assert last["r7"].num_cached_tokens == full


@pytest.mark.parametrize("family", [*FAMILIES, *BUILTIN])
def test_batch_of_32_equals_one_by_one(models, family):
    model = models(family)
    prompts = [random_prompt(1 + (7 * i) % 45, seed=100 + i) for i in range(32)]
    params = [
        SamplingParams(
            temperature=(0.0, 0.7, 1.5)[i % 3],
            top_k=(0, 20)[i % 2],
            top_p=(1.0, 0.9)[i % 2],
            seed=i,
            max_tokens=10 + i % 5,
            ignore_eos=True,
        )
        for i in range(32)
    ]
    requests = [Request(f"r{i}", tuple(p), s) for i, (p, s) in enumerate(zip(prompts, params))]
    together, _ = run(make_engine(model), requests)
    alone = make_engine(model, prefix_cache=False)
    for request in requests:
        ids, _ = run(alone, [request])
        assert ids[request.request_id] == together[request.request_id], request
    rng = random.Random(0)
    for size in (2, 5, 9):
        rng.shuffle(requests)
        engine = make_engine(model, max_num_seqs=size, max_num_batched_tokens=40)
        ids, _ = run(engine, requests)
        assert ids == together


def test_late_arrivals_and_aborts_leave_the_others_alone(models):
    folder, model = make_checkpoint("qwen3"), models("qwen3")
    engine = make_engine(model, num_blocks=40, block_size=4, max_num_batched_tokens=16,
                         max_num_seqs=6)  # fmt: skip
    rng = random.Random(1)
    waiting = requests_for(PROMPTS)
    ids: dict[str, list[int]] = {}
    aborted = set()
    while waiting or engine.has_work():
        if waiting and rng.random() < 0.5:
            engine.add(waiting.pop(0))
        for delta in engine.step():
            ids.setdefault(delta.request_id, []).extend(delta.token_ids)
        if rng.random() < 0.1 and engine.has_work():
            victim = rng.choice(list(engine._sequences))
            live = engine.stats().num_live_blocks
            blocks = len(set(engine._sequences[victim].block_table))
            assert engine.abort(victim)
            assert engine.stats().num_live_blocks >= live - blocks
            aborted.add(victim)
        engine.check()
    assert engine.stats().num_live_blocks == 0
    assert 0 < len(aborted) < len(PROMPTS)
    for i, prompt in enumerate(PROMPTS):
        want = reference_greedy(folder, prompt, NUM_NEW)
        got = ids.get(f"r{i}", [])
        assert got == want[: len(got)]
        assert f"r{i}" in aborted or len(got) == NUM_NEW
    assert not engine.abort("r0")


def test_resumed_after_emitted_ids(models):
    """What another worker began goes on here with the same ids, sampled ones included."""
    model = models("llama")
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)
    whole, _ = run(make_engine(model), [Request("r0", PROMPTS[3], params)])
    for cut in (1, 5, 11):
        engine = make_engine(model)
        request = Request("r0", PROMPTS[3], params, emitted_ids=tuple(whole["r0"][:cut]))
        rest, last = run(engine, [request])
        assert whole["r0"][:cut] + rest["r0"] == whole["r0"]
        assert last["r0"].finish_reason is FinishReason.LENGTH


def test_stop_tokens_and_min_tokens(models):
    folder, model = make_checkpoint("llama"), models("llama")
    ids = reference_greedy(folder, PROMPTS[4], NUM_NEW)
    stop = ids[4]
    at = ids.index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, stop_token_ids=(stop,))
    got, last = run(make_engine(model), [Request("r0", PROMPTS[4], params)])
    assert got["r0"] == ids[: at + 1]
    assert (last["r0"].finish_reason, last["r0"].stop_token_id) == (FinishReason.STOP, stop)
    later = SamplingParams(
        temperature=0.0, max_tokens=NUM_NEW, stop_token_ids=(stop,), min_tokens=at + 2
    )
    got, _ = run(make_engine(model), [Request("r0", PROMPTS[4], later)])
    assert len(got["r0"]) >= at + 2
    assert stop not in got["r0"][: at + 2]


def test_end_of_sequence(models):
    """A model whose next token is end-of-sequence stops there, unless the request ignores it."""
    folder, model = make_checkpoint("llama"), models("llama")
    eos = model.config.eos_token_ids[0]
    prompt = next(
        list(ids)
        for seed in range(2000)
        if reference_logits(folder, ids := random_prompt(3, seed))[-1].argmax() == eos
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=5)
    ids, last = run(make_engine(model), requests_for([prompt], greedy))
    assert (ids["r0"], last["r0"].stop_token_id) == ([eos], eos)
    ids, last = run(make_engine(model), requests_for([prompt]))
    assert ids["r0"] == reference_greedy(folder, prompt, NUM_NEW)


REFUSED = [
    ({"prompt_ids": ()}, "prompt", "invalid_value"),
    ({"prompt_ids": (5, VOCAB_SIZE)}, "prompt", "invalid_value"),
    ({"prompt_ids": (-1,)}, "prompt", "invalid_value"),
    ({"prompt_ids": (3,) * 64}, "prompt", "context_length_exceeded"),
    ({"params": SamplingParams(max_tokens=64)}, "max_tokens", "context_length_exceeded"),
    ({"params": SamplingParams(temperature=float("nan"))}, "temperature", "invalid_value"),
    ({"params": SamplingParams(top_p=0.0)}, "top_p", "invalid_value"),
    ({"params": SamplingParams(top_k=-1)}, "top_k", "invalid_value"),
    ({"params": SamplingParams(min_p=1.5)}, "min_p", "invalid_value"),
    ({"params": SamplingParams(seed=2**63)}, "seed", "invalid_value"),
    ({"params": SamplingParams(stop_token_ids=(VOCAB_SIZE,))}, "stop_token_ids", "invalid_value"),
    ({"params": SamplingParams(max_tokens=4, min_tokens=5)}, "min_tokens", "invalid_value"),
    ({"params": SamplingParams(stop=("x",) * 17)}, "stop", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED, ids=str)
def test_refused_by_add(models, fields, param, code):
    engine = make_engine(models("llama"), num_blocks=4)  # 64 tokens in all
    with pytest.raises(RequestError) as refusal:
        engine.add(Request(**{"request_id": "bad", "prompt_ids": (3, 4), **fields}))
    assert (refusal.value.param, refusal.value.code) == (param, code)
    assert not engine.has_work()
    ids, _ = run(engine, requests_for(PROMPTS[:1]))
    assert len(ids["r0"]) == NUM_NEW


def test_waiting_line_is_bounded(models):
    engine = make_engine(models("llama"), max_waiting=2)
    requests = requests_for(PROMPTS[:3])
    engine.add(requests[0])
    engine.add(requests[1])
    with pytest.raises(RequestError) as refusal:
        engine.add(requests[2])
    assert refusal.value.code == "overloaded"
    # One that was admitted on a worker that was lost is not refused a second time.
    engine.add(replace(requests[2], emitted_ids=(5,), is_continued=True))
    ids = [token_id for delta in drained(engine) for token_id in delta.token_ids]
    assert len(ids) == 3 * NUM_NEW - 1


def test_without_max_tokens_the_context_is_the_limit(models):
    engine = make_engine(models("llama"), num_blocks=5, block_size=8)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    ids, last = run(engine, requests_for([PROMPTS[3]], params))
    assert len(ids["r0"]) == 40 - len(PROMPTS[3])
    assert last["r0"].finish_reason is FinishReason.LENGTH


def test_nan_ends_one_request_and_is_never_cached(models):
    """NaN in the K of one sequence: it ends with an error, its neighbours' ids do not change."""
    folder, model = make_checkpoint("llama"), models("llama")
    engine = make_engine(model)
    for request in requests_for(PROMPTS[4:8]):
        engine.add(request)
    ids: dict[str, list[int]] = {f"r{i}": [] for i in range(4)}
    last = {}
    for step in range(NUM_NEW + 1):
        if step == 3:
            first_block = engine._sequences["r2"].block_table[0]
            engine.arena.block(first_block).fill_(0xFF)
        for delta in engine.step():
            ids[delta.request_id] += delta.token_ids
            last[delta.request_id] = delta
        engine.check()
    assert (last["r2"].finish_reason, last["r2"].error) == (FinishReason.ERROR, "numerical_error")
    assert first_block not in engine.pool.index
    assert engine.stats().num_corrupted == 1
    for i in (0, 1, 3):
        assert ids[f"r{i}"] == reference_greedy(folder, PROMPTS[4 + i], NUM_NEW)


def test_a_request_that_breaks_the_step_fails_alone(models, monkeypatch):
    folder, model = make_checkpoint("llama"), models("llama")
    engine = make_engine(model, cuda_graphs="off")  # which do not call `begin` again
    begin = model.begin

    def breaks(token_ids, positions, inputs, *memory):
        if inputs.num_decode and (inputs.decode.context_lens == len(PROMPTS[6]) + 3).any():
            raise RuntimeError("a kernel failed")
        return begin(token_ids, positions, inputs, *memory)

    monkeypatch.setattr(model, "begin", breaks)
    ids, last = run(engine, requests_for(PROMPTS[5:8]))
    assert (last["r1"].finish_reason, last["r1"].error) == (FinishReason.ERROR, "internal_error")
    for i in (0, 2):
        assert ids[f"r{i}"] == reference_greedy(folder, PROMPTS[5 + i], NUM_NEW)
    assert engine.stats().num_live_blocks == 0


def test_pool_that_holds_no_block_is_refused(models):
    with pytest.raises(ConfigError, match="raise kv_cache_gb"):
        Engine(EngineConfig(kv_cache_gb=1e-9), models("llama"))
    limit = models("llama").config.max_position_embeddings
    with pytest.raises(ConfigError, match=f"exceeds the {limit:,} tokens"):
        Engine(EngineConfig(num_blocks=4, max_model_len=limit + 1), models("llama"))


def test_memory_is_one_allocation_with_disjoint_blocks(models):
    """Writing one block through the layer views touches that block's bytes only."""
    engine = make_engine(models("qwen2"), num_blocks=5)
    before = engine.arena.storage.clone()
    for k, v in ((layer.k, layer.v) for layer in engine.arena.kv_layers()):
        k[3].fill_(1.5)
        v[3].fill_(2.5)
        assert torch.equal(k[3], torch.full_like(k[3], 1.5))
    size = engine.arena.layout.block_bytes
    assert size % 512 == 0
    same = engine.arena.storage == before
    assert bool(same[: 3 * size].all())
    assert bool(same[4 * size :].all())
    assert not bool(same[3 * size : 3 * size + 64].any())
