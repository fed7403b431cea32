"""The expert cache: whatever was prefetched, evicted or cancelled, it yields the checkpoint's bits.

One copier thread runs in each test, as in a worker. Slots are full of NaN at first.
"""

from __future__ import annotations

import functools
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.matmul import pack_linear
from penstock.kernels.moe.rows import write_neurons
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.experts.build import slots_within
from penstock.workers.experts.cache import ExpertCache
from penstock.workers.experts.expert_file import CorruptedExpert, ExpertFile
from penstock.workers.experts.layouts import NeuronLayout
from penstock.workers.experts.writer import write_expert_file
from tests.workers.checkpoints import make_checkpoint
from tests.workers.experts.held_link import hold_link
from tests.workers.experts.moe_cases import NUM_EXPERTS, NUM_LAYERS, experts_of, flip, poison

FP32, BF16, CPU = torch.float32, torch.bfloat16, torch.device("cpu")
CHUNK = 7 * 3 * 64 * 4  # seven neurons


@functools.cache
def shared_expert_file() -> ExpertFile:
    with tempfile.TemporaryDirectory() as folder:
        return ExpertFile(
            write_expert_file(experts_of(make_checkpoint("olmoe")), Path(folder, "a"), FP32)
        )


@functools.cache
def packed(layer: int, expert: int) -> tuple:
    """As the loader would pack it."""
    rows = torch.from_numpy(shared_expert_file().rows(layer, expert).copy()).view(FP32)
    gate, up, down = rows.split(64, 1)
    return pack_linear(torch.cat([gate, up])), pack_linear(down.T.contiguous())


def layout_of(expert_file: ExpertFile) -> NeuronLayout:
    return NeuronLayout(expert_file.manifest, FP32, CPU)


def make_cache(num_slots: int, **options) -> ExpertCache:
    cache = ExpertCache(
        shared_expert_file(),
        num_slots,
        layout_of(shared_expert_file()),
        chunk_bytes=CHUNK,
        **options,
    )
    poison(cache)
    return cache


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
    deadline_s = time.monotonic() + 60
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
                cache.use_source(shared_expert_file())
            else:
                wait_for(lambda: is_quiet(cache))
            cache.check()
    finally:
        cache.close()
    cache.check()
    assert all(slot.load is None for slot in cache.table)


def test_what_a_slot_holds_of_its_expert():
    cache = make_cache(2)
    table, some = cache.table, np.array([3, 4, 50])
    assert table.get((0, 1)) is None
    slot = table.take((0, 1))
    assert slot is not None and table.get((0, 1)) is slot
    slot.arrived(np.array([3, 4]))
    assert not slot.holds(some) and slot.missing(some).tolist() == [50]
    slot.arrived(np.array([50]))
    assert slot.holds(some) and not slot.holds()
    slot.arrived(slot.missing())
    assert slot.holds()
    assert table.take((0, 2)) is not slot
    assert table.take((0, 3)) is slot and not slot.num_has  # the older one gives way


def test_only_missing_rows_are_loaded():
    cache = make_cache(3)
    slot = cache.table.take((1, 2))
    assert slot is not None
    some = np.array([0, 5, 6, 30])
    rows = torch.from_numpy(shared_expert_file().rows(1, 2)[some].copy()).view(FP32)
    write_neurons(slot.widest, rows, torch.from_numpy(some))
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
    others = {slot.key for slot in cache.table if slot.key is None or slot.key[0]}
    assert others == {(1, 0), (1, 1), (2, 0), (2, 1)}
    cache.close()


def test_what_is_there_comes_first():
    cache = make_cache(6)
    visit(cache, 0, [3])
    assert visit(cache, 0, [1, 2, 3])[0] == 3
    cache.close()


