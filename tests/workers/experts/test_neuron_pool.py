"""The pool of neurons: whatever was prefetched, evicted or broken off, it yields the file's rows.

One copier thread runs in each test, as in a worker. The pool is full of NaN at first.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workers.experts.build import split_for_neurons
from penstock.workers.experts.cache import ExpertCache
from penstock.workers.experts.expert_file import CorruptedExpert, ExpertFile, copy_bytes
from penstock.workers.experts.neurons.places import MAX_USES
from penstock.workers.experts.neurons.pool import NeuronPool
from penstock.workers.experts.writer import write_expert_file
from tests.workers.checkpoints import make_checkpoint
from tests.workers.experts.held_link import hold_link
from tests.workers.experts.moe_cases import NUM_EXPERTS, NUM_LAYERS, experts_of, flip, poison
from tests.workers.experts.test_cache import (
    CHUNK,
    FP32,
    is_quiet,
    layout_of,
    shared_expert_file,
    wait_for,
)

INNER = 112
ALL = NUM_LAYERS * NUM_EXPERTS * INNER


def make_cache(num_places: int, **options) -> tuple[ExpertCache, NeuronPool]:
    source = shared_expert_file()
    cache = ExpertCache(
        source, 2, layout_of(source), num_pooled=num_places, chunk_bytes=CHUNK, **options
    )
    poison(cache)
    assert cache.pool is not None
    return cache, cache.pool


def visit(
    pool: NeuronPool, layer: int, needed: dict[int, np.ndarray], num_parts: int = 1
) -> list[int]:
    """The order in which they came, the neurons of each in `num_parts`; each neuron has the file's
    bytes while it is in use, and the parts of an expert come in their order."""
    order: list[int] = []
    parts = {
        e: np.array_split(np.random.default_rng(e).permutation(rows), num_parts)
        for e, rows in needed.items()
    }
    for expert, part, places in pool.visit(layer, parts):
        assert part == order.count(expert)
        order.append(expert)
        for rows in parts[expert][: part + 1]:  # those before, too
            assert (places[rows] >= 0).all()
            want = shared_expert_file().rows(layer, expert)[rows]
            assert np.array_equal(pool.rows[torch.from_numpy(places[rows].copy())].numpy(), want)
    assert sorted(order) == sorted([*needed] * num_parts)
    pool.check()
    return order


NEEDED = st.dictionaries(
    st.integers(0, NUM_EXPERTS - 1),
    st.tuples(st.integers(0, 99), st.sampled_from([0.0, 0.1, 0.5, 1.0])),
    min_size=1,
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["visit", "in parts", "prefetch", "break off", "wait", "whole"]),
        st.integers(0, NUM_LAYERS - 1),
        NEEDED,
    ),
    max_size=25,
)


def rows_of(needed: dict[int, tuple[int, float]]) -> dict[int, np.ndarray]:
    return {
        expert: np.flatnonzero(np.random.default_rng(seed).random(INNER) < share)
        for expert, (seed, share) in needed.items()
    }


@settings(max_examples=80, deadline=None)
@given(num_places=st.integers(INNER, ALL + 9), steps=STEPS)
def test_any_order_of_events(num_places, steps):
    cache, pool = make_cache(num_places)
    try:
        for what, layer, needed in steps:
            if what == "visit":
                visit(pool, layer, rows_of(needed))
            elif what == "in parts":
                visit(pool, layer, rows_of(needed), 3)
            elif what == "prefetch":
                pool.prefetch(layer, [*rows_of(needed).items()] * 2)
            elif what == "break off":  # as when a step fails half-way
                parts = {e: np.array_split(rows, 2) for e, rows in rows_of(needed).items()}
                next(pool.visit(layer, parts))
            elif what == "whole":  # slots share the copier
                assert sorted(e for e, _ in cache.visit(layer, sorted(needed))) == sorted(needed)
            else:
                wait_for(lambda: is_quiet(cache))
            cache.check()
    finally:
        cache.close()
    cache.check()
    assert all(each.load is None for each in pool.experts.values())


def test_it_holds_neurons_of_more_experts_than_slots_would():
    """The memory of two experts holds a tenth of each of all fifteen."""
    cache, pool = make_cache(2 * INNER)
    some = np.arange(0, INNER, 10)
    for layer in range(NUM_LAYERS):
        visit(pool, layer, dict.fromkeys(range(NUM_EXPERTS), some))
    moved = cache.copier.counts.demand_bytes
    assert moved == NUM_LAYERS * NUM_EXPERTS * len(some) * pool.facts.row_bytes
    for layer in range(NUM_LAYERS):
        visit(pool, layer, dict.fromkeys(range(NUM_EXPERTS), some))
    assert cache.copier.counts.demand_bytes == moved, "all were there"
    cache.close()


def test_neurons_in_use_outlast_those_that_were_used_once():
    cache, pool = make_cache(INNER)
    often = np.arange(20)
    for _ in range(MAX_USES):
        visit(pool, 0, {0: often})
    for expert in range(1, 5):  # more than there is room for besides
        visit(pool, 1, {expert: np.arange(30)})
    before = cache.copier.counts.demand_bytes
    visit(pool, 0, {0: often})
    assert cache.copier.counts.demand_bytes == before
    cache.close()


def test_a_prefetched_neuron_is_not_asked_for_again():
    cache, pool = make_cache(4 * INNER)
    foreseen, needed = np.arange(0, 60), np.arange(40, 80)
    pool.prefetch(1, [(3, foreseen), (99, foreseen), (2, np.empty(0, np.int64))])
    wait_for(lambda: is_quiet(cache))
    link, size = cache.copier.counts, pool.facts.row_bytes
    assert (link.prefetch_bytes, link.demand_bytes) == (60 * size, 0)
    visit(pool, 1, {3: needed})
    assert (link.prefetch_bytes, link.demand_bytes) == (60 * size, 20 * size)
    counts = cache.counts
    assert (counts.num_prefetched, counts.num_prefetch_used, counts.num_partial) == (1, 1, 1)
    assert (counts.num_rows_wanted, counts.num_rows_there) == (40, 20)
    cache.close()


def test_a_prefetch_under_way_is_continued_with_what_is_needed(monkeypatch):
    size = shared_expert_file().manifest.row_bytes
    hold_link(monkeypatch, lambda number: number != 1 or cache.copier._demands)
    cache, pool = make_cache(INNER, bytes_per_s=INNER * size / 0.2)
    pool.prefetch(1, [(0, np.arange(INNER))])
    wait_for(lambda: cache.copier.counts.prefetch_bytes)
    visit(pool, 1, {0: np.arange(100, INNER)})
    moved = cache.copier.counts.prefetch_bytes + cache.copier.counts.demand_bytes
    assert 12 * size < moved <= (12 + 4 * 7) * size, "a few chunks of seven, and the twelve"
    visit(pool, 2, {1: np.arange(INNER)})  # the places of what never came are free
    cache.close()


def test_a_part_is_used_while_the_next_one_comes(monkeypatch):
    """Of two experts of which nothing is there: no part waits for rows of a later one."""
    size = shared_expert_file().manifest.row_bytes
    came: list[tuple[int, int, int]] = []
    # The last of eight chunks of a part comes once the part before the last one has been used.
    hold_link(monkeypatch, lambda number: len(came) >= (number + 1) // 8 - 1)
    cache, pool = make_cache(2 * INNER, bytes_per_s=2 * INNER * size / 0.4)
    rows = np.arange(INNER)
    parts = {0: np.array_split(rows[::-1], 2), 1: np.array_split(rows, 2)}
    for expert, part, _ in pool.visit(1, parts):
        came.append((expert, part, int(sum(pool.experts[1, e].has.sum() for e in (0, 1)))))
    assert [each[:2] for each in came] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    there = [each[2] for each in came]
    assert all(56 * n <= have < 56 * (n + 1) for n, have in zip((1, 2, 3), there, strict=False))
    assert there[3] == 2 * INNER
    cache.close()


def test_a_visit_takes_back_what_prefetches_hold():
    size = shared_expert_file().manifest.row_bytes
    cache, pool = make_cache(INNER, bytes_per_s=INNER * size / 0.5)
    pool.prefetch(1, [(0, np.arange(INNER))])
    visit(pool, 2, {0: np.arange(INNER)})
    cache.close()


def test_a_damaged_neuron_ends_the_visit_that_needs_it(tmp_path):
    path = tmp_path / "a"
    manifest = write_expert_file(experts_of(make_checkpoint("olmoe")), path, FP32)
    entry = next(e for e in manifest.entries if (e.layer, e.expert) == (1, 3))
    flip(path, entry.offset + 9)  # of its first neuron
    source = ExpertFile(manifest)
    cache = ExpertCache(source, 2, layout_of(source), num_pooled=2 * INNER)
    pool = cache.pool
    assert pool is not None
    for _ in range(2):
        with pytest.raises(CorruptedExpert, match="layer 1, expert 3"):
            visit(pool, 1, {0: np.arange(50), 3: np.arange(INNER)})
        visit(pool, 1, {0: np.arange(INNER)})
        pool.check()
    mended = write_expert_file(experts_of(make_checkpoint("olmoe")), path, FP32, epoch=2)
    cache.use_source(ExpertFile(mended))
    visit(pool, 1, {0: np.arange(50), 3: np.arange(INNER)})
    cache.close()


def test_the_cache_is_parted_between_prompts_and_answers():
    facts = shared_expert_file().manifest
    slot = INNER * facts.row_bytes + 256
    assert split_for_neurons(1, slot, facts) == (1, INNER)
    assert split_for_neurons(3, slot, facts) == (2, INNER)
    assert split_for_neurons(10, slot, facts) == (2, 8 * slot // facts.row_bytes)
    assert split_for_neurons(80, slot, facts) == (10, 70 * slot // facts.row_bytes)
    plain = dataclasses.replace(facts, copies="int4")  # for moe_mode quantized: not in the pool
    assert split_for_neurons(10, slot, plain) == (2, 8 * slot // facts.row_bytes)
    coded = dataclasses.replace(plain, packed_bytes=1024)
    assert split_for_neurons(10, slot, coded) == (2, 8 * slot // copy_bytes(64, "int4"))
