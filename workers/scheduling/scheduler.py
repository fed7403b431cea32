"""Decides which sequences compute how many tokens in the next step, and which wait.

Mixed batches (the setting is `merge_steps`): decode rows and prefill chunks share one flat batch
under a token budget. Counts blocks; no tensors, no models.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from penstock.workers.context_policy import Context
from penstock.workers.errors import InvariantError
from penstock.workers.scheduling.deferral import Deferral
from penstock.workers.scheduling.drafting import Drafting
from penstock.workers.scheduling.kv_cache import KVCache
from penstock.workers.scheduling.plan import Chunk, Plan
from penstock.workers.scheduling.sequence import Sequence, SequenceState

MAX_PREEMPTIONS = 2  # of one sequence, while others can be preempted instead
NEWEST_WEIGHT = 0.2  # of the newest value in a running mean
FIRST_STEPS_TO_END = 16.0  # until a sequence has ended


class Scheduler:
    """Oldest first: running sequences decode, then prefill, then waiting ones are admitted.

    When blocks run out a running sequence is preempted, see `_victim`: its blocks are freed and it
    is recomputed later. The oldest is not, so it always progresses. A sequence is admitted only if
    all its known tokens that it sees at once fit, and never in a step that preempted.

    With a `deferral`, a decoding sequence without a free block may first continue without one.

    `tokens_that_fit(n)`: how many of n tokens the activations of a step have room for, once the
    step's blocks are taken; at least `max_num_seqs` of them. None: all. While sequences run, an
    admission leaves `num_kept` blocks: they serve those that run, and the activations of their
    steps. Without `merges`, a step either prefills or decodes, and prefill goes first.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        tokens_that_fit: Callable[[int], int] | None = None,
        num_kept: int = 0,
        merges: bool = True,
    ):
        self.cache = cache
        self.merges = merges
        self.deferral: Deferral | None = None
        self.drafting: Drafting | None = None
        self.tokens_that_fit = tokens_that_fit
        self.num_kept = num_kept
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.leaving: list[Sequence] = []  # have ended; a step in flight still uses their blocks
        self.num_preemptions = 0
        self.num_preemptions_avoided = 0  # times that a sequence continued without a block
        self._recomputed: float | None = None  # tokens per preemption: a running mean
        self._steps_to_end = FIRST_STEPS_TO_END  # between ends of sequences: a running mean
        self._num_steps = 0  # since the last sequence ended
        self._num_cached = 0  # tokens whose K and V this step reads, where `defers_always`
        self._scratch: list[int] = []  # scratch blocks that this step has not used yet
        self.num_shortened_steps = 0

    @property
    def defers_always(self) -> bool:
        """Whether tokens are deferred without need, for comparisons."""
        return self.deferral is not None and self.deferral.mode == "always"

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def has_room_for(self, num_tokens: int, context: Context) -> bool:
        """Whether a prompt of `num_tokens` could be admitted now, after all waiting sequences.

        Hits in the prefix cache are not counted: cheap, and on the safe side.
        """
        most = context.full_tokens
        if most is not None:
            num_tokens = min(num_tokens, most + self.cache.block_size)
        if len(self.running) + len(self.waiting) >= self.max_num_seqs:
            return False
        ahead = sum(self.cache.blocks_for(self.cache.tokens_to_begin(seq)) for seq in self.waiting)
        num_needed = ahead + self.cache.blocks_for(num_tokens) + self._num_kept()
        return num_needed <= self.cache.pool.num_available

    def _num_kept(self) -> int:
        return self.num_kept if self.running else 0

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, and free its blocks once no step in flight uses them."""
        if seq.state is SequenceState.RUNNING:
            self._steps_to_end += NEWEST_WEIGHT * (self._num_steps - self._steps_to_end)
            self._num_steps = 0
            self.running.remove(seq)
        elif seq.state is SequenceState.WAITING:
            self.waiting.remove(seq)
        seq.state = SequenceState.FINISHED
        if self.drafting is not None:
            self.drafting.end(seq)
        if seq.num_in_flight:
            self.leaving.append(seq)
        else:
            self.cache.free(seq)

    def mark_read(self, seq: Sequence) -> None:
        """The host has read a step that computed tokens of `seq`."""
        seq.num_in_flight -= 1
        if seq.state is SequenceState.FINISHED and not seq.num_in_flight:
            self.leaving.remove(seq)
            self.cache.free(seq)

    def may_run_ahead(self) -> bool:
        """Whether the next step can be scheduled and launched before the host reads the last one.

        That needs a sequence to schedule, no token that depends on ids which the host must see
        first, and a block for every running sequence: deferral and preemption require that no step
        is in flight.
        """
        unfinished = [seq for seq in self.running if not seq.is_fully_sampled]
        if not unfinished and not self.waiting:
            return False
        if self.defers_always:
            return False
        num_blocks = 0
        for seq in unfinished:
            if seq.num_deferred_tokens or (seq.num_unread_tokens and self._needs_ids(seq)):
                return False
            length = min(seq.num_pending_tokens, self.max_num_batched_tokens)
            missing = self.cache.num_missing(seq, seq.num_computed_tokens + length)
            num_blocks += max(0, missing)
        return num_blocks <= self.cache.pool.num_available

    def _needs_ids(self, seq: Sequence) -> bool:
        """Whether the host must have read all tokens of `seq` before the next step."""
        return seq.needs_ids or (self.drafting is not None and self.drafting.wants_ids(seq))

    def expired(self, now_s: float) -> list[Sequence]:
        """Waiting sequences whose deadline has passed, or that have waited too long to begin."""
        return [seq for seq in self.waiting if seq.is_expired(now_s)]

    def schedule(self) -> Plan:
        """The next step, with blocks for all its tokens in the sequences' block tables."""
        plan = Plan()
        budget = self.max_num_batched_tokens
        before = self.num_preemptions
        self._num_steps += 1
        if self.deferral is not None:
            self.deferral.begin_step()
            first = self.cache.pool.num_blocks
            self._scratch = list(range(first, first + self.deferral.num_scratch_blocks))
        if self.merges:
            budget = self._schedule_decoding(plan, budget)
        for seq in [seq for seq in self.running if not (seq.is_decoding or seq.is_fully_sampled)]:
            length = min(self.cache.advance(seq), budget)
            if length > 0:  # else it waits for blocks that are being loaded
                budget -= self._schedule_running(seq, length, plan)
        if self.num_preemptions == before:
            self._admit(budget, plan)
        if not self.merges and not plan.chunks:
            self._schedule_decoding(plan, budget)
        self._shorten(plan)
        if self.drafting is not None and self.num_preemptions == before:
            self.drafting.extend(plan)
        if self.cache.states is not None:
            self.cache.states.assign(plan)
        return plan

    def _schedule_decoding(self, plan: Plan, budget: int) -> int:
        """Plan the newest tokens of all decoding sequences; returns the rest of the budget."""
        decoding = [seq for seq in self.running if seq.is_decoding and not seq.is_fully_sampled]
        if self.defers_always:
            self._num_cached = sum(self._num_read(seq) for seq in decoding)
        for i, seq in enumerate(decoding, 1):
            length = seq.num_pending_tokens
            if budget >= length:
                num_others = plan.num_tokens + len(decoding) - i
                budget -= self._schedule_running(seq, length, plan, num_others)
        return budget

    def _shorten(self, plan: Plan) -> None:
        """Cut the youngest prefill chunks until the step's activations fit.

        Blocks that were taken for cut tokens stay in the block tables for the next steps. Each
        running sequence may have a token, so that the oldest is never cut to nothing.
        """
        if self.tokens_that_fit is None or not plan.prefill:
            return
        excess = plan.num_tokens - self.tokens_that_fit(plan.num_tokens)
        self.num_shortened_steps += excess > 0
        while excess > 0:
            chunk = plan.prefill.pop()
            # Deferred tokens are of use only if all are computed in the same step.
            kept = max(0, chunk.length - excess) if not chunk.num_deferred else 0
            excess -= chunk.length - kept
            if kept:
                plan.add(Chunk(chunk.seq, chunk.start, kept))

    def _schedule_running(self, seq: Sequence, length: int, plan: Plan, num_others: int = 0) -> int:
        """Plan up to `length` tokens of `seq`; returns the tokens by which the budget shrinks."""
        if seq.state is not SequenceState.RUNNING:  # preempted earlier in this step
            return 0
        refund = 0
        while True:
            fits = self.cache.room_for(seq) - seq.num_computed_tokens
            # Nearly always there is room, and nothing to decide.
            may_wait = self.defers_always or (self.deferral is not None and fits < length)
            may_wait = may_wait and seq.is_decoding
            if may_wait and self._plan_deferred(seq, length, fits, plan, num_others):
                return length - refund
            if fits > 0:
                length = min(length, fits)
                break
            victim = self._victim()
            refund += plan.drop(victim)
            self._preempt(victim)
            if victim is seq:
                return -refund
        grown = self.cache.grow(seq, seq.num_computed_tokens + length)
        if not grown:
            raise InvariantError("room_for promised blocks that grow did not find")
        plan.add(Chunk(seq, seq.num_computed_tokens, length))
        return length - refund

    def _plan_deferred(
        self, seq: Sequence, length: int, fits: int, plan: Plan, num_others: int
    ) -> bool:
        """Plan all pending tokens of `seq`, with or without a block for each, if it may be."""
        assert self.deferral is not None
        fits = max(0, min(fits, length))
        start = seq.num_computed_tokens
        verdict = self.deferral.stored(
            length=length,
            fits=fits,
            num_scheduled=num_others,
            num_cached=self._num_cached,
            num_steps=self._steps_to_end,
            restore_s=self._restore_s,
        )
        if verdict.decision is not None:
            seq.events.decided(verdict.decision, seq.num_generated_tokens)
        stored = verdict.num_stored
        if stored is None:
            return False
        own = max(
            self.cache.blocks_for(start + stored), seq.num_rolled_blocks + len(seq.block_table)
        )
        num_scratch = max(0, self.cache.blocks_for(start + length) - own)
        if num_scratch > len(self._scratch):
            return False
        grown = self.cache.grow(seq, start + stored)
        if not grown:
            raise InvariantError("room_for promised blocks that grow did not find")
        scratch = tuple(self._scratch[:num_scratch])
        del self._scratch[:num_scratch]
        if stored < length and fits < length and not seq.num_deferred_tokens:
            self.num_preemptions_avoided += 1
        plan.add(Chunk(seq, start, length, length - stored, scratch))
        return True

    def _restore_s(self) -> float:
        """Seconds that it takes to bring back the sequence that would be preempted now.

        Computed again: all that it has, or the mean of recent preemptions, since prefix hits and
        host memory spare much of that; or loaded from host memory, where that is faster.
        """
        assert self.deferral is not None
        num_tokens = self._victim().num_computed_tokens
        again = num_tokens if self._recomputed is None else min(num_tokens, self._recomputed)
        seconds = again * self.deferral.rule.compute_s_per_token
        if self.cache.swap is not None:
            seconds = min(seconds, self.cache.swap.restore_s(num_tokens))
        return seconds

    def _num_read(self, seq: Sequence) -> int:
        """Tokens whose K and V a decode step of `seq` reads."""
        most = seq.context.full_tokens
        return seq.num_computed_tokens if most is None else min(seq.num_computed_tokens, most)

    def _admit(self, budget: int, plan: Plan) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if not self.cache.admit(seq, self._num_kept()):
                return
            self.waiting.popleft()
            seq.state = SequenceState.RUNNING
            length = self.cache.advance(seq)
            if seq.started_s is None:
                seq.started_s = time.monotonic()
            else:  # it was preempted before: `length` is what that cost
                mean = length if self._recomputed is None else self._recomputed
                self._recomputed = mean + NEWEST_WEIGHT * (length - mean)
            self._insert_by_age(seq)
            length = min(length, budget, self.cache.room_for(seq) - seq.num_computed_tokens)
            if length > 0:
                self.cache.grow(seq, seq.num_computed_tokens + length)
                plan.add(Chunk(seq, seq.num_computed_tokens, length))
                budget -= length

    def _victim(self) -> Sequence:
        """The sequence to preempt: lowest priority, then most blocks, then the youngest.

        One large sequence frees what several small ones would, and answers that are long already
        have most to come (docs/decisions/0026-the-largest-is-preempted.md).
        Never the oldest while there are others, nor one that has been preempted MAX_PREEMPTIONS
        times, unless all have; then the youngest. So every sequence ends at some time.
        """
        others = self.running[1:] or self.running
        free = [seq for seq in others if seq.num_preemptions < MAX_PREEMPTIONS]
        if not free:
            return others[-1]
        return max(free, key=lambda s: (s.request.priority, len(s.block_table), s.order))

    def _preempt(self, seq: Sequence) -> None:
        if seq.num_in_flight:
            raise InvariantError("a step in flight uses blocks that would be freed")
        self.num_preemptions += 1
        if self.deferral is not None:
            self.deferral.preempted()
        seq.num_preemptions += 1
        seq.events.preempted(seq.num_computed_tokens, seq.num_generated_tokens)
        self.running.remove(seq)
        self.cache.preempt(seq)
        seq.state = SequenceState.WAITING
        older = sum(1 for other in self.waiting if other.order < seq.order)
        self.waiting.insert(older, seq)

    def _insert_by_age(self, seq: Sequence) -> None:
        at = len(self.running)
        while at and self.running[at - 1].order > seq.order:
            at -= 1
        self.running.insert(at, seq)

    def sequences(self) -> Iterable[Sequence]:
        """All sequences that have not ended."""
        yield from self.running
        yield from self.waiting
