"""The one loop: add, abort, step.

Plain and synchronous: no Ray, no threads, no text. A request that cannot be served is refused by
`add`; one that fails in a step ends alone, and the others go on.
"""

from __future__ import annotations

import logging
import random
import secrets
import time

from penstock.workers.config import EngineConfig
from penstock.workers.deferral import (
    Rule,
    deferral_of,
    rule_of,
    scratch_views,
)
from penstock.workers.engine_memory import log_memory, saved_bytes, step_memory
from penstock.workers.executor import Executor, StepResult
from penstock.workers.grammar import GrammarMatcher
from penstock.workers.histogram import Histogram
from penstock.workers.intake import Intake
from penstock.workers.kv_cache import KVCache
from penstock.workers.kv_format import kv_format
from penstock.workers.memory import BlockLayout
from penstock.workers.models.decoder import Decoder
from penstock.workers.policies import ContextSettings, obstacle_of
from penstock.workers.rates import PROBE_ROWS, Rates
from penstock.workers.request import Delta, FinishReason, Request, RequestError
from penstock.workers.scheduler import Plan, Scheduler
from penstock.workers.sequence import Sequence
from penstock.workers.stats import STEP_TOKENS_BOUNDS, EngineStats
from penstock.workers.step_model import StepModel
from penstock.workers.swap import host_swap

log = logging.getLogger("penstock.engine")

DECLINED = "declined"  # a code that no client sees: the request is sent elsewhere
LOAD_WAIT_S = 0.01  # with nothing else to do; then the inbox is looked at again


