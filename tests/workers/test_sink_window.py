"""Endless answers: the engine's sink window against StreamingLLM done the slow way."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.streaming.torch_scorer import CachePolicy, TorchScorer
from penstock.kernels.attention import write_kv
from penstock.kernels.rowwise import rope_
from penstock.workers.config import EngineConfig
from penstock.workers.context_policy import FULL, ContextSettings, SinkWindow
from penstock.workers.engine.engine import Engine
from penstock.workers.errors import ConfigError
from penstock.workers.models import layers
from penstock.workers.models.loader import load_model
from penstock.workers.request import FinishReason, Request, RequestError, SamplingParams
from tests.workers import streaming_reference as slow
from tests.workers.answers import poison_released
from tests.workers.checkpoints import make_checkpoint, random_prompt, reference_model
from tests.workers.commit_rules import stays_by_chance

NUM_ROLLS = 20
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


def make_engine(model, **settings):
    """An engine whose fresh memory is all NaN, and that fills what it gives back with NaN again."""
    given = {"num_blocks": 96, "block_size": BLOCK_SIZE, **settings}
    engine = Engine(EngineConfig(**given), model)
    engine.arena.storage.fill_(0xFF)
    poison_released(engine)
    return engine


def rolling_params(sinks, window, roll, num_tokens, **settings):
    return SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        context_policy="sink_window",
        sinks=sinks,
        window=window,
        roll=roll,
        **settings,
    )


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
    assert engine.pool.num_live == 0
    return ids, last


SHAPES = [
    (sinks, window, roll)
    for sinks in (1, 4, 16)
    for window, roll in ((24, 1), (32, BLOCK_SIZE), (128, 128))
]


@pytest.mark.parametrize(("sinks", "window", "roll"), SHAPES)
def test_ids_are_those_of_streaming_llm(models, sinks, window, roll):
    """Streaming a long prompt through, in any chunking, and decoding on; at least 20 rolls, of 128
    tokens 5."""
    model, reference = models("llama")
    shape = slow.SinkWindow(sinks, window, roll, BLOCK_SIZE)
    num_tokens = shape.first + window + NUM_ROLLS * roll + 5
    num_tokens = min(num_tokens, 700)
    prompt = random_prompt(num_tokens, seed=sinks + window)
    num_new = 24
    want = slow.greedy(reference, prompt, num_new, shape)
    for chunk in (1, 7, 64, 4096):
        engine = make_engine(model, max_num_batched_tokens=chunk, max_num_seqs=1)
        params = rolling_params(sinks, window, roll, num_new)
        ids, last = run(engine, [Request("r", tuple(prompt), params)])
        assert ids["r"] == want, f"chunks of {chunk}"
        policy = SinkWindow(sinks, window, roll, BLOCK_SIZE)
        assert last["r"].num_evicted_tokens == policy.num_evicted(num_tokens + num_new - 2) > 0


@pytest.mark.parametrize(("sinks", "window"), [(4, 128), (16, 300)])
def test_twenty_rolls_of_128_while_decoding(models, sinks, window):
    """Each token of a long answer is the likeliest, with the log-probability that plain PyTorch
    over transformers' own modules gives it: teacher-forced, since one token at a time is slow."""
    model, reference = models("llama")
    prompt = random_prompt(window + 40, seed=window)
    num_new = 20 * 128 + 100
    engine = make_engine(model, num_blocks=80)
    params = rolling_params(sinks, window, 128, num_new, logprobs=0)
    engine.add(Request("r", tuple(prompt), params))
    scored = []
    while engine.has_work():
        scored += [each for delta in engine.step() for each in delta.logprobs]
    policy = SinkWindow(sinks, window, 128, BLOCK_SIZE)
    evicted = [policy.num_evicted(at) for at in (len(prompt), len(prompt) + num_new - 2)]
    assert (evicted[1] - evicted[0]) // 128 >= 20
    assert {each.rank for each in scored} == {1} and len(scored) == num_new
    ids = [*prompt, *(each.token_id for each in scored)]
    truth = TorchScorer(reference).score(
        ids, CachePolicy("", sinks, window, 128, block_size=BLOCK_SIZE)
    )[len(prompt) - 1 :]
    got = torch.tensor([each.logprob for each in scored])
    torch.testing.assert_close(got, truth, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "family",
    [
        *("qwen2", "qwen3", "mixtral", "olmoe", "llama-yarn", "granite", "smollm3", "seed_oss"),
        *("phi3", "phi3-longrope", "olmo2", "glm4"),
        *("glm4_moe", "minimax_m2", "granitemoe", "gpt_oss"),
    ],
)
def test_every_family_streams(models, family):
    model, reference = models(family)
    shape = slow.SinkWindow(4, 24, 8, BLOCK_SIZE)
    prompt = random_prompt(90, seed=5)
    want = slow.greedy(reference, prompt, 30, shape)
    ids, _ = run(make_engine(model), [Request("r", tuple(prompt), rolling_params(4, 24, 8, 30))])
    assert ids["r"] == want


