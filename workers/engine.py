"""The one loop: add, abort, step.

Plain and synchronous: no Ray, no threads, no text. A request that cannot be served is refused by
`add`; one that fails in a step ends alone, and the others go on.
"""

from __future__ import annotations

import logging
import random
import secrets
import time

import torch

from penstock.workers.config import ConfigError, EngineConfig
from penstock.workers.deferral import (
    Rule,
    deferral_of,
    most_pending,
    num_scratch_blocks,
    rule_of,
    scratch_views,
)
from penstock.workers.executor import Executor, StepResult
from penstock.workers.grammar import GrammarMatcher
from penstock.workers.histogram import Histogram
from penstock.workers.kv_cache import BlockPool, KVCache
from penstock.workers.memory import Arena, BlockLayout
from penstock.workers.models.decoder import Decoder
from penstock.workers.policies import Context, ContextSettings, obstacle_of
from penstock.workers.rates import PROBE_ROWS, Rates
from penstock.workers.request import Delta, FinishReason, Request, RequestError
from penstock.workers.scheduler import Plan, Scheduler
from penstock.workers.sequence import Sequence
from penstock.workers.stats import STEP_TOKENS_BOUNDS, EngineStats
from penstock.workers.swap import host_swap
from penstock.workers.workspace import StepMemory, blocks_to_borrow, logits_plan

log = logging.getLogger("penstock.engine")

LOAD_WAIT_S = 0.01  # with nothing else to do; then the inbox is looked at again

GPU_KV_FRACTION = 0.85  # of the memory that is free once the weights are loaded
CPU_KV_FRACTION = 1 / 8  # of the machine's memory: other programs live there too
LATE = "the deadline of this request has passed"