def test_demand_overtakes_prefetch(monkeypatch):
    """On a slow link: of a prefetch under way no more than a chunk goes before what is needed."""
    inner, row_bytes = shared_expert_file().manifest.inner, shared_expert_file().manifest.row_bytes
    hold_link(monkeypatch, lambda number: number != 1 or cache.copier._demands)
    cache = make_cache(6, bytes_per_s=inner * row_bytes / 0.6)  # an expert in 0.6 s
    cache.prefetch(1, [0, 1, 2])
    wait_for(lambda: cache.copier.counts.prefetch_bytes)
    visit(cache, 0, [0])
    counts = cache.copier.counts
    assert counts.demand_bytes == inner * row_bytes
    assert counts.prefetch_bytes < inner * row_bytes / 2
    cache.close()


def test_a_stale_prefetch_is_dropped_and_what_came_of_it_used(monkeypatch):
    inner, row_bytes = shared_expert_file().manifest.inner, shared_expert_file().manifest.row_bytes
    hold_link(monkeypatch, lambda number: number != 1 or cache.copier._demands)
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
    assert cache.table.get((1, 2)) is None


def test_a_prefetch_that_is_needed_is_waited_for(monkeypatch):
    inner, row_bytes = shared_expert_file().manifest.inner, shared_expert_file().manifest.row_bytes
    hold_link(monkeypatch, lambda number: number != 1 or cache.copier._demands)
    cache = make_cache(6, bytes_per_s=inner * row_bytes / 0.1)
    cache.prefetch(1, [0])
    wait_for(lambda: cache.copier.counts.prefetch_bytes)
    visit(cache, 1, [0])
    cache.close()
    link = cache.copier.counts
    assert link.demand_bytes and link.demand_bytes + link.prefetch_bytes == inner * row_bytes


def test_nothing_is_evicted_for_a_prefetch_while_the_link_is_busy(monkeypatch):
    inner, row_bytes = shared_expert_file().manifest.inner, shared_expert_file().manifest.row_bytes
    num_chunks, is_seen = 3 * inner * row_bytes // CHUNK, threading.Event()
    hold_link(monkeypatch, lambda number: number < num_chunks or is_seen.is_set())
    cache = make_cache(3, bytes_per_s=inner * row_bytes / 0.1)
    for expert in (0, 1):
        visit(cache, 0, [expert])
    going = cache.visit(2, [4], lambda: cache.prefetch(1, [0, 1]))
    assert next(going)[0] == 4  # it was being waited for all the time
    wait_for(lambda: cache.counts.num_prefetched)
    assert cache.counts.num_prefetched == 1, "one at a time"
    slot = cache.table.get((0, 1))
    assert slot is not None and slot.holds(), "only the older one gave way"
    is_seen.set()
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
    manifest = write_expert_file(experts_of(make_checkpoint("olmoe")), path, FP32)
    entry = next(e for e in manifest.entries if (e.layer, e.expert) == (1, 3))
    flip(path, entry.offset + 9)
    expert_file = ExpertFile(manifest)
    cache = ExpertCache(expert_file, 4, layout_of(expert_file))
    cache.prefetch(1, [3])
    wait_for(lambda: is_quiet(cache))
    for _ in range(2):
        with pytest.raises(CorruptedExpert, match="layer 1, expert 3"):
            visit(cache, 1, [0, 3])
        visit(cache, 1, [0, 1, 2, 4])
        visit(cache, 0, [3])
    assert cache.copier.counts.num_corrupted == 3
    mended = write_expert_file(experts_of(make_checkpoint("olmoe")), path, FP32, epoch=2)
    cache.use_source(ExpertFile(mended))
    visit(cache, 1, [0, 3])
    cache.close()


def test_other_experts_are_no_new_source(tmp_path):
    cache = make_cache(2)
    other = write_expert_file(experts_of(make_checkpoint("qwen3_moe")), tmp_path / "a", FP32)
    with pytest.raises(LoadError, match="other experts"):
        cache.use_source(ExpertFile(other))


def test_budget():
    size = layout_of(shared_expert_file()).num_bytes
    assert slots_within(3.5 * size / 2**30, size, 15) == 3
    assert slots_within(1.0, size, 15) == 15
    with pytest.raises(ConfigError, match=r"expert_cache_gb .* holds 1 of the 15 experts"):
        slots_within(1.9 * size / 2**30, size, 15)