def mixed_requests(num=10):
    """Sink windows of all shapes, and ordinary requests, many of which begin alike."""
    shared = random_prompt(60, seed=77)
    requests = []
    for i in range(num):
        own = random_prompt(5 + 13 * (i % 5), seed=200 + i)
        prompt = tuple(shared[: (0, 40, 60)[i % 3]] + own)
        num_new = 20 + 3 * i
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        if i % 4:
            sinks, window, roll = ((4, 24, 8), (1, 9, 1), (16, 40, 16), (8, 32, 32))[i % 4]
            params = rolling_params(sinks, window, roll, num_new)
        requests.append(Request(f"r{i}", prompt, params))
    return requests


@pytest.fixture(scope="module")
def mixed_truth(models):
    """What the slow reference says of `mixed_requests`."""
    _, reference = models("llama")
    truth = {}
    for request in mixed_requests():
        p = request.params
        shape = p.context_policy and slow.SinkWindow(p.sinks, p.window, p.roll, BLOCK_SIZE)
        truth[request.request_id] = slow.greedy(
            reference, list(request.prompt_ids), p.max_tokens, shape
        )
    return truth


SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "starved": {"num_blocks": 26, "prefix_cache": False},
    "starved, prefix cache": {"num_blocks": 26, "max_num_batched_tokens": 32, "max_num_seqs": 8},
    "always deferred": {"kv_commit": "deferred", "kv_defer_mode": "always", "ridge_tokens": 4096},
    "starved, deferred": {"num_blocks": 24, "kv_commit": "deferred", "ridge_tokens": 4096},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_schedule_beside_ordinary_requests(models, mixed_truth, schedule):
    """Batched with full-context neighbours, preempted, deferred, with shared prefixes."""
    model, _ = models("llama")
    engine = make_engine(model, **SCHEDULES[schedule])
    ids, _ = run(engine, mixed_requests())
    assert ids == mixed_truth
    stats = engine.stats()
    if schedule.startswith("starved"):
        assert stats.num_preemptions or stats.num_preemptions_avoided, "the pool was not starved"
    if "deferred" in schedule:
        assert stats.num_deferred_tokens > 0
    if engine.cache.prefix_cache:
        again, last = run(engine, mixed_requests())
        assert again == mixed_truth, "with prefix hits"
        assert last["r2"].num_cached_tokens > 0


