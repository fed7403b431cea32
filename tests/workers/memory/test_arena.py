"""Activations in the tail of the KV pool change no result; they only save memory."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from penstock.kernels.cpu import native
from penstock.kernels.delta_types import DeltaState, StateRows
from penstock.kernels.types import DecodeBatch, PagedKv, PrefillBatch
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.errors import ConfigError, InvariantError
from penstock.workers.memory.workspace import Array, BufferPlan, Workspace
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.layers import AttentionInputs, LayerCache
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from penstock.workers.weights.hub import resolve_model
from tests.workers.answers import answers
from tests.workers.checkpoints import FAMILIES, VOCAB_SIZE, make_checkpoint, random_prompt

BUILTIN = ("builtin", "builtin-moe")
NUM_NEW = 8
CANARY = 0xA5


@functools.cache
def decoder_of(name: str, weights: str = "fp32") -> Decoder:
    folder = resolve_model(name) if name in BUILTIN else make_checkpoint(name)
    return load_model(folder, weights=weights, progress=False)


class WatchedEngine(Engine):
    lent: list[int]  # blocks of each loan


def make_engine(model: Decoder, **settings) -> WatchedEngine:
    """An engine whose memory is NaN at first, and again wherever a loan has been."""
    defaults = {
        "num_blocks": 96,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "kv_commit": "eager",  # else the reserve has room for such steps, and none is lent
    }
    engine = WatchedEngine(EngineConfig(**{**defaults, **settings}), model)
    engine.arena.storage.fill_(0xFF)
    engine.lent = []
    pool: Any = engine.pool  # one of its methods is replaced
    give_back = engine.pool.give_back

    def poison() -> None:
        engine.lent.append(pool.num_lent)
        held = (*engine.scheduler.sequences(), *engine.scheduler.leaving)
        pool.check([seq.block_table for seq in held])
        engine.arena.tail(pool.num_lent).fill_(0xFF)
        give_back()

    pool.give_back = poison
    return engine


def requests_for(lengths: list[int], *, prompt_logprobs: int | None = None) -> list[Request]:
    """Greedy and sampled ones in turn, with logprobs: equal bits, not only equal ids, are seen."""
    return [
        Request(
            f"r{i}",
            tuple(random_prompt(length, seed=i)),
            SamplingParams(
                temperature=(0.0, 0.9)[i % 2],
                seed=i,
                max_tokens=NUM_NEW,
                ignore_eos=True,
                logprobs=3,
                prompt_logprobs=prompt_logprobs,
            ),
        )
        for i, length in enumerate(lengths)
    ]


def run(engine: Engine, requests: list[Request]) -> dict[str, list]:
    """Everything that came out of each request, logprobs included."""

    def all_is_back() -> None:
        assert not engine.pool.num_lent

    return {
        request_id: [
            part
            for delta in deltas
            for part in (delta.token_ids, delta.logprobs, delta.prompt_logprobs)
        ]
        for request_id, deltas in answers(engine, requests, all_is_back).items()
    }


def ids(found: dict[str, list]) -> list[list]:
    """Without logprobs: where chunks are cut, other kernels run, and last bits may differ."""
    return [each[::3] for each in found.values()]


LENGTHS = [33, 5, 61, 17, 4, 40]


@pytest.mark.parametrize("name", [*FAMILIES, *BUILTIN])
def test_tail_and_separate_give_the_same_bits_over_poisoned_loans(name):
    model = decoder_of(name)
    requests = requests_for(LENGTHS, prompt_logprobs=2)
    apart = make_engine(model, activation_memory="separate")
    want = run(apart, requests)
    assert not apart.lent
    tail = make_engine(model)
    assert run(tail, requests) == want
    assert max(tail.lent) > 0
    assert tail.arena.num_bytes < apart.arena.num_bytes
    saved = tail.stats().num_saved_bytes
    assert tail.arena.num_bytes + saved == pytest.approx(apart.arena.num_bytes, abs=512)
    assert tail.stats().num_saved_blocks == saved // tail.arena.layout.block_bytes > 0
    assert apart.stats().num_saved_bytes == apart.stats().num_saved_blocks == 0


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_other_formats_too(weights):
    model = decoder_of("builtin", weights)
    requests = requests_for(LENGTHS, prompt_logprobs=2)
    want = run(make_engine(model, activation_memory="separate"), requests)
    tail = make_engine(model)
    assert run(tail, requests) == want
    assert max(tail.lent) > 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_half_live_tail_makes_chunks_smaller_and_changes_no_text(prefix_cache, monkeypatch):
    """Long answers fill the pool from below until little or nothing of it is left to lend."""
    model = decoder_of("llama")
    requests = requests_for([70, 70, 70, 50, 66])
    want = run(make_engine(model, activation_memory="separate", num_blocks=400), requests)
    for num_blocks in (60, 40, 30, 20):
        engine = make_engine(model, num_blocks=num_blocks, prefix_cache=prefix_cache)
        sizes: list[int] = []
        execute = engine.executor.launch

        def watched(plan, before, execute=execute, sizes=sizes):
            sizes.append(plan.num_tokens)
            return execute(plan, before)

        monkeypatch.setattr(engine.executor, "launch", watched)
        found = run(engine, requests)
        assert ids(found) == ids(want)
        assert engine.stats().num_shortened_steps > 0
        # The first prompt takes 18 blocks at once; the free tail after all blocks in use is lent.
        assert num_blocks > 20 or sizes[:2] == [engine.memory.plan.rows_in(bytes_of(engine, 2))] * 2


def test_a_live_last_block_leaves_the_reserve_and_progress(monkeypatch):
    model = decoder_of("llama")
    engine = make_engine(model, num_blocks=64, max_num_seqs=3)
    last = [engine.pool.allocate() for _ in range(64)][-1]
    for block_id in range(63):
        engine.pool.release(block_id)
    # Of the block above no sequence knows.
    monkeypatch.setattr(engine, "check", lambda: engine.pool.check())
    monkeypatch.setattr(engine.pool, "give_back", lambda: pytest.fail("nothing can be lent"))
    assert engine.memory.tokens_that_fit(64) == engine.memory.reserve_tokens == 3
    requests = requests_for([40, 9])
    assert ids(run(engine, requests)) == ids(run(make_engine(model), requests))
    engine.pool.release(last)


def test_cached_blocks_in_a_loan_are_forgotten_and_others_still_hit():
    model = decoder_of("llama")
    engine = make_engine(model, num_blocks=96, max_num_batched_tokens=64)
    (first,) = requests_for([41])
    want = ids(run(engine, [first]))
    assert engine.pool.num_cached == 12  # of 41 + 8 tokens, the last one not computed
    assert ids(run(engine, [first])) == want
    # Single tokens with long answers borrow nothing, and fill the pool up into its tail.
    long = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    num_loans = len(engine.lent)
    run(engine, [Request(f"f{i}", (5 + i,), long) for i in range(4)])
    assert len(engine.lent) == num_loans
    cached = set(engine.pool._cached) | set(engine.pool._cached_tail)
    needed = engine.memory.blocks_for(64)
    lent = set(range(96 - needed, 96))
    assert len(cached & lent) > 5
    engine.pool.lend(needed)
    left = set(engine.pool._cached) | set(engine.pool._cached_tail)
    assert left == cached - lent
    assert not any(block_id in engine.pool.index for block_id in lent)
    engine.pool.give_back()
    assert ids(run(engine, [first])) == want


def test_the_tail_is_filled_last_so_that_a_full_cache_does_not_make_loans_short():
    """The pool overflows with cached blocks, and every prefill still gets its whole chunk."""
    engine = make_engine(decoder_of("llama"), num_blocks=200, max_num_seqs=2)
    for i in range(12):
        prompt = tuple(random_prompt(64, seed=i))
        run(engine, [Request(f"r{i}", prompt, SamplingParams(max_tokens=3, temperature=0.0))])
    assert engine.pool.num_cached > 100
    assert engine.stats().num_shortened_steps == 0
    assert len(engine.lent) == 12


def bytes_of(engine: Engine, num_blocks: int) -> int:
    return engine.memory.reserve_bytes + num_blocks * engine.arena.layout.block_bytes


def inputs_for(num_tokens: int, num_decode: int) -> tuple[torch.Tensor, AttentionInputs]:
    """One prefill chunk after decode rows, each of them the second token of its own block."""
    positions = torch.cat([torch.ones(num_decode), torch.arange(num_tokens - num_decode)]).long()
    chunk = num_tokens - num_decode
    tables = torch.arange(-(-chunk // 4), dtype=torch.int32)[None] + num_decode
    slots = torch.cat([torch.arange(num_decode) * 4 + 1, torch.arange(chunk) + 4 * num_decode])

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return positions, AttentionInputs(
        slots=slots,
        num_decode=num_decode,
        decode=DecodeBatch(
            torch.arange(num_decode, dtype=torch.int32)[:, None], ints(*[2] * num_decode), 2
        ),
        prefill=PrefillBatch(tables, ints(0, chunk), ints(chunk), chunk),
        states=StateRows(
            starts=ints(*range(num_decode + 1), num_tokens),
            sources=ints(*range(num_decode), -1),
            write_starts=ints(*range(num_decode + 2)),
            write_after=ints(*[1] * num_decode, chunk),
            write_slots=ints(*range(num_decode, 2 * num_decode + 1)),
        ),
    )


def caches_of(model: Decoder, num_tokens: int) -> list[LayerCache]:
    """Of each layer, blocks and states of zeros."""
    facts = model.config
    shape = (num_tokens + 1, facts.num_kv_heads, 4, facts.head_dim)

    def zeros(*shape: int, dtype: torch.dtype = model.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=model.device)

    found: list[LayerCache] = []
    for layer in range(facts.num_layers):
        linear = facts.linear_attention
        if linear is None or not facts.is_linear(layer):
            found.append(PagedKv(zeros(*shape), zeros(*shape)))
            continue
        heads = linear.num_value_heads, linear.key_dim, linear.value_dim
        matrix = zeros(8, *heads, dtype=torch.float32)
        found.append(DeltaState(zeros(8, linear.taps - 1, linear.channels), matrix))
    return found


def guarded_bytes(num_bytes: int, model: Decoder) -> torch.Tensor:
    return torch.full((num_bytes,), CANARY, dtype=torch.uint8, device=model.device)


def forward(model: Decoder, num_tokens: int, workspace: Workspace | None) -> torch.Tensor:
    """The final hidden states of a mixed step over blocks of zeros."""
    num_decode = min(3, num_tokens - 1)
    kv = caches_of(model, num_tokens)
    with torch.device(model.device):
        positions, inputs = inputs_for(num_tokens, num_decode)
        ids = torch.tensor(random_prompt(num_tokens, seed=3))
    return model.forward(ids, positions, inputs, kv, workspace).clone()


@pytest.mark.parametrize(
    ("name", "weights"),
    [(n, w) for n in (*FAMILIES, "olmoe-clip", "qwen2_moe-normed") for w in ("fp32", "bf16")]
    + [("llama-bias", "int8"), ("qwen2_moe-normed", "int8"), ("mixtral", "int8")],
)
def test_arrays_keep_to_their_bounds_and_may_share_them(name, weights):
    """Each array alone between canaries, against the plan, in which they take turns."""
    model = decoder_of(name, weights)
    for num_tokens in (1, 2, 37):
        guarded = []
        views: dict[str, torch.Tensor] = {}
        for region in model.plan.regions:
            for array in (array for phase in region for array in phase):
                alone = BufferPlan((((array,),),))
                inner = alone.bytes_for(num_tokens)
                memory = guarded_bytes(inner + 1024, model)
                used = num_tokens * array.row_bytes
                memory[512 : 512 + used] = 0xFF
                views |= alone.views(num_tokens, memory[512:-512])
                guarded.append((array.name, memory, used))
        apart = forward(model, num_tokens, Workspace(**views))
        assert apart.isfinite().all()
        for array_name, memory, used in guarded:
            assert bool((memory[:512] == CANARY).all()), array_name
            assert bool((memory[512 + used :] == CANARY).all()), array_name

        size = model.plan.bytes_for(num_tokens)
        memory = guarded_bytes(size + 512, model)
        memory[:size] = 0xFF
        shared = forward(
            model, num_tokens, Workspace(**model.plan.views(num_tokens, memory[:size]))
        )
        assert bool((memory[size:] == CANARY).all())
        assert torch.equal(shared, apart)


def allocated(profile: torch.profiler.profile) -> list[int]:
    """Bytes of every allocation (positive) and release (negative), C++ code included."""
    assert profile.profiler is not None
    results: Any = profile.profiler.kineto_results
    events = results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]"]


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("name", "weights"),
    [*((name, "fp32") for name in (*FAMILIES, *BUILTIN)), ("mixtral", "int8")]
    + [("builtin", weights) for weights in ("int8", "int4", "nf4", "fp8")],
)
def test_a_forward_pass_allocates_nothing_as_large_as_its_rows(name, weights):
    model, num_tokens = decoder_of(name, weights), 300
    if weights != "fp32" and native.bound.library is None:
        pytest.skip("without the native library, quantised weights are unpacked for each product")
    memory = torch.empty(model.plan.bytes_for(num_tokens), dtype=torch.uint8)
    workspace = Workspace(**model.plan.views(num_tokens, memory))
    one_array = num_tokens * model.config.hidden_size * model.dtype.itemsize
    positions, inputs = inputs_for(num_tokens, 3)
    kv = caches_of(model, num_tokens)
    ids = torch.tensor(random_prompt(num_tokens))
    largest = []
    for given in (workspace, None):
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            model.forward(ids, positions, inputs, kv, given)
        largest.append(max(allocated(profile)))
    assert largest[0] < one_array / 2, "a hidden allocation"
    assert largest[1] >= model.plan.bytes_for(num_tokens), "allocations are not seen"


@pytest.mark.cpu_only
def test_memory_is_flat_over_1000_mixed_steps():
    """Live bytes of torch's allocator peak no higher in later steps than in earlier ones."""
    model = decoder_of("qwen3")
    engine = make_engine(model, num_blocks=80, max_num_seqs=6)
    rng, num_added = random.Random(0), 0
    peaks: list[int] = []
    live = 0
    while len(peaks) < 10:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            for _ in range(100):
                while len(engine._sequences) < 8:
                    prompt = tuple(random_prompt(rng.randint(1, 120), seed=num_added))
                    params = SamplingParams(max_tokens=rng.randint(1, 20), temperature=0.0)
                    engine.add(Request(f"r{num_added}", prompt, params))
                    num_added += 1
                engine.step()
        peak = 0
        for nbytes in allocated(profile):
            live += nbytes
            peak = max(peak, live)
        peaks.append(peak)
    stats = engine.stats()
    assert stats.num_steps == 1000
    assert stats.num_shortened_steps > 0, "the tail was never short"
    assert max(engine.lent) > 0
    one_array = 64 * model.config.hidden_size * 4
    assert max(peaks[2:]) <= max(peaks[:2]) + one_array // 4, peaks


