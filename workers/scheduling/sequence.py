"""A request in the engine: its tokens, its block table, and its progress."""

from __future__ import annotations

import time
from array import array
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from penstock.workers.adapters.packed import Adapter
from penstock.workers.context_policy import FULL, Context
from penstock.workers.errors import InvariantError
from penstock.workers.memory.block_pool import ContentKey
from penstock.workers.request import Delta, FinishReason, FirstTokenTimes, Request, TokenLogprob
from penstock.workers.sampling.logits import LogitsEditor
from penstock.workers.scheduling.event_log import EventLog
from penstock.workers.speculation.draft import Text
from penstock.workers.structured.grammar import GrammarMatcher


class SequenceState(Enum):
    WAITING = "waiting"  # not admitted, or preempted: owns no block
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Mutable state of one request inside the engine.

    `token_ids` is prompt + answer so far; `num_computed_tokens` of them have their K and V in the
    blocks of `block_table`. All beyond that is computed in the next steps; the last one is sampled
    from. `block_keys` are the prefix-cache keys of the leading full blocks, and `content_keys`,
    while it waits, the addresses that its blocks were looked for under.

    With async scheduling, a step may be in flight that the host has not read (`num_in_flight`): its
    tokens count as computed, and the `num_unread_tokens` that it samples count as tokens after
    those of `token_ids`.

    The block table is compact: after the `context`'s sink blocks, `num_rolled_blocks` have been
    freed and left no gap. Of the pending tokens, the first `num_deferred_tokens` have been computed
    before, and are computed again because there was no block to store them in.

    Of one that embeds its prompt, `pooling` is "last" or "mean", and `pooled` the sum of the hidden
    states of its first `num_pooled_tokens`, or with "last" the last one alone.

    `num_draft_tokens` have been verified as drafts, and `num_accepted_tokens` of them were right.
    """

    __slots__ = (
        "adapter",
        "arrived_s",
        "block_keys",
        "block_table",
        "content_keys",
        "context",
        "draft_offered_at",
        "editor",
        "events",
        "matcher",
        "max_total_tokens",
        "moe_mode",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_counted_tokens",
        "num_deferred_tokens",
        "num_draft_tokens",
        "num_in_flight",
        "num_neurons",
        "num_pooled_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_rolled_blocks",
        "num_skipped_neurons",
        "num_unread_tokens",
        "order",
        "pooled",
        "pooling",
        "prompt_logprobs",
        "request",
        "seed",
        "started_s",
        "state",
        "stop_ids",
        "text",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        *,
        order: int,
        seed: int,
        stop_ids: frozenset[int],
        max_total_tokens: int,
        matcher: GrammarMatcher | None = None,
        context: Context = FULL,
        moe_mode: str = "exact",
        pooling: str = "last",
        adapter: Adapter | None = None,
    ):
        self.request = request
        self.adapter = adapter  # of its linears, until it ends, whatever becomes of the name
        self.pooling = pooling
        self.pooled: NDArray[np.float64] | None = None
        self.num_pooled_tokens = 0  # they stay pooled when K and V are computed again
        self.context = context
        self.moe_mode = moe_mode
        self.matcher = matcher  # has consumed the emitted ids; kept through preemption
        self.order = order  # of arrival: lower is older
        self.seed = seed
        self.stop_ids = stop_ids
        self.max_total_tokens = max_total_tokens
        self.state = SequenceState.WAITING
        self.arrived_s = time.monotonic()
        self.started_s: float | None = None  # when it was first admitted
        self.token_ids = array("i", request.prompt_ids)
        self.token_ids.extend(request.emitted_ids)
        self.num_prompt_tokens = len(request.prompt_ids)
        self.text = Text(
            request.request_id, self.token_ids, self.num_prompt_tokens, request.cache_domain
        )
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self.draft_offered_at = 0  # tokens
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_deferred_tokens = 0
        self.num_in_flight = 0
        self.num_unread_tokens = 0
        self.num_preemptions = 0
        self.events = EventLog()
        self.num_rolled_blocks = 0
        self.num_counted_tokens = 0  # tokens whose neurons are counted below
        self.num_neurons = self.num_skipped_neurons = 0
        self.block_table = array("i")
        self.block_keys: list[bytes] = []
        self.content_keys: list[ContentKey] = []
        self.prompt_logprobs: list[TokenLogprob] = []  # of tokens 1, 2, ... until handed out
        self.editor: LogitsEditor | None = None
        if request.params.edits_logits:
            self.editor = LogitsEditor(request.params, request.prompt_ids, request.emitted_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_unread_tokens

    @property
    def num_generated_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose K and V are still to be stored; 1 while decoding without deferral."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """Leading tokens that need not be computed if their K and V are there: all but the last,
        and where all hidden states are pooled, those that are."""
        most = self.num_tokens - 1
        is_summed = self.request.embeds and self.pooling == "mean"
        return min(most, self.num_pooled_tokens) if is_summed else most

    def is_expired(self, now_s: float) -> bool:
        """Whether its deadline has passed, or it has waited too long and was never computed."""
        deadline_s, wait_until_s = self.request.deadline_s, self.request.wait_until_s
        if deadline_s is not None and deadline_s <= now_s:
            return True
        return self.started_s is None and wait_until_s is not None and wait_until_s <= now_s

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token has never been computed."""
        return self.num_pending_tokens - self.num_deferred_tokens == 1

    @property
    def is_fully_sampled(self) -> bool:
        """Whether the last that it asks for has been computed, and only has to be read."""
        if self.request.embeds:
            return self.num_in_flight > 0 and not self.num_pending_tokens
        return self.num_unread_tokens > 0 and self.num_tokens >= self.max_total_tokens

    @property
    def needs_ids(self) -> bool:
        """Whether the host must have read all tokens before the next one is sampled."""
        return self.matcher is not None or self.request.params.needs_history

    def mark_launched(self, length: int, num_deferred: int, samples: bool) -> None:
        """A step that computes the next `length` tokens, and may sample one more, was launched.

        K and V of the last `num_deferred` are not kept. `append` must follow for a sampled token.
        """
        num_stored = length - num_deferred
        self.num_pooled_tokens = max(self.num_pooled_tokens, self.num_computed_tokens + length)
        self.num_computed_tokens += num_stored
        deferred = max(length, self.num_deferred_tokens) - num_stored
        self.num_deferred_tokens = max(0, deferred)
        self.num_unread_tokens += samples
        self.num_in_flight += 1

    def mark_accepted(self) -> None:
        """The newest token was a draft in the step that is being read: K and V of it are stored,
        and the token after it was sampled. `append` must follow."""
        self.num_computed_tokens += 1
        self.num_unread_tokens += 1

    def append(self, token_id: int, logprob: TokenLogprob | None = None) -> Delta:
        """Record the first unread token; returns what the client gets, finish reason included."""
        self.num_unread_tokens -= 1
        num_read = len(self.token_ids) - self.num_prompt_tokens
        may_stop = num_read >= self.request.params.min_tokens
        is_first = num_read == len(self.request.emitted_ids)
        self.token_ids.append(token_id)
        if self.editor is not None:
            self.editor.observe(token_id)
        if self.matcher is not None:
            self.matcher.advance(token_id)
        delta = Delta(
            self.request.request_id,
            [token_id],
            num_cached_tokens=self.num_cached_tokens,
            logprobs=[] if logprob is None else [logprob],
            prompt_logprobs=self.prompt_logprobs,
            times=self._first_token_times() if is_first else None,
            events=self.events.take() if self.events.pending else [],
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )
        self.prompt_logprobs = []
        if may_stop and token_id in self.stop_ids:
            delta.finish_reason, delta.stop_token_id = FinishReason.STOP, token_id
        elif self.matcher is not None and self.matcher.is_complete:
            delta.finish_reason = FinishReason.STOP
        elif len(self.token_ids) >= self.max_total_tokens:
            delta.finish_reason = FinishReason.LENGTH
        if delta.finish_reason is not None:
            # The token before the last one was the last that looked back.
            delta.num_evicted_tokens = self.context.num_evicted(len(self.token_ids) - 2)
            delta.moe_mode = self.moe_mode
            delta.num_neurons = self.num_neurons
            delta.num_skipped_neurons = self.num_skipped_neurons
        return delta

    def pool(self, hidden: NDArray[np.float64]) -> None:
        """Add `hidden` [hidden], the sum over newly pooled tokens."""
        self.pooled = hidden if self.pooled is None else self.pooled + hidden

    def embedded(self) -> Delta:
        """All of the prompt is computed: the request's only delta, with its embedding."""
        if self.pooled is None:
            raise InvariantError("a prompt was computed, and no hidden state of it was kept")
        num = self.num_prompt_tokens if self.pooling == "mean" else 1
        return Delta(
            self.request.request_id,
            [],
            FinishReason.STOP,
            num_cached_tokens=self.num_cached_tokens,
            moe_mode=self.moe_mode,
            times=self._first_token_times(),
            embedding=(self.pooled / num).astype("<f4").tobytes(),
        )

    def _first_token_times(self) -> FirstTokenTimes:
        assert self.started_s is not None, "admitted before its first token"
        return FirstTokenTimes(
            queue_s=self.started_s - self.arrived_s,
            prefill_s=time.monotonic() - self.started_s,
        )
