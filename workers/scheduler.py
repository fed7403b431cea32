"""Which sequences compute how many tokens in the next step, and who waits.

The merge step: decode rows and prefill chunks share one flat batch under a token budget. Knows
block counts, not bytes; nothing of tensors or models.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.workers.kv_cache import KVCache
from penstock.workers.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + length) of one sequence; `samples` if its last token is there."""

    seq: Sequence
    start: int
    length: int

    @property
    def samples(self) -> bool:
        return self.start + self.length == self.seq.num_tokens


@dataclass(slots=True)
class Plan:
    """One step: decode rows (chunks of one token) first, then longer prefill chunks."""

    decode: list[Chunk] = field(default_factory=list)
    prefill: list[Chunk] = field(default_factory=list)

    @property
    def chunks(self) -> list[Chunk]:
        return self.decode + self.prefill

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(chunk.length for chunk in self.prefill)

    def add(self, chunk: Chunk) -> None:
        (self.decode if chunk.length == 1 else self.prefill).append(chunk)

    def drop(self, seq: Sequence) -> int:
        """Take the chunk of `seq` out, if there is one; returns its tokens."""
        for chunks in (self.decode, self.prefill):
            for i, chunk in enumerate(chunks):
                if chunk.seq is seq:
                    del chunks[i]
                    return chunk.length
        return 0


class Scheduler:
    """Oldest first: running sequences decode, then prefill goes on, then waiting ones come in.

    When blocks run out the youngest running sequence is preempted: it gives its blocks back and is
    recomputed later, so the oldest always progresses. A sequence comes in only when all its known
    tokens fit, and never in a step that preempted.
    """

    def __init__(self, cache: KVCache, *, max_num_seqs: int, max_num_batched_tokens: int):
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.num_preemptions = 0

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out wherever it is, and its blocks back."""
        if seq.state is SequenceState.RUNNING:
            self.running.remove(seq)
        elif seq.state is SequenceState.WAITING:
            self.waiting.remove(seq)
        seq.state = SequenceState.FINISHED
        self.cache.free(seq)

    def expired(self, now_s: float) -> list[Sequence]:
        """Those that wait although their deadline has passed; nobody would read their answers."""
        return [
            seq
            for seq in self.waiting
            if seq.request.deadline_s is not None and seq.request.deadline_s <= now_s
        ]

    def schedule(self) -> Plan:
        """The next step. Blocks for all its tokens are in the sequences' tables on return."""
        plan = Plan()
        budget = self.max_num_batched_tokens
        before = self.num_preemptions
        decoding = [seq for seq in self.running if seq.num_pending_tokens == 1]
        prefilling = [seq for seq in self.running if seq.num_pending_tokens > 1]
        for seq in decoding:
            if budget > 0:
                budget -= self._schedule_running(seq, 1, plan)
        for seq in prefilling:
            if budget > 0:
                budget -= self._schedule_running(seq, min(seq.num_pending_tokens, budget), plan)
        if self.num_preemptions == before:
            self._admit(budget, plan)
        return plan

    def _schedule_running(self, seq: Sequence, length: int, plan: Plan) -> int:
        """Plan up to `length` tokens of `seq`; returns the tokens by which the budget shrinks."""
        if seq.state is not SequenceState.RUNNING:  # preempted earlier in this very step
            return 0
        refund = 0
        while True:
            fits = self.cache.room_for(seq) - seq.num_computed_tokens
            if fits > 0:
                length = min(length, fits)
                break
            victim = self.running[-1]
            refund += plan.drop(victim)
            self._preempt(victim)
            if victim is seq:
                return -refund
        grown = self.cache.grow(seq, seq.num_computed_tokens + length)
        assert grown, "room_for promised blocks that grow did not find"
        plan.add(Chunk(seq, seq.num_computed_tokens, length))
        return length - refund

    def _admit(self, budget: int, plan: Plan) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if not self.cache.admit(seq):
                return
            self.waiting.popleft()
            seq.state = SequenceState.RUNNING
            if seq.started_s is None:
                seq.started_s = time.monotonic()
            self._insert_by_age(seq)
            # All blocks at once: what came in is not starved by the next one that comes in.
            grown = self.cache.grow(seq, seq.num_tokens)
            assert grown, "admit promised blocks that grow did not find"
            length = min(seq.num_pending_tokens, budget)
            plan.add(Chunk(seq, seq.num_computed_tokens, length))
            budget -= length

    def _preempt(self, seq: Sequence) -> None:
        self.num_preemptions += 1
        self.running.remove(seq)
        self.cache.free(seq)
        seq.state = SequenceState.WAITING
        older = sum(1 for other in self.waiting if other.order < seq.order)
        self.waiting.insert(older, seq)

    def _insert_by_age(self, seq: Sequence) -> None:
        at = len(self.running)
        while at and self.running[at - 1].order > seq.order:
            at -= 1
        self.running.insert(at, seq)

    def sequences(self) -> Iterable[Sequence]:
        yield from self.running
        yield from self.waiting