def test_plan_fits_exactly_what_it_says():
    arrays = (Array("a", 3, torch.float32), Array("b", 5, torch.bfloat16))
    plan = BufferPlan((((arrays[0],), (arrays[1],)), (arrays,)))
    assert plan.bytes_for(10) == 256 + 512
    assert plan.bytes_for(0) == 0
    for num_bytes in (0, 255, 767, 768, 5000, 12345):
        num_rows = plan.rows_in(num_bytes)
        assert plan.bytes_for(num_rows) <= num_bytes < plan.bytes_for(num_rows + 1)
    views = plan.views(10, torch.zeros(768, dtype=torch.uint8))
    assert views["a"].shape == (10, 3)
    assert views["b"].dtype == torch.bfloat16
    with pytest.raises(InvariantError, match="too small"):
        plan.views(10, torch.zeros(767, dtype=torch.uint8))


def test_admissions_leave_what_the_largest_step_borrows_or_a_sixteenth_of_the_pool():
    model = decoder_of("llama")
    for most_rows, is_all in ((2048, False), (200, True)):
        config = EngineConfig(
            kv_cache_gb=8 / 1024, max_num_seqs=40, max_num_batched_tokens=most_rows
        )
        engine = Engine(config, model)
        borrowed, sixteenth = engine.memory.blocks_for(most_rows), engine.arena.num_blocks // 16
        assert (borrowed <= sixteenth) == is_all
        assert engine.scheduler.num_kept == min(borrowed, sixteenth) > 0
    apart = Engine(EngineConfig(kv_cache_gb=8 / 1024, activation_memory="separate"), model)
    assert apart.scheduler.num_kept == 0


def test_room_is_what_is_configured():
    """kv_cache_gb counts blocks, activations and logits together, in both modes."""
    model, budget = decoder_of("llama"), 8 * 2**20
    engines = {
        mode: Engine(
            EngineConfig(kv_cache_gb=budget / 2**30, activation_memory=mode, max_num_seqs=40), model
        )
        for mode in ("tail", "separate")
    }
    block_bytes = engines["tail"].arena.layout.block_bytes
    for engine in engines.values():
        assert budget - block_bytes - 512 < engine.arena.num_bytes <= budget + 512
    gained = engines["tail"].arena.num_blocks - engines["separate"].arena.num_blocks
    assert abs(gained - engines["tail"].stats().num_saved_blocks) <= 1
    assert gained > 100
    with pytest.raises(ConfigError, match="activations and logits"):
        Engine(EngineConfig(kv_cache_gb=1e-4), model)
    assert engines["tail"].memory.logits.shape == (40, VOCAB_SIZE)