class Engine:
    """Continuous batching of one model on one device."""

    def __init__(self, config: EngineConfig, model: Decoder, commit_rule: Rule | None = None):
        """`commit_rule` decides on deferred commit; None: by the ridge, which is measured."""
        self.config = config
        self.model = model
        facts = model.config
        layout = BlockLayout(
            num_layers=facts.num_layers,
            num_kv_heads=facts.num_kv_heads,
            block_size=config.block_size,
            head_dim=facts.head_dim,
            dtype=model.dtype,
        )
        self.memory = _step_memory(config, layout, model)
        self.arena, self.pool = self.memory.arena, self.memory.pool
        _log_memory(config, self.memory)
        self.cache = KVCache(
            self.pool,
            config.block_size,
            prefix_cache=config.prefix_cache,
            salt=secrets.token_bytes(32),
        )
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            tokens_that_fit=self.memory.tokens_that_fit,
        )
        self.executor = Executor(model, self.arena.kv_layers(), config.block_size, self.memory)
        run_rows, most_rows = self.executor.run_rows, self.memory.tokens_that_fit(PROBE_ROWS)
        if config.kv_commit == "deferred":
            is_cuda = model.device.type == "cuda"
            rule = commit_rule or rule_of(
                config, facts, run_rows, most_rows=most_rows, is_cuda=is_cuda
            )
            self.scheduler.deferral = deferral_of(config, rule)
            scratch = num_scratch_blocks(config) * 2 * layout.half_bytes
            self.executor.scratch = scratch_views(layout, self.memory.rest[:scratch])
        self._rates: Rates | None = None
        if config.host_kv_gb is not None:
            self.cache.swap, self._rates = host_swap(config, self.arena, run_rows, most_rows)
            self.pool.on_evict = self.cache.swap.keep
        self.times = self.executor.times
        self.max_model_len = min(
            config.max_model_len or facts.max_position_embeddings,
            self.arena.num_blocks * config.block_size,
        )
        self.contexts = ContextSettings.of(config, self.max_model_len, obstacle_of(facts))
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
        max_total = self._check(request)
        _check_matcher(request, matcher)
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
            context=self._context(request),
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
        if self._rates is not None:
            self._rates.observe_step(plan.num_tokens, time.perf_counter() - began_s)
        deltas += self._commit(plan, result)
        self.times.lap("deliver")
        return deltas

    def close(self) -> None:
        """End what runs beside the engine."""
        if self.cache.swap is not None:
            self.cache.swap.close()

    def stats(self) -> EngineStats:
        pool, cache = self.pool, self.cache
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_blocks=pool.num_blocks,
            num_live_blocks=pool.num_live,
            num_cached_blocks=pool.num_cached,
            num_saved_bytes=_saved_bytes(self.config, self.memory),
            num_saved_blocks=_saved_bytes(self.config, self.memory)
            // self.arena.layout.block_bytes,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            num_preemptions_avoided=self.scheduler.num_preemptions_avoided,
            num_deferred_tokens=self._num_deferred_tokens,
            num_recomputed_tokens=self._num_recomputed_tokens,
            num_rolled_blocks=cache.num_rolled_blocks,
            num_shortened_steps=self.scheduler.num_shortened_steps,
            num_prefix_queried_tokens=cache.num_queried_tokens,
            num_prefix_hit_tokens=cache.num_hit_tokens,
            num_outstanding_tokens=sum(map(_outstanding, self._sequences.values())),
            num_finished=dict(self._num_finished),
            num_corrupted=self._num_corrupted,
            step_seconds=self.times.seconds(),
            step_tokens=self._step_tokens.snapshot(),
        )

    def check(self) -> None:
        """Assert that the block ledger is whole. Cheap enough for idle time and for tests."""
        self.pool.check([seq.block_table for seq in self.scheduler.sequences()])
        assert not self.pool.num_lent, "a loan has outlived its step"
        for seq in self.scheduler.waiting:
            assert not seq.block_table, "a waiting sequence owns blocks"
        assert len(self._sequences) == len(list(self.scheduler.sequences()))

    def _check(self, request: Request) -> int:
        """Longest total length that the request may reach, in tokens; raises RequestError."""
        params, vocab = request.params, self.model.config.vocab_size
        if request.request_id in self._sequences:
            raise RequestError("this request id is already running", code="internal_error")
        if not request.prompt_ids:
            raise RequestError("the prompt is empty", param="prompt")
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab:
            raise RequestError(f"prompt token ids must lie in [0, {vocab})", param="prompt")
        if any(not 0 <= token_id < vocab for token_id in request.emitted_ids):
            raise RequestError(f"emitted token ids must lie in [0, {vocab})", param="emitted_ids")
        params.check(vocab)
        num_prompt = len(request.prompt_ids)
        limit = self.contexts.max_total_tokens(params)
        if num_prompt >= limit:
            raise RequestError(
                f"the prompt has {num_prompt} tokens; this model takes at most "
                f"{limit} tokens of prompt and answer together",
                param="prompt",
                code="context_length_exceeded",
            )
        if params.max_tokens is None:
            max_total = limit
        else:
            max_total = num_prompt + params.max_tokens
        if max_total > limit:
            raise RequestError(
                f"prompt ({num_prompt} tokens) + max_tokens ({params.max_tokens}) exceed the "
                f"{limit} tokens that this model takes; ask for at most {limit - num_prompt}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if num_prompt + len(request.emitted_ids) >= max_total:
            raise RequestError("nothing is left to generate", param="emitted_ids")
        if request.deadline_s is not None and request.deadline_s <= time.monotonic():
            raise RequestError(LATE, code="deadline_exceeded")
        if len(self.scheduler.waiting) >= self.config.max_waiting:
            raise RequestError("too many requests are waiting on this worker", code="overloaded")
        return max_total

    def _context(self, request: Request) -> Context:
        """Raises RequestError if it cannot be had, or what it sees at once never fits the pool."""
        context = self.contexts.context(request.params)
        if context.full_tokens is not None:
            num_blocks = self.cache.blocks_for(context.full_tokens + 1) + 1
            if num_blocks > self.pool.num_blocks:
                raise RequestError(
                    f"sinks and window take {num_blocks} KV blocks of {self.cache.block_size} "
                    f"tokens; this worker has {self.pool.num_blocks}",
                    param="window",
                )
        return context

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


def _check_matcher(request: Request, matcher: GrammarMatcher | None) -> None:
    spec = request.params.structured
    if spec is not None and matcher is None:
        raise RequestError(
            f"{spec.param}: no grammars are compiled here",
            param=spec.param,
            code="unsupported_parameter",
        )
    if matcher is not None and matcher.is_complete:
        raise RequestError("nothing is left to generate", param="emitted_ids")


def _step_memory(config: EngineConfig, layout: BlockLayout, model: Decoder) -> StepMemory:
    """The arena with its pool, and the activations and logits of a step in it.

    The reserve serves a row of each sequence, so that a step is possible however full the pool is;
    with separate activations, it serves the largest step. Raises ConfigError if there is no room.
    """
    plan, logits = model.plan, logits_plan(model.config, model.dtype)
    is_separate = config.activation_memory == "separate"
    reserve_tokens = config.max_num_batched_tokens if is_separate else config.max_num_seqs
    num_scratch = num_scratch_blocks(config)
    if num_scratch and not is_separate:  # one sequence at its limit always fits
        reserve_tokens += most_pending(config)
    reserve_bytes = plan.bytes_for(reserve_tokens) + logits.bytes_for(config.max_num_seqs)
    reserve_bytes += num_scratch * 2 * layout.half_bytes
    num_blocks = _num_blocks(config, layout, model, reserve_bytes)
    num_borrowed = blocks_to_borrow(
        plan, config.max_num_batched_tokens, plan.bytes_for(reserve_tokens), layout.block_bytes
    )
    return StepMemory(
        Arena(layout, num_blocks, model.device, reserve_bytes),
        BlockPool(num_blocks, num_tail=min(num_borrowed, num_blocks // 2)),
        plan,
        logits,
        reserve_tokens=reserve_tokens,
        num_logits=config.max_num_seqs,
    )


def _saved_bytes(config: EngineConfig, memory: StepMemory) -> int:
    """What the reserve would take more if the largest step had its activations there."""
    return memory.plan.bytes_for(config.max_num_batched_tokens) - memory.reserve_bytes


def _log_memory(config: EngineConfig, memory: StepMemory) -> None:
    arena, saved = memory.arena, _saved_bytes(config, memory)
    log.info(
        "arena of %.1f MiB: %d KV blocks of %.1f KiB, and a reserve of %.1f MiB for steps of up to "
        "%d tokens; larger ones, up to %d, borrow the free tail: %.1f MiB or %d blocks saved",
        arena.num_bytes / 2**20,
        arena.num_blocks,
        arena.layout.block_bytes / 2**10,
        arena.reserve_bytes / 2**20,
        memory.reserve_tokens,
        config.max_num_batched_tokens,
        saved / 2**20,
        saved // arena.layout.block_bytes,
    )


def _num_blocks(
    config: EngineConfig, layout: BlockLayout, model: Decoder, reserve_bytes: int
) -> int:
    """Blocks in the pool: as configured, else what fits in memory and can ever be in use.

    Raises ConfigError if not even one block fits beside a reserve of `reserve_bytes`.
    """
    device = model.device
    max_len = config.max_model_len or model.config.max_position_embeddings
    useful = config.max_num_seqs * -(-max_len // config.block_size)
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_gb is not None:
        budget = config.kv_cache_gb * 2**30
    elif device.type == "cuda":
        budget = torch.cuda.mem_get_info(device)[0] * GPU_KV_FRACTION
    else:
        budget = total_memory_bytes() * CPU_KV_FRACTION
    num_blocks = min(int((budget - reserve_bytes) // layout.block_bytes), useful)
    if num_blocks < 1:
        raise ConfigError(
            f"the KV pool of {budget / 2**30:.2f} GiB holds no block of {layout.block_bytes} bytes"
            f" beside {reserve_bytes / 2**20:.1f} MiB for the activations and logits of a step;"
            " raise kv_cache_gb, lower max_num_seqs or max_num_batched_tokens, or choose a smaller"
            " model or block_size"
        )
    return num_blocks


def total_memory_bytes() -> int:
    """Memory of this machine in bytes, or of the container that this process runs in."""
    with open("/proc/meminfo") as lines:
        total = int(next(line for line in lines if line.startswith("MemTotal")).split()[1]) * 1024
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as text:
                limit = text.read().strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total