@pytest.mark.parametrize(("window", "roll"), [(24, 8), (32, 1), (44, 16)])
def test_a_second_turn_computes_its_new_tokens_only(models, window, roll):
    """And at most a block before them, however much was evicted; another window computes more."""
    model, reference = models("llama")
    shape = slow.SinkWindow(4, window, roll, BLOCK_SIZE)
    first = random_prompt(150, seed=3)
    params = rolling_params(4, window, roll, 40)
    engine = make_engine(model, max_num_batched_tokens=32, max_num_seqs=8)
    ids, last = run(engine, [Request("one", tuple(first), params)])
    assert last["one"].num_cached_tokens == 0
    second = first + ids["one"] + random_prompt(21, seed=4)
    known = len(first) + 39  # the last token was sampled, and never read back
    ids, last = run(engine, [Request("two", tuple(second), params)])
    assert ids["two"] == slow.greedy(reference, second, 40, shape)
    assert last["two"].num_cached_tokens == known // BLOCK_SIZE * BLOCK_SIZE
    policy = SinkWindow(4, window, roll, BLOCK_SIZE)
    assert last["two"].num_evicted_tokens == policy.num_evicted(len(second) + 38)
    other = rolling_params(4, window + BLOCK_SIZE, roll, 12)
    ids, last = run(engine, [Request("other", tuple(second), other)])
    wider = slow.SinkWindow(4, window + BLOCK_SIZE, roll, BLOCK_SIZE)
    assert ids["other"] == slow.greedy(reference, second, 12, wider)
    assert last["other"].num_cached_tokens <= shape.first + window


def test_a_text_that_branches_off_finds_the_window_before(models):
    """The blocks that it rolled over are still there, as long as nothing else wants them."""
    model, reference = models("llama")
    shape = slow.SinkWindow(4, 24, 8, BLOCK_SIZE)
    text = random_prompt(200, seed=6)
    params = rolling_params(4, 24, 8, 10)
    engine = make_engine(model, max_num_batched_tokens=32, max_num_seqs=8)
    run(engine, [Request("one", tuple(text), params)])
    branch = text[:101] + random_prompt(50, seed=7)
    ids, last = run(engine, [Request("two", tuple(branch), params)])
    assert ids["two"] == slow.greedy(reference, branch, 10, shape)
    assert last["two"].num_cached_tokens == 96
    crowd = [
        Request(f"c{i}", tuple(random_prompt(150, seed=20 + i)), replace(params, max_tokens=2))
        for i in range(4)
    ]
    run(engine, crowd)
    ids, last = run(engine, [Request("three", tuple(branch), params)])
    assert ids["three"] == slow.greedy(reference, branch, 10, shape)


def test_a_preempted_endless_answer_goes_on_where_it_was(models):
    """Nothing that was rolled away is computed again, if its blocks are still there."""
    model, reference = models("llama")
    shape = slow.SinkWindow(4, 24, 8, BLOCK_SIZE)
    prompt = random_prompt(120, seed=11)
    engine = make_engine(model, max_num_batched_tokens=64)
    engine.add(Request("r", tuple(prompt), rolling_params(4, 24, 8, 60)))
    ids: list[int] = []
    while len(ids) < 30:
        ids += [token for delta in engine.step() for token in delta.token_ids]
    (seq,) = engine.scheduler.running
    before = seq.num_computed_tokens
    engine.scheduler._preempt(seq)
    assert not seq.block_table and engine.pool.num_live == 0
    ids += [token for delta in engine.step() for token in delta.token_ids]
    assert seq.num_computed_tokens > before
    while engine.has_work():
        ids += [token for delta in engine.step() for token in delta.token_ids]
        engine.check()
    assert ids == slow.greedy(reference, prompt, 60, shape)
    assert engine.cache.num_hit_tokens >= before // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("seed", range(4))
def test_random_commit_points(models, mixed_truth, seed):
    model, _ = models("llama")
    config = EngineConfig(
        num_blocks=96, block_size=BLOCK_SIZE, kv_commit="deferred", kv_defer_mode="always"
    )
    engine = Engine(config, model, stays_by_chance(random.Random(seed)))
    engine.arena.storage.fill_(0xFF)
    ids, _ = run(engine, mixed_requests())
    assert ids == mixed_truth
    assert engine.stats().num_recomputed_tokens > 0


