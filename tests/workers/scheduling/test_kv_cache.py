"""The block ledger and the prefix cache, against simple models of them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from penstock.workers.errors import InvariantError
from penstock.workers.memory.block_pool import BlockPool
from penstock.workers.request import Request, SamplingParams
from penstock.workers.scheduling.kv_cache import KVCache
from penstock.workers.scheduling.sequence import Sequence


def make_seq(token_ids, order=0):
    request = Request(f"r{order}", tuple(token_ids), SamplingParams(max_tokens=64))
    return Sequence(request, order=order, seed=0, stop_ids=frozenset(), max_total_tokens=10**6)


def test_lowest_id_first():
    pool = BlockPool(8)
    assert [pool.allocate() for _ in range(5)] == [0, 1, 2, 3, 4]
    for block_id in (3, 1, 4):
        pool.release(block_id)
    assert [pool.allocate() for _ in range(4)] == [1, 3, 4, 5]
    pool.check()


def test_the_tail_is_taken_last_and_lent_as_a_suffix():
    pool = BlockPool(8, num_tail=3)
    blocks = [pool.allocate() for _ in range(6)]
    assert blocks == [0, 1, 2, 3, 4, 5]
    for block_id in (0, 3, 5):
        pool.index.insert(block_id, bytes([block_id]), b"", b"")
    for block_id in (3, 0, 5, 4):
        pool.release(block_id)
    assert pool.num_lendable(8) == 5  # 1 and 2 are live
    assert pool.num_lendable(2) == 2
    # Free below the tail, cached below it (oldest first), free in the tail, cached in the tail.
    assert [pool.allocate() for _ in range(6)] == [4, 3, 0, 6, 7, 5]
    assert len(pool.index) == 0
    for block_id in (6, 7):
        pool.release(block_id)
    assert pool.num_lendable(8) == 2
    with pytest.raises(InvariantError, match="live"):
        pool.lend(3)
    assert pool.lend(2) == 6
    assert (pool.num_lent, pool.num_available, pool.num_live) == (2, 0, 6)
    pool.check()
    with pytest.raises(InvariantError, match="lent twice"):
        pool.lend(1)
    pool.give_back()
    assert [pool.allocate(), pool.allocate()] == [6, 7]


def test_what_was_cached_in_a_loan_is_no_longer_found():
    cache = KVCache(BlockPool(6, num_tail=2), 4, prefix_cache=True, salt=b"s")
    seq = make_seq(range(24))
    assert cache.admit(seq)
    assert cache.grow(seq, 24)
    seq.num_computed_tokens = 24
    cache.commit(seq, 24)
    cache.free(seq)
    assert cache.pool.num_cached == 6
    assert cache.pool.lend(3) == 3
    assert [block_id in cache.pool.index for block_id in range(6)] == [True] * 3 + [False] * 3
    again = make_seq(range(24), 1)
    assert not cache.admit(again)  # three of six blocks are lent
    cache.pool.give_back()
    assert cache.admit(again)
    assert again.num_computed_tokens == 12
    assert list(again.block_table)[:3] == [0, 1, 2]
    cache.pool.check([again.block_table])


def test_prefix_hit_compares_tokens_and_leaves_one_to_compute():
    cache = KVCache(BlockPool(16), 4, prefix_cache=True, salt=b"s")
    first = make_seq(range(12))
    assert cache.admit(first)
    assert first.num_computed_tokens == 0
    assert cache.grow(first, 12)
    first.num_computed_tokens = 12
    cache.commit(first, 12)
    blocks = list(first.block_table)
    again, longer = make_seq(range(12), 1), make_seq([*range(12), 99], 2)
    other = make_seq([0, 1, 2, 3, 4, 5, 6, 99, 8], 3)
    for seq in (again, longer, other):
        assert cache.admit(seq)
    assert again.num_computed_tokens == 8
    assert list(again.block_table)[:2] == blocks[:2]  # the last token must be computed
    assert list(longer.block_table)[:3] == blocks
    assert list(other.block_table)[:1] == blocks[:1]
    assert (longer.num_computed_tokens, other.num_computed_tokens) == (12, 4)
    cache.pool.check([s.block_table for s in (first, again, longer, other)])


def test_forged_key_is_a_miss():
    cache = KVCache(BlockPool(4), 4, prefix_cache=True, salt=b"s")
    seq = make_seq(range(5))
    key = cache._key(cache._root, seq.token_ids[:4].tobytes())
    block_id = cache.pool.allocate()
    cache.pool.index.insert(block_id, key, cache._root, b"other tokens")
    assert cache.admit(seq)
    assert seq.num_computed_tokens == 0


def test_salt_separates():
    a = KVCache(BlockPool(4), 4, prefix_cache=True, salt=b"one")
    b = KVCache(BlockPool(4), 4, prefix_cache=True, salt=b"two")
    assert a._key(a._root, b"tokens") != b._key(b._root, b"tokens")


class CacheMachine(RuleBasedStateMachine):
    """Random admissions, growth, commits and frees against a dict that plays the KV memory.

    `content[block]` is what a real pool would hold: the exact token prefix whose K and V were last
    written there. A prefix hit must find precisely the prefix that the sequence asks for. A loan of
    the last blocks fills them with garbage, and may last while others come and go.
    """

    num_blocks, block_size = 7, 4

    def __init__(self):
        super().__init__()
        self.start(0)

    @initialize(num_tail=st.sampled_from([0, 1, 3]))
    def start(self, num_tail):
        self.cache = KVCache(
            BlockPool(self.num_blocks, num_tail),
            self.block_size,
            prefix_cache=True,
            salt=b"",
        )
        self.seqs = []
        self.content = {}
        self.order = 0

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def admit(self, prompt):
        seq = make_seq(prompt, self.order)
        self.order += 1
        before = self.cache.pool.num_available
        if not self.cache.admit(seq):
            assert self.cache.pool.num_available == before
            assert not seq.block_table
            return
        assert seq.num_computed_tokens < len(prompt)
        for i, block_id in enumerate(seq.block_table[: seq.num_computed_tokens // self.block_size]):
            assert self.content[block_id] == tuple(prompt[: (i + 1) * self.block_size])
        assert self.cache.grow(seq, len(prompt)), "admitted, but its prompt does not fit"
        self.seqs.append(seq)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), num=st.integers(1, 6))
    def compute(self, data, num):
        seq = data.draw(st.sampled_from(self.seqs))
        end = min(seq.num_tokens, seq.num_computed_tokens + num)
        tokens = tuple(seq.token_ids)
        for position in range(seq.num_computed_tokens, end):
            block_id = seq.block_table[position // self.block_size]
            self.content[block_id] = tokens[: position + 1]
        seq.num_computed_tokens = end
        self.cache.commit(seq, end)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), token=st.integers(0, 1))
    def decode(self, data, token):
        seq = data.draw(st.sampled_from(self.seqs))
        if self.cache.grow(seq, seq.num_tokens + 1):
            seq.token_ids.append(token)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), bad=st.booleans())
    def leave(self, data, bad):
        seq = data.draw(st.sampled_from(self.seqs))
        self.seqs.remove(seq)
        blocks = list(seq.block_table)
        if bad:
            self.cache.forget(seq)
        self.cache.free(seq)
        if bad:
            assert not any(block_id in self.cache.pool.index for block_id in blocks)

    @precondition(lambda self: not self.cache.pool.num_lent)
    @rule(limit=st.integers(1, 7))
    def lend(self, limit):
        pool = self.cache.pool
        live = {block_id for seq in self.seqs for block_id in seq.block_table}
        highest = max(live, default=-1)
        num = pool.num_lendable(limit)
        assert num == min(limit, self.num_blocks - 1 - highest)
        available = pool.num_available
        first = pool.lend(num)
        assert pool.num_available == available - num
        for block_id in range(first, self.num_blocks):
            self.content[block_id] = "garbage"
            assert block_id not in pool.index

    @precondition(lambda self: self.cache.pool.num_lent)
    @rule()
    def give_back(self):
        pool = self.cache.pool
        available, num_lent = pool.num_available, pool.num_lent
        pool.give_back()
        assert pool.num_available == available + num_lent

    @invariant()
    def ledger(self):
        pool = self.cache.pool
        lent = set(range(self.num_blocks - pool.num_lent, self.num_blocks))
        assert not lent & {block_id for seq in self.seqs for block_id in seq.block_table}
        assert pool.num_live == len({block for seq in self.seqs for block in seq.block_table})
        self.cache.pool.check([seq.block_table for seq in self.seqs])
        for seq in self.seqs:
            for i in range(seq.num_computed_tokens // self.block_size):
                held = self.content[seq.block_table[i]]
                assert held == tuple(seq.token_ids[: (i + 1) * self.block_size]), "overwritten"


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
