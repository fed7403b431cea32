"""Adds drafts to a plan: last, and only with rows and blocks that nothing else can use in the step.

Drafts are no state of a sequence. Their blocks are given back when the step has been read, so a
draft costs no other sequence a block, and never causes a preemption.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.workers.scheduling.kv_cache import KVCache
from penstock.workers.scheduling.plan import Chunk, Plan
from penstock.workers.scheduling.sequence import Sequence
from penstock.workers.speculation.draft import (
    SOURCES,
    Draft,
    Offer,
    Proposer,
    StepSize,
    Widths,
)

# With steps launched ahead: tokens without a draft after which the host no longer reads each token
# first; and the number of tokens after which it reads one first again, to look for a draft.
QUIET_TOKENS, LOOK_TOKENS = 16, 64
# In steps that sample at least MANY_SAMPLED tokens, the search for drafts takes up to 2 % of the
# time. After a step whose drafts would not have paid the next one does not search, then the next
# three, at most MOST_SKIPPED.
MANY_SAMPLED = 4
MOST_SKIPPED = 7


@dataclass(slots=True)
class DraftCounts:
    """Tokens since the start by source: that steps verified, and that were right."""

    proposed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    accepted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))


class ModelDrafts(Protocol):
    """A draft model: execution/draft_model.py."""

    max_rows: int  # sequences that it can draft for at once

    def propose(
        self, asked: list[tuple[Chunk, int]], step: StepSize, num_keys: int
    ) -> list[Draft | None]:
        """As DraftModel."""

    def suits(self, draft: Draft) -> bool:
        """As DraftModel."""

    def end(self, seq: Sequence) -> None:
        """As DraftModel."""


class Drafting:
    """Asks a proposer for drafts of the sequences that decode, and plans as many as pay.

    `max_rows`: most rows of a step whose logits are computed. `max_tokens`: most draft tokens of a
    sequence. `free_rows(n)`: how many rows a step of n can have more without other memory. `model`
    drafts where the proposer, which costs next to nothing, has nothing as likely.
    """

    def __init__(
        self,
        cache: KVCache,
        proposer: Proposer,
        widths: Widths,
        *,
        vocab_size: int,
        max_tokens: int,
        max_rows: int,
        max_num_batched_tokens: int,
        free_rows: Callable[[int], int],
        model: ModelDrafts | None = None,
    ):
        self.cache = cache
        self.proposer = proposer
        self.widths = widths
        self.model = model
        self.counts = DraftCounts()
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._max_num_batched_tokens = max_num_batched_tokens
        self._free_rows = free_rows
        self._num_skipped = 0  # steps, after the last one whose drafts did not pay
        self._num_to_skip = 0

    def extend(self, plan: Plan) -> None:
        """Give chunks of `plan` drafts, with slots for their K and V."""
        room = min(
            self._max_rows - plan.num_sampled_rows,
            self._max_num_batched_tokens - plan.num_tokens,
            self._free_rows(plan.num_tokens),
        )
        if room < 1 or any(chunk.num_deferred for chunk in plan.chunks):
            return
        is_large = plan.num_sampled_rows >= MANY_SAMPLED
        if is_large and self._num_skipped < self._num_to_skip:
            self._num_skipped += 1
            return
        found = ((i, self._offer(c, room, is_large)) for i, c in enumerate(plan.decode))
        offers = {i: draft for i, draft in found if draft is not None}
        num_keys = sum(num_seen(chunk) for chunk in plan.decode)
        size = StepSize(plan.num_tokens, plan.num_sampled_rows, num_keys)
        asked = [] if self.model is None else self._ask(self.model, plan, offers, size, room)
        widths: list[int] = []
        if offers:
            offered = [Offer(draft, num_seen(plan.decode[i])) for i, draft in offers.items()]
            widths = self.widths.choose(offered, size, room)
            for (i, draft), width in zip(offers.items(), widths, strict=True):
                chunk = plan.decode[i]
                width = min(width, self.cache.grow_spare(chunk.seq, chunk.start + 1, width))
                if width > 0:
                    plan.decode[i] = replace(chunk, draft=draft.first(width))
        if offers or asked:
            self._num_skipped = 0
            self._num_to_skip = 0 if any(widths) else min(2 * self._num_to_skip + 1, MOST_SKIPPED)
        for i in asked:
            chunk = plan.decode[i]
            self.cache.give_back(chunk.seq, chunk.start + chunk.num_rows)

    def _ask(
        self,
        model: ModelDrafts,
        plan: Plan,
        offers: dict[int, Draft],
        size: StepSize,
        room: int,
    ) -> list[int]:
        """Add drafts of `model` to `offers`. Returns the chunks that got blocks for them."""
        wanted = [
            (i, most)
            for i, chunk in enumerate(plan.decode)
            if (most := self._most(chunk, room)) > 0
            and not (i in offers and model.suits(offers[i]))
        ][: min(room, model.max_rows)]
        found: list[tuple[int, int]] = []
        for i, most in wanted:
            chunk = plan.decode[i]
            most = min(most, room // len(wanted))
            most = min(most, self.cache.grow_spare(chunk.seq, chunk.start + 1, most))
            if most > 0:
                found.append((i, most))
        if not found:
            return []
        asked = [(plan.decode[i], most) for i, most in found]
        num_keys = sum(num_seen(chunk) for chunk, _ in asked) // len(asked)
        drafts = model.propose(asked, size, num_keys)
        for (i, most), draft in zip(found, drafts, strict=True):
            num = 0
            if draft is not None:
                seq = plan.decode[i].seq
                seq.draft_offered_at = seq.num_tokens
                num = self._num_possible(seq, draft.token_ids[:most])
            if draft is not None and num:
                offers[i] = draft.first(num)
        return [i for i, _ in found]

    def _most(self, chunk: Chunk, room: int) -> int:
        """Tokens that could be verified after `chunk`."""
        seq = chunk.seq
        if not may_draft(seq) or not chunk.samples:
            return 0
        return min(room, self._max_tokens, seq.max_total_tokens - seq.num_tokens - 1)

    def _offer(self, chunk: Chunk, room: int, is_large: bool) -> Draft | None:
        """What could be verified after `chunk`, or None."""
        seq, most, draft = chunk.seq, self._most(chunk, room), None
        if seq.matcher is not None and most > 0 and len(forced := seq.matcher.forced()) > 0:
            draft = Draft(forced[:most], "grammar")
        elif most > 0:
            draft = self.proposer.propose(seq.text, most)
        if draft is None or (is_large and draft.is_by_chance):
            return None
        if not draft.is_by_chance:
            seq.draft_offered_at = seq.num_tokens
        num = self._num_possible(seq, draft.token_ids[:most])
        return draft.first(num) if num else None

    def _num_possible(self, seq: Sequence, drafts: tuple[int, ...]) -> int:
        """How many leading `drafts` can be part of the answer with a token after them."""
        for i, token_id in enumerate(drafts):
            if not 0 <= token_id < self._vocab_size or token_id in seq.stop_ids:
                drafts = drafts[:i]
                break
        return len(drafts) if seq.matcher is None else seq.matcher.leading(drafts)

    def verified(self, chunk: Chunk, num_accepted: int) -> None:
        """The step of `chunk` was read; `num_accepted` of its drafts are part of the answer."""
        seq, draft = chunk.seq, chunk.draft
        assert draft is not None
        num = len(draft.token_ids)
        self.counts.proposed[draft.source] += num
        self.counts.accepted[draft.source] += num_accepted
        seq.num_draft_tokens += num
        seq.num_accepted_tokens += num_accepted
        self.widths.observe(draft, num_accepted)
        if draft.source != "draft":
            self.proposer.observe(seq.text, draft, num_accepted)

    def observe_step(self, plan: Plan, seconds: float) -> None:
        """The step of `plan` has taken `seconds`."""
        if plan.prefill or not plan.decode:
            return
        keys = [num_seen(chunk) for chunk in plan.decode]
        size = StepSize(len(keys), len(keys), sum(keys))
        widths = [len(chunk.drafts) for chunk in plan.decode]
        num_draft_keys = sum(num * width for num, width in zip(keys, widths, strict=True))
        self.widths.observe_step(size, sum(widths), num_draft_keys, seconds)

    def end(self, seq: Sequence) -> None:
        """`seq` has ended."""
        self.proposer.end(seq.text)
        if self.model is not None:
            self.model.end(seq)

    def wants_ids(self, seq: Sequence) -> bool:
        """Whether the host should read the newest token of `seq` before the next step: drafts were
        offered of late, or it is time to look again."""
        if not may_speculate(seq):
            return False
        num_since = seq.num_tokens - max(seq.draft_offered_at, seq.num_prompt_tokens)
        return num_since <= QUIET_TOKENS or num_since % LOOK_TOKENS <= 1


def may_draft(seq: Sequence) -> bool:
    """Whether the next tokens of `seq` may be drafted. Its newest token must be on the host.

    Deferred tokens are computed again without slots; prompts that embed sample nothing.
    """
    return may_speculate(seq) and not seq.num_unread_tokens and not seq.num_deferred_tokens


def may_speculate(seq: Sequence) -> bool:
    return seq.request.params.speculate is not False and not seq.request.embeds


def num_seen(chunk: Chunk) -> int:
    """Keys that a row of `chunk` reads, about."""
    most = chunk.seq.context.full_tokens
    return chunk.start if most is None else min(chunk.start, most)
