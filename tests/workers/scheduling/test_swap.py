"""Blocks that leave the pool and come back through host memory: the ids stay what they are."""

from __future__ import annotations

from array import array

import pytest

from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.errors import ConfigError
from penstock.workers.memory.copier import CopyThread
from penstock.workers.memory.restore import RestoreRule
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from tests.workers import streaming_reference as slow
from tests.workers.checkpoints import (
    make_checkpoint,
    random_prompt,
    reference_greedy,
    reference_model,
)

BLOCK_SIZE = 8
NUM_NEW = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
ROLLING = SamplingParams(
    temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True,
    context_policy="sink_window", sinks=4, window=24, roll=8,
)  # fmt: skip
PROMPTS = [tuple(random_prompt(20 + 9 * i, seed=40 + i)) for i in range(8)]


@pytest.fixture(scope="module")
def model():
    return load_model(str(make_checkpoint()), weights="fp32", progress=False)


@pytest.fixture(scope="module")
def truth():
    folder = make_checkpoint()
    shape = slow.SinkWindow(4, 24, 8, BLOCK_SIZE)
    rolled = [slow.greedy(reference_model(folder), p, NUM_NEW, shape) for p in PROMPTS]
    return [reference_greedy(folder, p, NUM_NEW) for p in PROMPTS], rolled


@pytest.fixture
def make_engine(model):
    engines = []

    def make(**settings):
        given = {"num_blocks": 26, "block_size": BLOCK_SIZE, "host_kv_gb": 0.01, **settings}
        given["async_scheduling"] = "off"  # `run` preempts by hand, under no step in flight
        engine = Engine(EngineConfig(**given), model)
        engine.arena.storage.fill_(0xFF)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def run(engine, requests, preempt_every=None):
    """Ids and last delta of each; blocks that are free are NaN before every step.

    Sequences with a window hardly ever starve, so they are preempted by hand.
    """
    num_steps = 0
    for request in requests:
        engine.add(request)
    ids: dict[str, list[int]] = {r.request_id: [] for r in requests}
    last = {}
    while engine.has_work():
        for block_id in engine.pool._free:
            engine.arena.block(block_id).fill_(0xFF)
        num_steps += 1
        if preempt_every and num_steps % preempt_every == 0 and engine.scheduler.running:
            engine.scheduler._preempt(engine.scheduler.running[-1])
        for delta in engine.step():
            ids[delta.request_id] += delta.token_ids
            last[delta.request_id] = delta
        engine.check()
        engine.cache.swap.tier.check()
    assert engine.pool.num_live == 0
    return ids, last


def make_even(engine, mode):
    """As if loading a block took as long as computing it: then a split is half and half."""
    size, block_bytes = engine.config.block_size, engine.arena.layout.block_bytes
    rule = RestoreRule(1000 * block_bytes, 1000 * size, block_bytes, size, mode=mode)
    engine.cache.swap._rule = lambda: rule


def requests(params, prefix=""):
    return [Request(f"{prefix}{i}", prompt, params) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("mode", ["auto", "load", "recompute", "split"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_and_restored(make_engine, truth, mode, prefix_cache):
    engine = make_engine(kv_restore=mode, prefix_cache=prefix_cache)
    if mode == "split":
        make_even(engine, mode)
    ids, _ = run(engine, requests(GREEDY))
    assert list(ids.values()) == truth[0]
    swap = engine.cache.swap
    assert engine.stats().num_preemptions > 0, "the pool was not starved"
    if mode == "load":
        assert swap.num_loaded_tokens > 0
    if mode == "recompute":
        assert swap.num_loaded_tokens == 0 < swap.num_restores["recompute"]
    if mode == "split" and prefix_cache:
        assert swap.num_restores["split"] > 0 and swap.num_loaded_tokens > 0


@pytest.mark.parametrize("chunk", [16, 2048])
def test_a_rolled_sequence_is_swapped_not_replayed(make_engine, truth, chunk):
    engine = make_engine(
        num_blocks=30, kv_restore="load", max_num_batched_tokens=chunk, max_num_seqs=6
    )
    ids, last = run(engine, requests(ROLLING), preempt_every=5)
    assert list(ids.values()) == truth[1]
    assert engine.cache.swap.num_swapped_out > 0
    assert engine.cache.swap.num_loaded_tokens > 0
    assert any(delta.num_evicted_tokens for delta in last.values())


def test_without_room_in_host_memory_it_is_replayed(make_engine, truth):
    """Two slots hold no sequence's blocks: all tokens are computed again, with the same result."""
    engine = make_engine(num_blocks=30, kv_restore="load", host_kv_gb=2 * 6144 / 2**30)
    assert engine.cache.swap.tier.num_slots <= 2
    ids, _ = run(engine, requests(ROLLING), preempt_every=30)
    assert list(ids.values()) == truth[1]
    assert engine.stats().num_preemptions > 0
    assert engine.cache.swap.num_swapped_out == 0


@pytest.mark.parametrize("mode", ["load", "split"])
def test_prefixes_that_were_evicted_come_back(make_engine, truth, mode):
    engine = make_engine(kv_restore=mode)
    make_even(engine, mode)
    first = requests(GREEDY)[7:]
    run(engine, first)
    others = [tuple(random_prompt(70, seed=900 + i)) for i in range(6)]
    run(engine, [Request(f"other{i}", p, GREEDY) for i, p in enumerate(others)])
    assert not engine.pool.index.find(*chain_of(engine, PROMPTS[7])[0]), "it is still in the pool"
    before = engine.cache.swap.num_loaded_tokens
    ids, last = run(engine, first)
    assert ids["7"] == truth[0][7]
    assert engine.cache.swap.num_loaded_tokens > before
    assert last["7"].num_cached_tokens > 0


def chain_of(engine, prompt):
    cache, found, parent = engine.cache, [], engine.cache._root
    for start in range(0, len(prompt) - BLOCK_SIZE, BLOCK_SIZE):
        token_ids = array("i", prompt[start : start + BLOCK_SIZE]).tobytes()
        key = cache._key(parent, token_ids)
        found.append((key, parent, token_ids))
        parent = key
    return found


def test_who_leaves_while_blocks_are_loaded_leaves_nothing_behind(make_engine, truth):
    """Over a slow link: the copier writes to no block that belongs to another one by then."""
    engine = make_engine(kv_restore="load")
    run(engine, requests(GREEDY)[7:])
    others = [tuple(random_prompt(70, seed=900 + i)) for i in range(6)]
    run(engine, [Request(f"other{i}", p, GREEDY) for i, p in enumerate(others)])
    swap = engine.cache.swap
    swap.link.close()
    swap.link = CopyThread(bytes_per_s=engine.arena.layout.block_bytes * 20)
    engine.add(requests(GREEDY)[7])
    assert engine.step() == []  # it waits
    assert swap.limit(next(iter(engine.scheduler.running))) is not None
    assert engine.abort("7")
    engine.check()
    assert engine.pool.num_live == 0
    swap.tier.check()
    ids, _ = run(engine, requests(GREEDY)[:3])
    assert list(ids.values()) == truth[0][:3]


def test_too_little_host_memory_is_refused(model):
    with pytest.raises(ConfigError, match="host_kv_gb"):
        Engine(EngineConfig(num_blocks=8, host_kv_gb=1e-9), model)