class Engine:
    """Continuous batching of one model on one device."""

    def __init__(self, config: EngineConfig, model: Decoder, commit_rule: Rule | None = None):
        """`commit_rule` decides on deferred commit; None: by the ridge, which is measured."""
        self.config = config
        self.model = model
        facts = model.config
        kv = kv_format(config.kv, config.kv_group, facts.head_dim, model.dtype)
        layout = BlockLayout(
            num_layers=facts.num_layers,
            num_kv_heads=facts.num_kv_heads,
            block_size=config.block_size,
            head_dim=facts.head_dim,
            dtype=kv.dtype,
            group=kv.group,
        )
        self.memory = step_memory(config, layout, model)
        self.arena, self.pool = self.memory.arena, self.memory.pool
        log_memory(config, self.memory)
        self.cache = KVCache(
            self.pool,
            config.block_size,
            prefix_cache=config.prefix_cache,
            salt=secrets.token_bytes(32) + str(kv).encode(),
        )
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            tokens_that_fit=self.memory.tokens_that_fit,
            merges=config.merge_steps,
        )
        kv_layers = self.arena.kv_layers()
        if config.kv_commit == "deferred":
            scratch = scratch_views(config, layout, self.memory.rest)
            kv_layers = [layer.with_scratch(scratch) for layer in kv_layers]
        self.executor = Executor(model, kv_layers, config.block_size, self.memory)
        run_rows, most_rows = self.executor.run_rows, self.memory.tokens_that_fit(PROBE_ROWS)
        if config.kv_commit == "deferred":
            is_cuda = model.device.type == "cuda"
            rule = commit_rule or rule_of(
                config,
                facts,
                run_rows,
                most_rows=most_rows,
                is_cuda=is_cuda,
                weights=model.weights.format,
                layout=layout,
            )
            self.scheduler.deferral = deferral_of(config, rule)
        self._rates: Rates | None = None
        if config.host_kv_gb is not None:
            self.cache.swap, self._rates = host_swap(config, self.arena, run_rows, most_rows)
            self.pool.on_evict = self.cache.swap.keep
        self.times = self.executor.times
        self.step_model = StepModel()
        self.max_model_len = min(
            config.max_model_len or facts.max_position_embeddings,
            self.arena.num_blocks * config.block_size,
        )
        contexts = ContextSettings.of(config, self.max_model_len, obstacle_of(facts))
        moe_mode = "exact" if model.routed is None else config.moe_mode
        self.intake = Intake(facts.vocab_size, contexts, self.pool.num_blocks, moe_mode)
        self._sequences: dict[str, Sequence] = {}
        self._num_added = 0
        self._random = random.Random(config.seed)
        self._num_steps = self._num_prompt_tokens = self._num_generated_tokens = 0
        self._num_finished: dict[str, int] = {reason.value: 0 for reason in FinishReason}
        self._num_corrupted = 0
        self._num_deferred_tokens = self._num_recomputed_tokens = 0
        self._step_tokens = Histogram(STEP_TOKENS_BOUNDS)

    def add(self, request: Request, matcher: GrammarMatcher | None = None) -> None:
        """Queue a request. Raises RequestError if it can never be served, or the queue is full.

        `matcher`: of its `structured`, behind its emitted ids. GrammarCompiler makes them, which
        takes too long for the thread of the engine.
        """
        if request.request_id in self._sequences:
            raise RequestError("this request id is already running", code="internal_error")
        max_total = self.intake.check(request, matcher)
        context = self.intake.context(request)
        if request.may_decline and not self.scheduler.has_room_for(
            len(request.prompt_ids), context
        ):
            raise RequestError("this worker has no room for it now", code=DECLINED)
        if len(self.scheduler.waiting) >= self.config.max_waiting:
            raise RequestError("too many requests are waiting on this worker", code="overloaded")
        stop_ids = set(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            stop_ids.update(self.model.config.eos_token_ids)
        seed = request.params.seed
        seq = Sequence(
            request,
            order=self._num_added,
            seed=self._random.getrandbits(64) if seed is None else seed,
            stop_ids=frozenset(stop_ids),
            max_total_tokens=max_total,
            matcher=matcher,
            context=context,
            moe_mode=self.intake.mode(request),
        )
        self._num_added += 1
        self._sequences[request.request_id] = seq
        self.scheduler.add(seq)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks now. False if it is not (or no longer) here."""
        seq = self._sequences.pop(request_id, None)
        if seq is None:
            return False
        self.scheduler.remove(seq)
        self._num_finished[FinishReason.ABORT.value] += 1
        return True

    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self) -> list[Delta]:
        """Run one batch; what it produced, finished requests included."""
        self.times.begin()
        deltas = self._drop_expired()
        plan = self.scheduler.schedule()
        self.times.lap("schedule")
        if not plan.chunks:
            if self.cache.swap is not None:
                self.cache.swap.wait(LOAD_WAIT_S)
            return deltas
        self._num_steps += 1
        self._step_tokens.observe(plan.num_tokens)
        began_s = time.perf_counter()
        try:
            result = self.executor.run(plan)
        except Exception:
            log.exception("a step of %d sequences failed; trying each alone", len(plan.chunks))
            return deltas + self._run_each_alone(plan)
        seconds = time.perf_counter() - began_s
        if self._rates is not None:
            self._rates.observe_step(plan.num_tokens, seconds)
        num_cached = sum(chunk.seq.num_computed_tokens for chunk in plan.decode)
        num_prompt = plan.num_tokens - len(plan.decode)
        self.step_model.observe(len(plan.decode), num_cached, num_prompt, seconds)
        deltas += self._commit(plan, result)
        self.times.lap("deliver")
        return deltas

    def close(self) -> None:
        """End what runs beside the engine."""
        if self.cache.swap is not None:
            self.cache.swap.close()
        if self.model.routed is not None:
            self.model.routed.close()

    def stats(self) -> EngineStats:
        pool, cache = self.pool, self.cache
        tier = None if cache.swap is None else cache.swap.tier
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_blocks=pool.num_blocks,
            num_block_bytes=self.arena.layout.block_bytes,
            block_size=self.config.block_size,
            max_num_seqs=self.config.max_num_seqs,
            num_live_blocks=pool.num_live,
            num_cached_blocks=pool.num_cached,
            num_saved_bytes=saved_bytes(self.config, self.memory),
            num_saved_blocks=saved_bytes(self.config, self.memory) // self.arena.layout.block_bytes,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            num_preemptions_avoided=self.scheduler.num_preemptions_avoided,
            num_deferred_tokens=self._num_deferred_tokens,
            num_recomputed_tokens=self._num_recomputed_tokens,
            num_host_blocks=0 if tier is None else tier.num_slots,
            num_host_blocks_used=0 if tier is None else tier.num_used,
            num_loaded_tokens=0 if cache.swap is None else cache.swap.num_loaded_tokens,
            num_rolled_blocks=cache.num_rolled_blocks,
            num_shortened_steps=self.scheduler.num_shortened_steps,
            num_prefix_queried_tokens=cache.num_queried_tokens,
            num_prefix_hit_tokens=cache.num_hit_tokens,
            num_outstanding_tokens=sum(map(_outstanding, self._sequences.values())),
            num_finished=dict(self._num_finished),
            num_corrupted=self._num_corrupted,
            step_seconds=self.times.seconds(),
            step_model=self.step_model.coefficients(),
            step_tokens=self._step_tokens.snapshot(),
            experts=None if self.model.routed is None else self.model.routed.stats(),
        )

    def check(self) -> None:
        """Assert that the block ledger is whole. Cheap enough for idle time and for tests."""
        self.pool.check([seq.block_table for seq in self.scheduler.sequences()])
        assert not self.pool.num_lent, "a loan has outlived its step"
        for seq in self.scheduler.waiting:
            assert not seq.block_table, "a waiting sequence owns blocks"
        assert len(self._sequences) == len(list(self.scheduler.sequences()))

    def _commit(self, plan: Plan, result: StepResult) -> list[Delta]:
        """Record what a step computed: KV lengths, full blocks, sampled tokens, endings."""
        deltas = []
        sampled = iter(result.sampled)
        for i, chunk in enumerate(plan.chunks):
            seq, samples = chunk.seq, chunk.samples
            num_new = chunk.length - seq.num_deferred_tokens
            self._num_prompt_tokens += max(0, num_new - samples)
            self._num_recomputed_tokens += min(chunk.length, seq.num_deferred_tokens)
            if i in result.prompt_logprobs:
                # After a preemption the prompt is computed again, and some are there already.
                num_known = len(seq.prompt_logprobs) - chunk.start
                seq.prompt_logprobs += result.prompt_logprobs[i][num_known:]
            token = next(sampled) if samples else None
            if token is not None and token.token_id < 0:
                deltas.append(self._fail_row(seq))
                continue
            num_stored = chunk.length - chunk.num_deferred
            seq.num_computed_tokens += num_stored
            seq.num_deferred_tokens = max(chunk.length, seq.num_deferred_tokens) - num_stored
            seq.num_deferred_tokens = max(0, seq.num_deferred_tokens)
            self._num_deferred_tokens += chunk.num_deferred
            self.cache.commit(seq)
            if token is not None:
                delta = seq.append(token.token_id, token.logprob)
                self._num_generated_tokens += 1
                deltas.append(delta)
                if delta.finish_reason is not None:
                    self._finish(seq, delta.finish_reason)
        return deltas

    def _run_each_alone(self, plan: Plan) -> list[Delta]:
        """After a failed step: whoever fails again ends with an error, the others go on.

        Nothing was recorded of the failed step, and writing the same K and V twice is harmless.
        """
        deltas = []
        for chunk in plan.chunks:
            alone = Plan()
            alone.add(chunk)
            try:
                result = self.executor.run(alone)
            except Exception:
                log.exception("request %s failed alone; ending it", chunk.seq.request.request_id)
                deltas.append(self._fail(chunk.seq, "internal_error"))
            else:
                deltas += self._commit(alone, result)
        return deltas

    def _drop_expired(self) -> list[Delta]:
        """End what waits although its deadline has passed, before it costs a step."""
        deltas = []
        for seq in self.scheduler.expired(time.monotonic()):
            self._finish(seq, FinishReason.ERROR)
            delta = Delta(seq.request.request_id, [], FinishReason.ERROR, error="deadline_exceeded")
            deltas.append(delta)
        return deltas

    def _fail(self, seq: Sequence, code: str) -> Delta:
        self.cache.forget(seq)
        self._num_corrupted += code == "numerical_error"
        self._finish(seq, FinishReason.ERROR)
        return Delta(seq.request.request_id, [], FinishReason.ERROR, error=code)

    def _fail_row(self, seq: Sequence) -> Delta:
        """Nothing could be sampled: the numbers are at fault, or else the grammar."""
        matcher = seq.matcher
        if matcher is None or not matcher.has_failed:
            return self._fail(seq, "numerical_error")
        delta = self._fail(seq, "invalid_value")
        delta.error_param = matcher.param
        delta.error_message = f"{matcher.param} became too complex in the course of the answer"
        return delta

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        del self._sequences[seq.request.request_id]
        self.scheduler.remove(seq)
        self._num_finished[reason.value] += 1


def _outstanding(seq: Sequence) -> int:
    """Tokens still to come for `seq`, at most; one without end counts as what it sees at once."""
    rest, most = seq.max_total_tokens - seq.num_computed_tokens, seq.context.full_tokens
    return rest if most is None else min(rest, most)
