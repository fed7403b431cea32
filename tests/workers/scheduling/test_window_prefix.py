"""Which blocks a sequence with a sink window finds again: against a search that tries every end."""

from __future__ import annotations

import random

import pytest

from penstock.workers.context_policy import FULL, Context, SinkWindow
from penstock.workers.memory.block_pool import BlockPool
from penstock.workers.request import Request, SamplingParams
from penstock.workers.scheduling.kv_cache import KVCache
from penstock.workers.scheduling.sequence import Sequence

SIZE = 2


def sequence(tokens: list[int], context: Context) -> Sequence:
    return Sequence(
        Request("r", tuple(tokens), SamplingParams()),
        order=0, seed=0, stop_ids=frozenset(), max_total_tokens=10**6, context=context,
    )  # fmt: skip


class Cache:
    """A KV cache that computes prompts, and what each of its blocks holds then."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = KVCache(self.pool, SIZE, prefix_cache=True, salt=b"")
        self.held: dict[int, tuple[tuple[int, ...], bytes]] = {}

    def content(
        self, tokens: list[int], context: Context, block: int
    ) -> tuple[tuple[int, ...], bytes]:
        """What K and V of a block depend on."""
        end, most = (block + 1) * SIZE, context.full_tokens
        return tuple(tokens[:end]), b"" if most is None or end <= most else context.name

    def run(self, tokens: list[int], context: Context, chunk: int) -> tuple[int, set[int]]:
        """Compute `tokens`; how many of them were there already, and in which blocks."""
        seq = sequence(tokens, context)
        assert self.cache.admit(seq)
        num_found = seq.num_computed_tokens
        found = {*seq.block_table[: num_found // SIZE - seq.num_rolled_blocks]}
        for place in range(num_found // SIZE - seq.num_rolled_blocks):
            block = place + (place >= context.num_sink_blocks) * seq.num_rolled_blocks
            assert self.held[seq.block_table[place]] == self.content(tokens, context, block)
        while seq.num_pending_tokens:
            end = min(seq.num_computed_tokens + chunk, len(tokens))
            assert self.cache.grow(seq, end)
            for block in range(seq.num_computed_tokens // SIZE, end // SIZE):
                rolled = (block >= context.num_sink_blocks) * seq.num_rolled_blocks
                held = self.content(tokens, context, block)
                self.held[seq.block_table[block - rolled]] = held
            seq.num_computed_tokens = end
            self.cache.commit(seq, end)
            self.pool.check([seq.block_table])
        self.cache.free(seq)
        self.pool.check([])
        return num_found, found

    def most(self, tokens: list[int], context: Context) -> int:
        """The longest end after which all that is seen is in an addressable block."""
        there = {self.held[b] for b in self.pool._cached if b in self.held}
        for end in range((len(tokens) - 1) // SIZE, 0, -1):
            sinks = range(min(end, context.num_sink_blocks))
            seen = range(context.window_start(end * SIZE) // SIZE, end)
            if all(self.content(tokens, context, b) in there for b in (*sinks, *seen)):
                return end * SIZE
        return 0


@pytest.mark.parametrize("seed", range(30))
def test_it_finds_the_longest_end(seed: int):
    """Texts that go on or branch off, windows of all shapes beside full context, in a pool that is
    too small for all of them."""
    rng = random.Random(seed)
    num_blocks = (14, 24, 60)[seed % 3]
    cache = Cache(num_blocks)
    shapes: list[Context] = [
        SinkWindow(rng.randint(1, 5), rng.randint(3, 9), rng.randint(1, 3), SIZE) for _ in range(2)
    ]
    texts: list[list[int]] = [[]]
    num_beyond = 0
    for _ in range(90):
        base = rng.choice(texts)
        tokens = base[: rng.randint(0, len(base))] if rng.random() < 0.4 else list(base)
        tokens = tokens[:40] + [rng.randint(0, 1) for _ in range(rng.randint(1, 12))]
        context = rng.choice([*shapes, *shapes, FULL])
        if context is FULL and len(tokens) > 2 * SIZE * 5:
            continue
        expected = cache.most(tokens, context)
        num_found, _ = cache.run(tokens, context, rng.choice((1, 2, 5)))
        assert num_found == expected
        most = context.full_tokens
        num_beyond += most is not None and num_found > most
        texts.append(tokens)
    assert num_beyond > 3 or num_blocks < 60


def test_blocks_that_were_rolled_over_are_the_first_to_go():
    """An endless answer takes no block from other texts that wait to be asked for again."""
    cache = Cache(40)
    kept, context = list(range(100, 120)), SinkWindow(2, 8, 2, SIZE)
    cache.run(kept, FULL, 5)
    cache.run([7 + i % 3 for i in range(400)], context, 5)  # 200 blocks, one after another
    num_found, _ = cache.run(kept, FULL, 5)
    assert num_found == 18


def test_rolled_blocks_are_not_copied_to_host_memory():
    cache, evicted = Cache(20), []
    cache.pool.on_evict = lambda block_id, *_: evicted.append(block_id)
    context = SinkWindow(2, 8, 2, SIZE)
    cache.run([i % 5 for i in range(300)], context, 5)
    assert evicted == []
    cache.pool.lend(cache.pool.num_lendable(20))  # what is lent is not addressable any more
    cache.pool.give_back()
    ends = [len(cache.held[block_id][0]) for block_id in evicted]
    assert 300 in ends and 2 in ends  # of the window at the end, and the sinks'
    assert all(end <= context.full_tokens or end > context.window_start(299) for end in ends)


def test_what_ordinary_requests_share_is_not_cold():
    """A prompt that all begin with, and an endless answer that has rolled over it."""
    cache, context = Cache(40), SinkWindow(2, 20, 2, SIZE)
    begin = list(range(100, 122))
    cache.run([*begin, *(7 + i % 3 for i in range(400))], context, 5)
    num_found, _ = cache.run([*begin, 1, 2, 3], FULL, 5)
    assert num_found == len(begin)


def test_a_request_that_waits_for_blocks_is_hashed_once(monkeypatch: pytest.MonkeyPatch):
    """It asks at every step: 64,000 tokens would take the step's time again."""
    cache = Cache(30)
    tokens, context = [i % 7 for i in range(120)], SinkWindow(2, 16, 4, SIZE)
    cache.run(tokens, context, 5)
    other = sequence([200 + i for i in range(2 * 28)], FULL)
    assert cache.cache.admit(other)  # 28 of 30 blocks
    calls: list[bytes] = []
    key = cache.cache._key

    def counted(parent: bytes, token_ids: bytes) -> bytes:
        calls.append(token_ids)
        return key(parent, token_ids)

    monkeypatch.setattr(cache.cache, "_key", counted)
    seq = sequence([*tokens, 1, 2, 3], context)
    assert not cache.cache.admit(seq)
    first = len(calls)
    assert not cache.cache.admit(seq) and len(calls) == first
    cache.cache.free(other)
    cache.run(tokens, context, 5)
    assert cache.cache.admit(seq) and seq.num_computed_tokens == 120 and not seq.content_keys
