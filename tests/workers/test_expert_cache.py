"""The expert cache: whatever was prefetched, evicted or cut off, what comes out is the checkpoint.

One copier thread runs in each test, as in a worker. Slots are full of NaN at first.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint, random_prompt, reference_greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from test_expert_arena import _flip, experts_of
from test_models import Paged, Tokens, folder_of

from penstock.kernels.experts import write_neurons
from penstock.kernels.matmul import pack_linear
from penstock.workers.config import ConfigError, EngineConfig
from penstock.workers.engine import Engine
from penstock.workers.experts.arena import Arena, CorruptedExpert
from penstock.workers.experts.budget import slots_within
from penstock.workers.experts.cache import ExpertCache
from penstock.workers.experts.forms import NeuronForm
from penstock.workers.experts.opening import ExpertSettings
from penstock.workers.experts.slots import Residence
from penstock.workers.experts.writer import write_arena
from penstock.workers.models.folder import LoadError
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams

FP32, BF16, CPU = torch.float32, torch.bfloat16, torch.device("cpu")
MOE = [name for name in FAMILIES if name in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")]
NUM_LAYERS, NUM_EXPERTS = 3, 5
CHUNK = 7 * 3 * 64 * 4  # seven neurons
NUM_NEW = 12


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def shared_arena() -> Arena:
    with tempfile.TemporaryDirectory() as folder:
        return Arena(write_arena(experts_of(make_checkpoint("olmoe")), Path(folder, "a"), FP32))


@functools.cache
def packed(layer: int, expert: int) -> tuple:
    """As the loader would pack it."""
    rows = torch.from_numpy(shared_arena().rows(layer, expert).copy()).view(FP32)
    gate, up, down = rows.split(64, 1)
    return pack_linear(torch.cat([gate, up])), pack_linear(down.T.contiguous())


def form_of(arena: Arena) -> NeuronForm:
    return NeuronForm(arena.manifest, FP32, CPU)


def make_cache(num_slots: int, **options) -> ExpertCache:
    cache = ExpertCache(
        shared_arena(), num_slots, form_of(shared_arena()), chunk_bytes=CHUNK, **options
    )
    poison(cache)
    return cache


def poison(cache: ExpertCache) -> None:
    """Rows that nobody wrote are NaN; what pads the layout stays zero, as it is made."""
    facts = cache.manifest
    shape = facts.inner, 3 * facts.hidden
    for slot in cache.table:
        if facts.is_packed:
            slot.memory.fill_(0xFF)
            continue
        nan = torch.full(shape, float("nan"), dtype=cache.form.dtype)
        write_neurons(slot.expert, nan, torch.arange(facts.inner))


def visit(cache: ExpertCache, layer: int, needed: Sequence[int]) -> list[int]:
    """The order in which they came; each has the bits of the checkpoint, while it is in use."""
    order = []
    for expert, got in cache.visit(layer, needed):
        for mine, theirs in zip(got, packed(layer, expert), strict=True):
            assert torch.equal(mine.payload, theirs.payload)
        order.append(expert)
    assert sorted(order) == sorted(needed)
    cache.check()
    return order


def wait_for(what) -> None:
    deadline_s = time.monotonic() + 10
    while not what():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.001)


def is_quiet(cache: ExpertCache) -> bool:
    return not cache.copier.is_busy


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["visit", "prefetch", "break off", "wait", "source"]),
        st.integers(0, NUM_LAYERS - 1),
        st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=1, max_size=NUM_EXPERTS, unique=True),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(num_slots=st.integers(1, 15), is_fair=st.booleans(), steps=STEPS)
def test_any_order_of_events(num_slots, is_fair, steps):
    cache = make_cache(num_slots, is_fair=is_fair)
    try:
        for what, layer, experts in steps:
            if what == "visit":
                visit(cache, layer, sorted(experts))
            elif what == "prefetch":
                cache.prefetch(layer, [*experts, 99])  # garbage is overlooked
            elif what == "break off":  # as when a step fails half-way
                next(cache.visit(layer, sorted(experts)))
            elif what == "source":
                cache.use_source(shared_arena())
            else:
                wait_for(lambda: is_quiet(cache))
            cache.check()
    finally:
        cache.close()
    cache.check()
    assert all(slot.load is None for slot in cache.table)


def test_three_cases_of_a_lookup():
    cache = make_cache(2)
    table, some = cache.table, np.array([3, 4, 50])
    assert table.lookup((0, 1)) == table.lookup((0, 1), some) == (Residence.ABSENT, None)
    slot = table.take((0, 1))
    slot.arrived(np.array([3, 4]))
    assert table.lookup((0, 1), some) == (Residence.PARTIAL, slot)
    assert slot.missing(some).tolist() == [50]
    slot.arrived(np.array([50]))
    assert table.lookup((0, 1), some) == (Residence.WHOLE, slot)
    assert table.lookup((0, 1)) == (Residence.PARTIAL, slot)
    slot.arrived(slot.missing())
    assert table.lookup((0, 1)) == (Residence.WHOLE, slot)
    assert table.take((0, 2)) is not slot
    assert table.take((0, 3)) is slot and not slot.num_has  # the older one gives way


def test_only_missing_rows_are_loaded():
    cache = make_cache(3)
    slot = cache.table.take((1, 2))
    some = np.array([0, 5, 6, 30])
    rows = torch.from_numpy(shared_arena().rows(1, 2)[some].copy()).view(FP32)
    write_neurons(slot.expert, rows, torch.from_numpy(some))
    slot.arrived(some)
    visit(cache, 1, [2])
    cache.close()
    row_bytes, inner = cache.manifest.row_bytes, cache.manifest.inner
    assert cache.copier.counts.demand_bytes == (inner - 4) * row_bytes
    assert cache.counts.num_partial == 1
    assert (cache.counts.num_rows_there, cache.counts.num_rows_wanted) == (4, inner)


def test_least_recently_used():
    cache = make_cache(3, is_fair=False)
    for layer, experts in ((0, [0, 1]), (1, [0]), (0, [0]), (2, [4])):
        visit(cache, layer, experts)
    cache.close()
    held = {slot.key for slot in cache.table}
    assert held == {(0, 0), (1, 0), (2, 4)}
    assert (cache.counts.num_hits, cache.counts.num_misses) == (1, 4)


def test_fair_shares():
    """Layers in turn, two new experts each: those of other layers stay where each has its share."""
    cache = make_cache(6, is_fair=True)
    for _ in range(3):
        for layer in range(3):
            visit(cache, layer, [0, 1])
    assert cache.counts.num_hits == 12 and cache.counts.num_misses == 6
    visit(cache, 0, [2])
    assert {slot.key for slot in cache.table if slot.key[0]} == {(1, 0), (1, 1), (2, 0), (2, 1)}
    cache.close()


def test_what_is_there_comes_first():
    cache = make_cache(6)
    visit(cache, 0, [3])
    assert visit(cache, 0, [1, 2, 3])[0] == 3
    cache.close()


def test_demand_overtakes_prefetch():
    """On a slow link: of a prefetch under way no more than a chunk goes before what is needed."""
    inner, row_bytes = shared_arena().manifest.inner, shared_arena().manifest.row_bytes
    cache = make_cache(6, bytes_per_s=inner * row_bytes / 0.2)  # an expert in 0.2 s
    cache.prefetch(1, [0, 1, 2])
    wait_for(lambda: cache.copier.counts.prefetch_bytes)
    visit(cache, 0, [0])
    counts = cache.copier.counts
    assert counts.demand_bytes == inner * row_bytes
    assert counts.prefetch_bytes < inner * row_bytes / 2
    cache.close()


def test_a_stale_prefetch_is_dropped_and_what_came_of_it_used():
    inner, row_bytes = shared_arena().manifest.inner, shared_arena().manifest.row_bytes
    cache = make_cache(6, bytes_per_s=inner * row_bytes / 0.1)
    cache.prefetch(1, [0, 1, 2])
    wait_for(lambda: cache.copier.counts.prefetch_bytes)
    visit(cache, 1, [1])
    visit(cache, 1, [0])  # part of it had come
    cache.close()
    counts, link = cache.counts, cache.copier.counts
    # The others waited for the link; 0 was dropped when only 1 was needed, and half of it stayed.
    assert (counts.num_prefetched, counts.num_prefetch_used, counts.num_partial) == (1, 1, 1)
    assert link.demand_bytes + link.prefetch_bytes == 2 * inner * row_bytes
    assert cache.table.lookup((1, 2))[0] is Residence.ABSENT


def test_a_prefetch_that_is_needed_is_waited_for():
    inner, row_bytes = shared_arena().manifest.inner, shared_arena().manifest.row_bytes
    cache = make_cache(6, bytes_per_s=inner * row_bytes / 0.1)
    cache.prefetch(1, [0])
    wait_for(lambda: cache.copier.counts.prefetch_bytes)
    visit(cache, 1, [0])
    cache.close()
    link = cache.copier.counts
    assert link.demand_bytes and link.demand_bytes + link.prefetch_bytes == inner * row_bytes


def test_nothing_is_evicted_for_a_prefetch_while_the_link_is_busy():
    inner, row_bytes = shared_arena().manifest.inner, shared_arena().manifest.row_bytes
    cache = make_cache(3, bytes_per_s=inner * row_bytes / 0.1)
    for expert in (0, 1):
        visit(cache, 0, [expert])
    going = cache.visit(2, [4], lambda: cache.prefetch(1, [0, 1]))
    assert next(going)[0] == 4  # it was being waited for all the time
    wait_for(lambda: cache.counts.num_prefetched)
    assert cache.counts.num_prefetched == 1, "one at a time"
    assert cache.table.lookup((0, 1))[0] is Residence.WHOLE, "only the older one gave way"
    cache.close()


def test_prefetch_takes_nothing_that_is_in_use():
    cache = make_cache(2)
    going = cache.visit(0, [0, 1])
    first, _ = next(going)
    cache.prefetch(1, [0, 1, 2, 3])
    assert [slot.key for slot in cache.table if slot.num_users] == [(0, 0), (0, 1)]
    second, _ = next(going)
    assert {first, second} == {0, 1}
    assert list(going) == []
    cache.close()


def test_corruption_ends_the_visit_that_needs_the_expert(tmp_path):
    path = tmp_path / "a"
    manifest = write_arena(experts_of(make_checkpoint("olmoe")), path, FP32)
    entry = next(e for e in manifest.entries if (e.layer, e.expert) == (1, 3))
    _flip(path, entry.offset + 9)
    arena = Arena(manifest)
    cache = ExpertCache(arena, 4, form_of(arena))
    cache.prefetch(1, [3])
    wait_for(lambda: is_quiet(cache))
    for _ in range(2):
        with pytest.raises(CorruptedExpert, match="layer 1, expert 3"):
            visit(cache, 1, [0, 3])
        visit(cache, 1, [0, 1, 2, 4])
        visit(cache, 0, [3])
    assert cache.copier.counts.num_corrupted == 3
    mended = write_arena(experts_of(make_checkpoint("olmoe")), path, FP32, epoch=2)
    cache.use_source(Arena(mended))
    visit(cache, 1, [0, 3])
    cache.close()


def test_other_experts_are_no_new_source(tmp_path):
    cache = make_cache(2)
    other = write_arena(experts_of(make_checkpoint("qwen3_moe")), tmp_path / "a", FP32)
    with pytest.raises(LoadError, match="other experts"):
        cache.use_source(Arena(other))


def test_budget():
    size = form_of(shared_arena()).num_bytes
    assert slots_within(3.5 * size / 2**30, size, 15) == 3
    assert slots_within(1.0, size, 15) == 15
    with pytest.raises(ConfigError, match=r"expert_cache_gb .* holds 1 of the 15 experts"):
        slots_within(1.9 * size / 2**30, size, 15)


# -- the model


@functools.cache
def plain(name: str, weights: str = "fp32"):
    return load_model(folder_of(name), weights=weights, progress=False)


class Garbage:
    """A predictor that is always wrong or worse, of experts and of neurons."""

    num_experts = NUM_EXPERTS

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)
        self.accuracy: dict = {}

    def wants_all(self, num_rows: int) -> bool:
        return bool(self.random.integers(0, 2))

    def observe(self, *_: object) -> None: ...

    def forget(self, *_: object) -> None: ...

    def next_of(self, _: int) -> int:
        return int(self.random.integers(-1, NUM_LAYERS + 1))

    def foresee(self, *_: object) -> list[int]:
        return self.random.integers(-2, NUM_EXPERTS + 2, self.random.integers(0, 9)).tolist()

    def foresee_neurons(self, *_: object) -> dict[int, np.ndarray]:
        some = self.random.random((NUM_EXPERTS, 40)) < self.random.random()
        return {
            e: np.flatnonzero(some[e]) for e in range(NUM_EXPERTS) if self.random.random() < 0.8
        }


@torch.inference_mode()
def logits_of(decoder, prompt: Sequence[int], num_new: int) -> torch.Tensor:
    """Of a prefill, and of greedy decoding after it."""
    paged, seq = Paged(decoder), Tokens(list(prompt))
    rows = [*paged.step((seq, len(prompt)))[0]]
    for _ in range(num_new):
        seq.ids.append(int(rows[-1].argmax()))
        rows += [*paged.step((seq, 1), num_decode=1)[0]]
    return torch.stack(rows)


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
    if "garbage" in prefetch:
        model.routed.predictor = Garbage(seed)
    if "neurons" in prefetch:
        model.routed.choice = types.SimpleNamespace(active=None)
    poison(model.routed.cache)
    try:
        prompt = random_prompt(9, seed)
        got = logits_of(model, prompt, 5)
        model.routed.cache.check()
    finally:
        model.routed.close()
    assert torch.equal(got, logits_of(plain(name), prompt, 5))


@pytest.mark.parametrize("name", MOE)
def test_ids_of_transformers(name):
    """Through the engine, several sequences at once, preempted and all."""
    folder, num_slots = make_checkpoint(name), 2
    experts = ExpertSettings(num_slots=num_slots)
    model = load_model(folder, weights="fp32", progress=False, experts=experts)
    engine = Engine(
        EngineConfig(num_blocks=14, block_size=4, max_num_seqs=3, max_num_batched_tokens=16), model
    )
    prompts = {str(n): random_prompt(n) for n in (3, 8, 21)}
    for request_id, prompt in prompts.items():
        params = SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True)
        engine.add(Request(request_id, tuple(prompt), params))
    got: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None
            got[delta.request_id] += delta.token_ids
    stats = engine.stats().experts
    engine.close()
    for request_id, prompt in prompts.items():
        assert got[request_id] == reference_greedy(folder, prompt, NUM_NEW)
    assert stats.num_misses and stats.demand_bytes and stats.num_slots == num_slots
    assert not [t for t in threading.enumerate() if t.name == "penstock-experts"]


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_built_in(weights):
    """A bf16 checkpoint: its own bytes in the arena, whatever the model computes in."""
    experts = ExpertSettings(num_slots=5)
    model = load_model("builtin-moe", weights=weights, progress=False, experts=experts)
    poison(model.routed.cache)
    assert model.routed.cache.manifest.dtype == "bf16"
    prompt = random_prompt(13)
    got = logits_of(model, prompt, 5)
    model.routed.close()
    assert torch.equal(got, logits_of(plain("builtin-moe", weights), prompt, 5))


def test_a_corrupted_expert_ends_those_that_need_it(tmp_path, caplog):
    """With an error that the log explains; who is not routed there goes on, and ids are right."""
    folder, path = make_checkpoint("olmoe"), tmp_path / "a"
    manifest = write_arena(experts_of(folder), path, FP32)
    prompts = {n: random_prompt(1, seed=n) for n in range(8)}
    routes = {n: _routes(folder, prompt) for n, prompt in prompts.items()}
    key = next(k for k in routes[0] if any(k not in routes[n] for n in prompts))
    entry = next(e for e in manifest.entries if (e.layer, e.expert) == key)
    _flip(path, entry.offset + 77)
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
    assert engine.stats().experts.num_corrupted


def _routes(folder: Path, prompt: Sequence[int]) -> set[tuple[int, int]]:
    """The experts that one token goes through."""
    experts = ExpertSettings(num_slots=15, prefetch=False)
    model = load_model(folder, weights="fp32", progress=False, experts=experts)
    logits_of(model, prompt, 0)
    model.routed.close()
    return {slot.key for slot in model.routed.cache.table if slot.key is not None}


def test_what_cannot_be_served(tmp_path):
    experts = ExpertSettings(cache_gb=1.0)
    with pytest.raises(ConfigError, match="mixture-of-experts models, and this one is dense"):
        load_model("builtin", progress=False, experts=experts)
    manifest = write_arena(experts_of(make_checkpoint("olmoe")), tmp_path / "a", FP32)
    other = dataclasses.replace(experts, manifest=manifest)
    with pytest.raises(LoadError, match="made of other files"):
        load_model(make_checkpoint("mixtral"), weights="fp32", progress=False, experts=other)
