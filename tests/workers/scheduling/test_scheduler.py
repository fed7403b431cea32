"""The scheduler under random load in starved pools: budgets, block ledger, progress, order."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workers.memory.block_pool import BlockPool
from penstock.workers.request import Request, SamplingParams
from penstock.workers.scheduling.kv_cache import KVCache
from penstock.workers.scheduling.scheduler import Scheduler
from penstock.workers.scheduling.sequence import Sequence, SequenceState

BLOCK = 4


def make_scheduler(
    num_blocks,
    *,
    max_seqs=8,
    budget=16,
    prefix_cache=True,
    num_tail=0,
    tokens_that_fit=None,
    num_kept=0,
    merges=True,
):
    cache = KVCache(BlockPool(num_blocks, num_tail), BLOCK, prefix_cache=prefix_cache, salt=b"")
    return Scheduler(
        cache,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=budget,
        tokens_that_fit=tokens_that_fit,
        num_kept=num_kept,
        merges=merges,
    )


def make_seq(order, num_prompt, max_tokens, first_token=0):
    prompt = tuple((first_token + i) % 50 for i in range(num_prompt))
    request = Request(f"r{order}", prompt, SamplingParams(max_tokens=max_tokens))
    return Sequence(
        request,
        order=order,
        seed=0,
        stop_ids=frozenset(),
        max_total_tokens=num_prompt + max_tokens,
    )


def run_step(scheduler):
    """One step as the engine does it, with a token that is a function of the position."""
    decoding = {seq.order for seq in scheduler.running if seq.is_decoding}
    plan = scheduler.schedule()
    if scheduler.tokens_that_fit is not None:
        assert plan.num_tokens <= scheduler.tokens_that_fit(plan.num_tokens)
    if not scheduler.merges:
        assert len({chunk.seq.order in decoding for chunk in plan.chunks}) <= 1
    finished = []
    for chunk in plan.chunks:
        seq = chunk.seq
        samples = chunk.samples
        assert seq.state is SequenceState.RUNNING
        assert chunk.start == seq.num_computed_tokens
        assert len(seq.block_table) * BLOCK >= chunk.start + chunk.length
        seq.mark_launched(chunk.length, 0, samples)
        scheduler.mark_read(seq)
        scheduler.cache.commit(seq, seq.num_computed_tokens)
        if samples and seq.append((seq.num_tokens * 7) % 50).finish_reason:
            scheduler.remove(seq)
            finished.append(seq)
    return plan, finished


@settings(deadline=None, max_examples=120)
@given(
    num_blocks=st.integers(6, 20),
    max_seqs=st.integers(1, 8),
    budget=st.integers(1, 24),
    prefix_cache=st.booleans(),
    num_tail=st.integers(0, 6),
    num_kept=st.integers(0, 4),
    tokens_a_block=st.sampled_from([None, 0, 1, 3]),
    arrivals=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 16), st.integers(1, 8), st.integers(0, 1)),
        min_size=1,
        max_size=14,
    ),
    aborts=st.sets(st.integers(0, 13)),
    merges=st.booleans(),
)
def test_everyone_finishes(
    num_blocks, max_seqs, budget, prefix_cache, num_tail, num_kept, tokens_a_block, arrivals,
    aborts, merges,
):  # fmt: skip
    """Also where a step's activations take tail blocks for all but the first `max_seqs` tokens."""

    def tokens_that_fit(wanted):
        return max_seqs + scheduler.cache.pool.num_lendable(num_blocks) * tokens_a_block

    scheduler = make_scheduler(
        num_blocks,
        max_seqs=max_seqs,
        budget=budget,
        prefix_cache=prefix_cache,
        num_tail=num_tail,
        tokens_that_fit=None if tokens_a_block is None else tokens_that_fit,
        num_kept=num_kept,
        merges=merges,
    )
    todo = [
        (gap, make_seq(order, num_prompt, max_tokens, first))
        for order, (gap, num_prompt, max_tokens, first) in enumerate(arrivals)
    ]
    steps, done = 0, []
    alive: dict[int, Sequence] = {}
    while todo or alive:
        while todo and (todo[0][0] <= steps % 6 or not alive):
            seq = todo.pop(0)[1]
            alive[seq.order] = seq
            scheduler.add(seq)
        oldest = alive[min(alive)]
        before = (oldest.num_computed_tokens, oldest.num_tokens)
        plan, finished = run_step(scheduler)
        assert plan.num_tokens <= budget
        assert len(plan.chunks) <= max_seqs
        assert len({id(chunk.seq) for chunk in plan.chunks}) == len(plan.chunks)
        if merges and len(plan.decode) < budget:
            after = (oldest.num_computed_tokens, oldest.num_tokens)
            assert after > before or oldest in finished, "the oldest did not progress"
        for seq in finished:
            del alive[seq.order]
            done.append(seq)
        if steps in aborts and alive:
            victim = alive.pop(max(alive))
            scheduler.remove(victim)
        scheduler.cache.pool.check([seq.block_table for seq in scheduler.sequences()])
        orders = [seq.order for seq in scheduler.running]
        assert orders == sorted(orders)
        steps += 1
        assert steps < 5000, "stuck"
    assert scheduler.cache.pool.num_live == 0
    for seq in done:
        assert seq.num_tokens == seq.max_total_tokens