def test_deferral_spares_preemptions(models):
    """A pool in which eager sequences are preempted, and deferring ones are not: same text."""
    model, _ = models("llama")
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompts = [random_prompt(25, seed=i) for i in range(4)]
    requests = [Request(f"r{i}", tuple(p), params) for i, p in enumerate(prompts)]
    # 4 x 7 blocks in the end; the first to finish frees enough for the others.
    settings = {"num_blocks": 26, "prefix_cache": False}
    eager = make_engine(model, **settings)
    want, _ = run(eager, requests)
    deferring = make_engine(model, kv_commit="deferred", ridge_tokens=4096, **settings)
    got, _ = run(deferring, requests)
    assert got == want
    assert eager.stats().num_preemptions > 0
    stats = deferring.stats()
    assert stats.num_preemptions == 0
    assert stats.num_preemptions_avoided > 0 and stats.num_deferred_tokens > 0


def test_memory_is_flat_without_end(models):
    """From the first roll on, a sequence holds the same number of blocks, give or take a roll."""
    model, _ = models("llama")
    engine = make_engine(model, num_blocks=24)
    engine.add(Request("r", tuple(random_prompt(10, 0)), rolling_params(4, 64, 16, 1500)))
    held = []
    while engine.has_work():
        engine.step()
        held.append(engine.pool.num_live)
    assert len(held) == 1500
    assert max(held) <= 1 + 64 // BLOCK_SIZE + 1
    assert min(held[100:-1]) >= 1 + (64 - 16) // BLOCK_SIZE


def test_unlimited_until_the_cap(models):
    model, _ = models("llama")
    engine = make_engine(model, max_endless_tokens=600)
    params = SamplingParams(
        temperature=0.0, ignore_eos=True, context_policy="sink_window", window=32, roll=8
    )
    prompt = tuple(random_prompt(11, 1))
    ids, last = run(engine, [Request("r", prompt, params)])
    assert len(ids["r"]) == 600 - 11
    assert last["r"].finish_reason is FinishReason.LENGTH
    # Longer than the model's own context as a prompt, too.
    assert model.config.max_position_embeddings < 590
    long = tuple(random_prompt(590, 2))
    assert len(run(engine, [Request("long", long, params)])[0]["long"]) == 10
    with pytest.raises(RequestError, match="at most 600 tokens"):
        engine.add(Request("too long", tuple(random_prompt(600, 3)), params))


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"context_policy": "ring"}, "context_policy"),
        ({"context_policy": "full", "sinks": 4}, "sinks"),
        ({"window": 32}, "window"),
        ({"context_policy": "sink_window", "sinks": 0}, "sinks"),
        ({"context_policy": "sink_window", "window": 4, "roll": 5}, "roll"),
        ({"context_policy": "sink_window", "window": 10**6}, "window"),
        ({"context_policy": "sink_window", "window": 2**31}, "window"),
    ],
)
def test_bad_settings_are_named(models, settings, param):
    model, _ = models("llama")
    engine = make_engine(model)
    with pytest.raises(RequestError) as refused:
        engine.add(Request("r", (1, 2, 3), SamplingParams(**settings)))
    assert refused.value.param == param
    assert not engine.has_work()


def test_a_window_that_the_pool_cannot_hold(models):
    model, _ = models("llama")
    engine = make_engine(model, num_blocks=4, max_model_len=200)
    params = SamplingParams(context_policy="sink_window", window=24, roll=8)
    with pytest.raises(RequestError, match="this worker has 4"):
        engine.add(Request("r", (1, 2, 3), params))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mistral-window", "sliding window of their own"),
        ("gemma2", "sliding window of their own"),
        ("ministral3", "queries grow with their position"),
    ],
)
def test_models_that_cannot_roll_are_refused(name, why):
    folder = make_checkpoint(name)
    model = load_model(str(folder), weights="fp32", progress=False)
    with pytest.raises(ConfigError, match=why):
        make_engine(model, context_policy="sink_window")
    engine = make_engine(model)
    with pytest.raises(RequestError, match=why):
        engine.add(Request("r", (1, 2), SamplingParams(context_policy="sink_window")))


