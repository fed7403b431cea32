"""How drafts get into a plan: what is cut, what is left to others, and when none are looked for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from penstock.workers.memory.block_pool import BlockPool
from penstock.workers.request import Request, SamplingParams
from penstock.workers.scheduling.drafting import MANY_SAMPLED, MOST_SKIPPED, Drafting
from penstock.workers.scheduling.kv_cache import KVCache
from penstock.workers.scheduling.plan import Chunk, Plan
from penstock.workers.scheduling.sequence import Sequence, SequenceState
from penstock.workers.speculation.draft import Draft, Offer, StepSize, Text
from tests.workers.speculation.proposers import Widest

VOCAB, BLOCK = 50, 4


class Given:
    """Proposes the same always, and counts how often it is asked."""

    def __init__(self, *token_ids: int, match_length: int = 5):
        self.token_ids, self.match_length, self.num_asked = token_ids, match_length, 0

    def propose(self, text: Text, most: int) -> Draft | None:
        self.num_asked += 1
        return Draft(self.token_ids, "lookup", self.match_length)

    def observe(self, text: Text, draft: Draft, num_accepted: int) -> None: ...

    def end(self, text: Text) -> None: ...


class Never(Widest):
    def choose(self, offers: list[Offer], step: StepSize, room: int) -> list[int]:
        return [0] * len(offers)


def decoding(cache: KVCache, num_tokens: int = 6, **params: Any) -> Sequence:
    """A sequence whose newest token is still to be computed."""
    values = {"max_tokens": 40, **params}
    request = Request("r", tuple(range(num_tokens)), SamplingParams(**values))
    seq = Sequence(
        request, order=0, seed=0, stop_ids=frozenset({9}), max_total_tokens=num_tokens + 40
    )
    seq.state = SequenceState.RUNNING
    seq.num_computed_tokens = num_tokens - 1
    assert cache.grow(seq, num_tokens)
    return seq


def cache_of(num_blocks: int, num_tail: int = 0) -> KVCache:
    return KVCache(BlockPool(num_blocks, num_tail), BLOCK, prefix_cache=True, salt=b"")


def drafting_of(cache: KVCache, proposer: Given, widths: Any = None, **given: Any) -> Drafting:
    limits: dict[str, Any] = {
        "vocab_size": VOCAB, "max_tokens": 8, "max_rows": 64, "max_num_batched_tokens": 64,
        "free_rows": lambda num: 64, **given,
    }  # fmt: skip
    return Drafting(cache, proposer, widths or Widest(), **limits)


def planned(drafting: Drafting, *seqs: Sequence) -> list[tuple[int, ...]]:
    plan = Plan([Chunk(seq, seq.num_computed_tokens, 1) for seq in seqs])
    drafting.extend(plan)
    return [chunk.drafts for chunk in plan.decode]


@pytest.mark.parametrize(
    ("limits", "num"),
    [
        ({}, 6),
        ({"max_tokens": 2}, 2),
        ({"max_rows": 4}, 3),
        ({"max_num_batched_tokens": 5}, 4),
        ({"free_rows": lambda num: 1}, 1),
        ({"free_rows": lambda num: 0}, 0),
    ],
)
def test_only_rows_that_are_left_over(limits, num):
    cache = cache_of(20)
    drafting = drafting_of(cache, Given(1, 2, 3, 4, 5, 6), **limits)
    assert planned(drafting, decoding(cache)) == [(1, 2, 3, 4, 5, 6)[:num]]


@pytest.mark.parametrize("wrong", [-1, VOCAB, 2**31 - 1, 9])
def test_ids_that_cannot_be_in_the_answer_are_cut(wrong):
    """9 ends it: nothing is sampled after it."""
    cache = cache_of(20)
    assert planned(drafting_of(cache, Given(1, 2, wrong, 3)), decoding(cache)) == [(1, 2)]
    assert planned(drafting_of(cache, Given(wrong, 3)), decoding(cache)) == [()]


def test_the_last_token_that_may_come_is_sampled_not_drafted():
    cache = cache_of(20)
    seq = decoding(cache)
    seq.max_total_tokens = seq.num_tokens + 3
    assert planned(drafting_of(cache, Given(1, 2, 3, 4)), seq) == [(1, 2)]
    seq.max_total_tokens = seq.num_tokens + 1
    assert planned(drafting_of(cache, Given(1, 2, 3, 4)), seq) == [()]


def test_blocks_are_taken_only_where_they_are_free():
    """Not cached ones, and none of the tail, which steps borrow; and they are given back."""
    cache = cache_of(6, num_tail=2)
    seq, other = decoding(cache), decoding(cache)  # two blocks each: two are free, in the tail
    drafting = drafting_of(cache, Given(*range(1, 8)))
    assert planned(drafting, seq) == [(1, 2)], "what is left of its own second block"
    cache.free(other)  # not indexed: free again
    assert planned(drafting, seq) == [tuple(range(1, 8))]
    assert len(seq.block_table) == 4
    cache.give_back(seq, seq.num_computed_tokens)
    assert len(seq.block_table) == 2
    cached = decoding(cache)
    cached.num_computed_tokens = 6
    cache.commit(cached, 6)
    cache.free(cached)
    assert cache.pool.num_cached == 1
    assert planned(drafting, seq) == [tuple(range(1, 7))], (
        "one free block, and the cached one stays"
    )
    assert cache.pool.num_cached == 1


@pytest.mark.parametrize("how", ["unread", "deferred", "off", "not the newest"])
def test_no_drafts_where_the_next_token_is_not_sampled_from_known_ones(how):
    cache = cache_of(20)
    proposer = Given(1, 2)
    seq = decoding(cache, speculate=False if how == "off" else None)
    match how:
        case "unread":
            seq.num_unread_tokens, seq.num_computed_tokens = 1, seq.num_tokens
        case "deferred":
            seq.num_deferred_tokens = 1
        case "not the newest":
            seq.num_computed_tokens -= 1
    assert planned(drafting_of(cache, proposer), seq) == [()]
    assert proposer.num_asked == 0


def test_a_step_with_deferred_tokens_has_no_drafts():
    cache = cache_of(20)
    seq, other = decoding(cache), decoding(cache)
    plan = Plan([Chunk(seq, seq.num_computed_tokens, 1)])
    plan.prefill.append(Chunk(other, 2, 4, num_deferred=2))
    drafting_of(cache, Given(1, 2)).extend(plan)
    assert plan.num_drafts == 0


@pytest.mark.parametrize(("match_length", "is_short"), [(1, True), (2, True), (3, False)])
def test_short_matches_are_for_small_steps_and_hold_up_no_launch(match_length, is_short):
    cache = cache_of(80)
    seqs = [decoding(cache) for _ in range(MANY_SAMPLED)]
    drafting = drafting_of(cache, Given(1, 2, match_length=match_length))
    assert planned(drafting, *seqs[1:]) == [(1, 2)] * (MANY_SAMPLED - 1)
    assert all((seq.draft_offered_at == 0) == is_short for seq in seqs[1:])
    assert planned(drafting, *seqs) == [() if is_short else (1, 2)] * MANY_SAMPLED


def test_large_steps_whose_drafts_do_not_pay_look_for_none_for_a_while():
    cache = cache_of(80)
    seqs = [decoding(cache) for _ in range(MANY_SAMPLED)]
    proposer = Given(1, 2)
    drafting = drafting_of(cache, proposer, Never())
    looked = []
    for _ in range(60):
        before = proposer.num_asked
        planned(drafting, *seqs)
        looked.append(proposer.num_asked > before)
    steps = [i for i, is_asked in enumerate(looked) if is_asked]
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert gaps[:3] == [2, 4, 8] and set(gaps[3:]) == {MOST_SKIPPED + 1}
    drafting.widths = Widest()
    while not any(planned(drafting, *seqs)):
        pass
    assert any(planned(drafting, *seqs)), "they pay again: the next step looks at once"
    few = drafting_of(cache, proposer, Never())
    before = proposer.num_asked
    for _ in range(10):
        planned(few, seqs[0])
    assert proposer.num_asked == before + 10, "a small step always looks"