def test_long_prompt_is_chunked_beside_decodes():
    scheduler = make_scheduler(64, budget=8)
    short, long = make_seq(0, 3, 20), make_seq(1, 30, 2, first_token=5)
    scheduler.add(short)
    run_step(scheduler)
    scheduler.add(long)
    shapes = []
    while long.state is not SequenceState.FINISHED:
        plan, _ = run_step(scheduler)
        shapes.append((len(plan.decode), [chunk.length for chunk in plan.prefill]))
    assert shapes[:5] == [(1, [7]), (1, [7]), (1, [7]), (1, [7]), (1, [2])]


def test_a_short_tail_cuts_the_youngest_chunks_and_keeps_their_blocks():
    room = 9
    scheduler = make_scheduler(64, max_seqs=4, budget=40, tokens_that_fit=lambda wanted: room)
    seqs = [make_seq(i, 12, 4, first_token=15 * i) for i in range(3)]
    for seq in seqs:
        scheduler.add(seq)
    plan, _ = run_step(scheduler)
    assert [(chunk.seq.order, chunk.length) for chunk in plan.chunks] == [(0, 9)]
    assert [len(seq.block_table) for seq in seqs] == [3, 3, 3]  # admitted with all their blocks
    room = 5
    plan, _ = run_step(scheduler)
    assert [(chunk.seq.order, chunk.length) for chunk in plan.chunks] == [(0, 3), (1, 2)]
    room = 100
    plan, _ = run_step(scheduler)
    assert [(chunk.seq.order, chunk.length) for chunk in plan.chunks] == [(0, 1), (1, 10), (2, 12)]
    assert scheduler.num_shortened_steps == 2


def test_an_admission_leaves_blocks_for_those_that_run_and_none_if_it_is_alone():
    scheduler = make_scheduler(8, num_kept=2, prefix_cache=False)
    first, second = make_seq(0, 28, 4), make_seq(1, 4, 12)
    assert scheduler.has_room_for(28, first.context)
    scheduler.add(first)
    scheduler.add(second)
    run_step(scheduler)
    run_step(scheduler)
    assert scheduler.running == [first] and len(first.block_table) == 7
    assert scheduler.cache.pool.num_available == 1, "the kept blocks serve those that run"
    assert not scheduler.has_room_for(4, second.context)
    while scheduler.running == [first]:
        run_step(scheduler)
    run_step(scheduler)
    assert scheduler.running == [second] and scheduler.num_preemptions == 0
    assert scheduler.has_room_for(20, second.context)  # 5 of the 7 that are free
    assert not scheduler.has_room_for(21, second.context)


def test_youngest_is_preempted_and_resumes():
    scheduler = make_scheduler(5, prefix_cache=False)
    old, young = make_seq(0, 8, 8), make_seq(1, 8, 8, first_token=9)
    scheduler.add(old)
    scheduler.add(young)
    for _ in range(12):
        run_step(scheduler)
        if scheduler.num_preemptions:
            break
    assert [young.state, old.state] == [SequenceState.WAITING, SequenceState.RUNNING]
    tokens = list(young.token_ids)
    while young.state is not SequenceState.FINISHED:
        run_step(scheduler)
    assert list(young.token_ids)[: len(tokens)] == tokens


def test_the_largest_is_preempted_but_not_the_oldest_nor_for_ever():
    """Blocks of 4: prompts of 12, 5, 9 and 2 tokens decode until 13 blocks do not suffice."""
    scheduler = make_scheduler(13, prefix_cache=False, budget=64)
    seqs = [make_seq(order, num, 30, 10 * order) for order, num in enumerate([12, 5, 9, 2])]
    for seq in seqs:
        scheduler.add(seq)
    while not scheduler.num_preemptions:
        run_step(scheduler)
    assert [seq.num_preemptions for seq in seqs] == [0, 0, 1, 0]

    def victim(*, blocks, preempted=(0, 0, 0, 0), priorities=(0, 0, 0, 0)):
        scheduler.running[:] = seqs
        for seq, num, times, priority in zip(seqs, blocks, preempted, priorities):
            seq.block_table = array("i", range(num))
            seq.num_preemptions = times
            seq.request = replace(seq.request, priority=priority)
        return scheduler._victim().order

    assert victim(blocks=(9, 2, 5, 3)) == 2
    assert victim(blocks=(9, 5, 5, 3)) == 2, "the youngest of equal ones"
    assert victim(blocks=(9, 2, 5, 3), preempted=(0, 0, 2, 0)) == 3
    assert victim(blocks=(9, 2, 5, 3), preempted=(0, 2, 2, 2)) == 3, "all have been: the youngest"
    assert victim(blocks=(9, 2, 5, 3), priorities=(0, 7, 0, 0)) == 1, "a batch goes first"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_remove_while_waiting_and_running(prefix_cache):
    scheduler = make_scheduler(8, max_seqs=1, prefix_cache=prefix_cache)
    first, second = make_seq(0, 5, 5), make_seq(1, 5, 5)
    scheduler.add(first)
    scheduler.add(second)
    run_step(scheduler)
    scheduler.remove(second)
    scheduler.remove(first)
    assert scheduler.cache.pool.num_live == 0
    assert not scheduler.schedule().chunks
