"""Counters of one engine since its start, and the `EngineStats` made of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from penstock.workers.config import EngineConfig
from penstock.workers.engine.sizing import saved_bytes
from penstock.workers.execution.executor import Executor
from penstock.workers.execution.step import StepInFlight
from penstock.workers.execution.step_model import StepModel
from penstock.workers.execution.timing import StepTimes
from penstock.workers.memory.restore import Rates
from penstock.workers.request import FinishReason
from penstock.workers.scheduling.deferral import Deferral
from penstock.workers.scheduling.plan import Chunk
from penstock.workers.scheduling.scheduler import Scheduler
from penstock.workers.scheduling.sequence import Sequence
from penstock.workers.scheduling.states import StateCache
from penstock.workers.stats import (
    STEP_TOKENS_BOUNDS,
    DeferralStats,
    EngineStats,
    Histogram,
    RankStats,
    StateStats,
)


@dataclass(slots=True)
class Totals:
    """Running sums; `EngineStats` documents each of them."""

    num_steps: int = 0
    num_steps_ahead: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_discarded_tokens: int = 0
    num_deferred_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_corrupted: int = 0
    num_finished: dict[str, int] = field(
        default_factory=lambda: {reason.value: 0 for reason in FinishReason}
    )
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS_BOUNDS))
    step_model: StepModel = field(default_factory=StepModel)
    rates: Rates | None = None  # of the host tier, if there is one
    last_done_s: float = 0.0

    def count_chunk(self, chunk: Chunk, samples: bool) -> None:
        """`chunk` was launched; call this before its sequence counts it."""
        num_deferred = chunk.seq.num_deferred_tokens  # computed before, and now again
        self.num_prompt_tokens += max(0, chunk.length - num_deferred - samples)
        self.num_recomputed_tokens += min(chunk.length, num_deferred)
        self.num_deferred_tokens += chunk.num_deferred

    def observe(self, step: StepInFlight) -> float:
        """Learn from a step that was read. It began with its launch, or the end of the last one.
        Returns the seconds that it took."""
        plan = step.plan
        seconds = step.done_s - max(step.began_s, self.last_done_s)
        self.last_done_s = step.done_s
        if self.rates is not None:
            self.rates.observe_step(plan.num_tokens, seconds)
        num_cached = sum(chunk.start * chunk.num_rows for chunk in plan.decode)
        num_rows = plan.num_decode_rows
        self.step_model.observe(num_rows, num_cached, plan.num_tokens - num_rows, seconds)
        return seconds


def stats_of(
    config: EngineConfig,
    executor: Executor,
    scheduler: Scheduler,
    totals: Totals,
    times: StepTimes,
    num_outstanding_tokens: int,
) -> EngineStats:
    """A snapshot of the parts of one engine."""
    memory, graphs = executor.memory, executor.graphs
    pool, cache, layout = memory.pool, scheduler.cache, memory.arena.layout
    drafting = scheduler.drafting
    tier = None if cache.swap is None else cache.swap.tier
    ranks = executor.model.ranks()
    block_bytes = sum(each.kv_bytes for each in ranks) // pool.num_blocks or layout.block_bytes
    return EngineStats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_blocks=pool.num_blocks,
        num_block_bytes=block_bytes,
        block_size=config.block_size,
        max_num_seqs=scheduler.max_num_seqs,
        num_live_blocks=pool.num_live,
        num_cached_blocks=pool.num_cached,
        num_saved_bytes=saved_bytes(config, memory),
        num_saved_blocks=saved_bytes(config, memory) // layout.block_bytes,
        num_steps=totals.num_steps,
        num_steps_ahead=totals.num_steps_ahead,
        num_graph_steps=0 if graphs is None else graphs.num_replays,
        num_discarded_tokens=totals.num_discarded_tokens,
        num_draft_tokens={} if drafting is None else dict(drafting.counts.proposed),
        num_accepted_tokens={} if drafting is None else dict(drafting.counts.accepted),
        num_prompt_tokens=totals.num_prompt_tokens,
        num_generated_tokens=totals.num_generated_tokens,
        num_preemptions=scheduler.num_preemptions,
        num_preemptions_avoided=scheduler.num_preemptions_avoided,
        num_deferred_tokens=totals.num_deferred_tokens,
        deferral=_deferral_stats(scheduler.deferral),
        num_recomputed_tokens=totals.num_recomputed_tokens,
        num_host_blocks=0 if tier is None else tier.num_slots,
        num_host_blocks_used=0 if tier is None else tier.num_used,
        num_loaded_tokens=0 if cache.swap is None else cache.swap.num_loaded_tokens,
        num_rolled_blocks=cache.num_rolled_blocks,
        num_shortened_steps=scheduler.num_shortened_steps,
        num_prefix_queried_tokens=cache.num_queried_tokens,
        num_prefix_hit_tokens=cache.num_hit_tokens,
        num_outstanding_tokens=num_outstanding_tokens,
        num_finished=dict(totals.num_finished),
        num_corrupted=totals.num_corrupted,
        step_seconds=times.seconds(),
        step_model=totals.step_model.coefficients(),
        step_tokens=totals.step_tokens.snapshot(),
        experts=executor.model.expert_stats(),
        states=None if cache.states is None else _state_stats(cache.states, ranks),
        ranks=ranks,
    )


def _state_stats(states: StateCache, ranks: Seq[RankStats]) -> StateStats:
    """`ranks`: of a group, each with its part of every slot."""
    stats = states.stats()
    state_bytes = sum(each.state_bytes for each in ranks)
    return replace(stats, slot_bytes=state_bytes // stats.num_slots or stats.slot_bytes)


def with_adapters(stats: EngineStats, rank_bytes: Seq[int]) -> EngineStats:
    """`stats` with the bytes of the loaded adapters on each rank of the group, `rank_bytes`. Empty
    if no adapter is loaded."""
    if not rank_bytes:
        return stats
    each = zip(stats.ranks, rank_bytes)
    return replace(stats, ranks=tuple(replace(rank, adapter_bytes=num) for rank, num in each))


def _deferral_stats(deferral: Deferral | None) -> DeferralStats | None:
    if deferral is None:
        return None
    rule, counts = deferral.rule, deferral.counts
    return DeferralStats(
        ridge_tokens=rule.ridge_tokens,
        read_s_per_token=rule.read_s_per_token,
        compute_s_per_token=rule.compute_s_per_token,
        num_decisions=dict(counts.by_branch),
        compute_s=counts.compute_s,
        load_s=counts.load_s,
    )


def num_outstanding_tokens(seq: Sequence) -> int:
    """Most tokens still to compute for `seq`; an endless answer counts as its visible window."""
    rest, most = seq.max_total_tokens - seq.num_computed_tokens, seq.context.full_tokens
    return rest if most is None else min(rest, most)