def test_the_default_of_the_model(models):
    """`context_policy` in the configuration; a request may still ask for all of its past."""
    model, reference = models("llama")
    settings = {"context_policy": "sink_window", "sinks": 4, "window": 24, "roll": 8}
    engine = make_engine(model, **settings)
    prompt = random_prompt(60, seed=9)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    requests = [
        Request("rolling", tuple(prompt), params),
        Request("full", tuple(prompt), replace(params, context_policy="full")),
    ]
    ids, last = run(engine, requests)
    shape = slow.SinkWindow(4, 24, 8, BLOCK_SIZE)
    assert ids["rolling"] == slow.greedy(reference, prompt, 8, shape)
    assert ids["full"] == slow.greedy(reference, prompt, 8)
    assert last["full"].num_evicted_tokens == 0 < last["rolling"].num_evicted_tokens


def test_stored_values_are_what_is_read(models, monkeypatch):
    """K and V that lose bits when they are stored, as INT8 would: same ids over the rolls, however
    they are cut and deferred, since no K is ever written twice with other bits."""
    model, reference = models("llama")

    def rounded(x):
        step = x.abs().amax(-1, keepdim=True) / 127
        return (x / step).round() * step

    def write_rounded(q, k, v, cos, sin, kv, slots):
        rope_(q, k, cos, sin)
        write_kv(rounded(k), rounded(v), kv, slots)

    monkeypatch.setattr(layers, "rope_write_kv", write_rounded)
    prompt = random_prompt(70, seed=31)
    shape = slow.SinkWindow(4, 24, 8, BLOCK_SIZE)
    want = slow.greedy(reference, prompt, 40, shape, round_kv=lambda k, v: (rounded(k), rounded(v)))
    chunks: dict[str, Any] = {"max_num_batched_tokens": 7, "max_num_seqs": 2}
    for settings in ({}, chunks, SCHEDULES["always deferred"]):
        engine = make_engine(model, **settings)
        requests = [Request("r", tuple(prompt), rolling_params(4, 24, 8, 40))]
        assert run(engine, requests)[0]["r"] == want


def test_prompt_logprobs_through_the_window(models):
    model, reference = models("llama")
    prompt = random_prompt(150, seed=8)
    params = rolling_params(4, 24, 8, 1, prompt_logprobs=0)
    engine = make_engine(model, max_num_batched_tokens=32, max_num_seqs=1)
    _, last = run(engine, [Request("r", tuple(prompt), params)])
    want = slow.logprobs(reference, prompt, slow.SinkWindow(4, 24, 8, BLOCK_SIZE))
    got = torch.tensor([each.logprob for each in last["r"].prompt_logprobs])
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_policies_agree_with_counting():
    """The formulas against a window that is moved by hand."""
    for sinks, window, roll, size in ((1, 5, 1, 4), (4, 8, 8, 4), (6, 9, 3, 4), (16, 24, 7, 8)):
        policy = SinkWindow(sinks, window, roll, size)
        first = -(-sinks // size) * size
        start = first
        for t in range(300):
            while t + 1 - start > window:
                start += roll
            assert policy.window_start(t) == start
            assert policy.num_evicted(t) == (start - sinks if start > first else 0)
            end, begin, at = (int(each[0]) for each in policy.rows(torch.tensor([t]).numpy()))
            seen = {p for p in range(t + 1) if p < end or p >= begin}
            kept = sinks if start > first else first
            assert seen == {p for p in range(t + 1) if p < kept or p >= start}
            assert at == t - policy.num_evicted(t)
    assert FULL.full_tokens is None and FULL.num_evicted(10**9) == 0


def test_defaults_fit_every_context():
    for max_len in (1, 5, 16, 17, 40, 512, 4096):
        settings = ContextSettings.of(EngineConfig(), max_len)
        assert settings.max_total_tokens(SamplingParams()) == max_len
        if max_len > 16:
            made = settings.context(SamplingParams(context_policy="sink_window"))
            assert made.full_tokens is not None and made.full_tokens <= max_len
