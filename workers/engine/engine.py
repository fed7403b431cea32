"""The engine's loop: add, abort, step.

Plain and synchronous: no Ray, no threads, no text. A request that cannot be served is refused by
`add`; one that fails in a step ends alone, and the others go on.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import replace

import numpy as np
import torch

from penstock.kernels.attention import backend_name
from penstock.workers.adapters.packed import Adapter
from penstock.workers.config import EngineConfig
from penstock.workers.context_policy import ContextSettings, unsupported_reason
from penstock.workers.engine.build import build_parts, wants_async_scheduling
from penstock.workers.engine.counters import Totals, num_outstanding_tokens, stats_of, with_adapters
from penstock.workers.engine.draft import drafts_described
from penstock.workers.engine.validation import RequestValidator
from penstock.workers.errors import StoreUnavailable
from penstock.workers.execution.cuda_graphs import Capture
from penstock.workers.execution.step import StepInFlight, StepResult
from penstock.workers.execution.timing import StepTimes
from penstock.workers.memory.kv_format import KvFormat
from penstock.workers.models.decoder import Decoder
from penstock.workers.pooling.pooling import Pooling, pooling_of
from penstock.workers.request import (
    DECLINED,
    STORE_UNAVAILABLE,
    Delta,
    FinishReason,
    Request,
    RequestError,
)
from penstock.workers.sampling.sampler import Sampled
from penstock.workers.scheduling.deferral import Rule
from penstock.workers.scheduling.plan import Chunk, Plan
from penstock.workers.scheduling.sequence import Sequence, SequenceState
from penstock.workers.speculation.draft import DraftSteps, Proposer, Widths
from penstock.workers.stats import EngineFacts, EngineStats
from penstock.workers.structured.grammar import GrammarMatcher

log = logging.getLogger("penstock.engine")

RENEWAL_STEPS = 256  # from one renewal of the costs that deferred commit compares to the next
LOAD_WAIT_S = 0.01  # for a KV load, where nothing else can run; then `step` returns


class Engine:
    """Continuous batching of one model on one device."""

    def __init__(
        self,
        config: EngineConfig,
        model: Decoder,
        commit_rule: Rule | None = None,
        capture: Capture | None = None,
        pooling: Pooling | None = None,
        speculation: tuple[Proposer, Widths] | None = None,
        draft: Decoder | None = None,
        draft_steps: DraftSteps | None = None,
    ):
        """`commit_rule` decides on deferred commit; None: the measured ridge does.

        `capture` makes the decode graphs; None: CUDA does, where the configuration wants them.
        `pooling`: of prompts that are embedded; None: as `config` says, without a look at files.
        `speculation`: what proposes drafts and how many are verified; None: as `config` says.
        `draft`: the draft model of `config` (engine/draft.py), which goes on as `draft_steps` says;
        None: as far as pays by measured times.
        Raises ConfigError where the model or the memory does not allow what is configured.
        """
        parts = build_parts(config, model, commit_rule, capture, speculation, draft, draft_steps)
        self.config = config
        self.model = model
        self.memory, self.cache, self.scheduler = parts.memory, parts.cache, parts.scheduler
        self.arena, self.pool = parts.memory.arena, parts.memory.pool
        self.executor, self.max_model_len = parts.executor, parts.max_model_len
        self.adapters = parts.adapters
        has_drafts = self.scheduler.drafting is not None
        self._drafts = drafts_described(config, model, draft) if has_drafts else ""
        self.totals = Totals(rates=parts.rates)
        self.times = StepTimes()
        self.async_scheduling = wants_async_scheduling(
            config, model.device, model.has_expert_caches
        )
        self._in_flight: StepInFlight | None = None  # the last step, not read yet
        contexts = ContextSettings.of(
            config, self.max_model_len, unsupported_reason(model.whole_config)
        )
        moe_mode = config.moe_mode if model.has_expert_caches else "exact"
        self.pooling = pooling or pooling_of(config.pooling)
        self.validator = RequestValidator(
            model.config.vocab_size,
            contexts,
            self.pool.num_blocks,
            moe_mode,
            generates=model.generates,
            no_embedding=self.pooling.refusal,
        )
        self._sequences: dict[str, Sequence] = {}
        self._num_added = 0
        self._random = random.Random(config.seed)

    @property
    def facts(self) -> EngineFacts:
        """What it computes with, for people."""
        model, layout = self.model, self.arena.layout
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        device = f"the CPU with {self.config.threads or torch.get_num_threads()} threads"
        if model.device.type == "cuda":
            device = torch.cuda.get_device_name(model.device)
        return EngineFacts(
            device,
            dtype=str(model.dtype).removeprefix("torch."),
            attention=backend_name(like, self.arena.kv_layers()[0]),
            kv=str(KvFormat(layout.dtype, layout.group)),
            drafts=self._drafts,
        )

    def add(self, request: Request, matcher: GrammarMatcher | None = None) -> None:
        """Queue a request. Raises RequestError if it can never be served, or the queue is full.

        `matcher`: for its `structured`, advanced past its emitted ids. GrammarCompiler makes it on
        another thread, since that takes longer than a step.
        """
        if request.request_id in self._sequences:
            raise RequestError("this request id is already running", code="internal_error")
        checked = self.validator.check(request, matcher)
        if request.may_decline and not self.scheduler.has_room_for(
            len(request.prompt_ids) + len(request.emitted_ids), checked.context
        ):
            raise RequestError("this worker has no room for it now", code=DECLINED)
        if not request.is_continued and len(self.scheduler.waiting) >= self.config.max_waiting:
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
            max_total_tokens=checked.max_total_tokens,
            matcher=matcher,
            context=checked.context,
            moe_mode=checked.moe_mode,
            pooling=self.pooling.kind,
            adapter=self._adapter_of(request),
        )
        self._num_added += 1
        self._sequences[request.request_id] = seq
        self.scheduler.add(seq)

    def _adapter_of(self, request: Request) -> Adapter | None:
        """The adapter that `request` names; None: it wants the model. Raises RequestError."""
        if not request.adapter:
            return None
        found = None if self.adapters is None else self.adapters.find(request.adapter)
        if found is None:
            raise RequestError(
                f"this worker has no adapter named {request.adapter!r}",
                param="model",
                code="model_not_found",
            )
        return found

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks, at once or when the step that uses them is read.

        False if the request is not, or no longer, in this engine.
        """
        seq = self._sequences.pop(request_id, None)
        if seq is None:
            return False
        self.scheduler.remove(seq)
        self.totals.num_finished[FinishReason.ABORT.value] += 1
        return True

    def has_work(self) -> bool:
        return bool(self._sequences) or self._in_flight is not None

    def step(self) -> list[Delta]:
        """Launch one batch, and return the deltas of the steps that were read meanwhile.

        Without `async_scheduling`, the order is launch n, read n; with it, launch n + 1, read n,
        wherever step n + 1 does not depend on ids that the host must see.
        """
        self.times.begin()
        with self.times.phase("schedule"):
            deltas = self._drop_expired()
            plan = self.scheduler.schedule()
        before, self._in_flight = self._in_flight, None
        if not plan.chunks:
            if before is not None:
                deltas += self._commit(before)
            elif self.cache.swap is not None:
                self.cache.swap.wait(LOAD_WAIT_S)
            return deltas
        self.totals.num_steps += 1
        self.totals.num_steps_ahead += before is not None
        self.totals.step_tokens.observe(plan.num_tokens)
        try:
            launched = self._launch(plan, before)
            if not self.async_scheduling:
                launched.read()
        except Exception as error:
            if not isinstance(error, StoreUnavailable):
                log.exception("a step of %d sequences failed; trying each alone", len(plan.chunks))
            if before is not None:
                deltas += self._commit(before)
            return deltas + self._run_each_alone(plan)
        self._mark_launched(launched)
        if before is not None:
            deltas += self._commit(before)
        is_final = not plan.num_drafts  # else only reading it tells how many tokens there are
        if self.async_scheduling and is_final and self.scheduler.may_run_ahead():
            self._in_flight = launched
        else:
            deltas += self._commit(launched)
        return deltas

    def mark_delivered(self) -> None:
        """The caller has handed over the deltas of `step`; the time counts as `deliver`."""
        self.times.end("deliver")

    def close(self) -> None:
        """End the threads that copy KV blocks and experts, and the other ranks of a group."""
        if self.cache.swap is not None:
            self.cache.swap.close()
        self.model.close()

    def stats(self) -> EngineStats:
        num_outstanding = sum(map(num_outstanding_tokens, self._sequences.values()))
        found = stats_of(
            self.config, self.executor, self.scheduler, self.totals, self.times, num_outstanding
        )
        return found if self.adapters is None else with_adapters(found, self.adapters.rank_bytes)

    def check(self) -> None:
        """Assert the invariants of blocks and sequences. Cheap enough for idle time and tests."""
        leaving = self.scheduler.leaving
        self.pool.check([s.block_table for s in (*self.scheduler.sequences(), *leaving)])
        assert self._in_flight is not None or not leaving, "ended sequences keep blocks"
        assert not self.pool.num_lent, "blocks are still lent after their step"
        if self.cache.states is not None:
            self.cache.states.check([*self.scheduler.running, *leaving])
        for seq in self.scheduler.waiting:
            assert not seq.block_table, "a waiting sequence owns blocks"
        assert len(self._sequences) == len(list(self.scheduler.sequences()))

    def _launch(self, plan: Plan, before: StepInFlight | None = None) -> StepInFlight:
        step = self.executor.launch(plan, before)
        self.times.end_launch(step.output.model_s, step.output.sample_s)
        if self.model.routed is not None:
            self.model.routed.observe_step(step.output.model_s, plan.num_tokens)
        return step

    def _mark_launched(self, step: StepInFlight) -> None:
        """Count the tokens of a launched step as computed: the next one is scheduled after them."""
        for chunk in step.plan.chunks:
            seq, samples = chunk.seq, chunk.seq in step.row_of
            self.totals.count_chunk(chunk, samples)
            seq.mark_launched(chunk.length, chunk.num_deferred, samples)
            if self.cache.states is not None:
                self.cache.states.mark_launched(seq)

    def _commit(self, step: StepInFlight) -> list[Delta]:
        """Read a step, and record what it computed: full blocks, sampled tokens, endings."""
        plan = step.plan
        try:
            with self.times.phase("wait"):
                result = step.read()
        except Exception:
            log.exception("a step of %d sequences was lost; ending them", len(plan.chunks))
            return [delta for chunk in plan.chunks for delta in self._lose(chunk.seq)]
        seconds = self.totals.observe(step)
        if self.scheduler.drafting is not None:
            self.scheduler.drafting.observe_step(plan, seconds)
        self._renew_costs()
        with self.times.phase("deliver"):
            return self._record(step, result)

    def _renew_costs(self) -> None:
        """Have commit or recompute decided by what steps took, once enough of them have run."""
        deferral, model = self.scheduler.deferral, self.totals.step_model
        if deferral is not None and model.num_steps % RENEWAL_STEPS == 0:
            learnt = model.coefficients()
            deferral.renew(learnt["cached_token"], learnt["prompt_token"])

    def _record(self, step: StepInFlight, result: StepResult) -> list[Delta]:
        deltas = []
        for i, chunk in enumerate(step.plan.chunks):
            seq, row = chunk.seq, step.row_of.get(chunk.seq)
            self.scheduler.mark_read(seq)
            if seq.state is not SequenceState.RUNNING:  # it has ended or was aborted since
                self.totals.num_discarded_tokens += row is not None
                continue
            if i in result.prompt_logprobs:
                # After a preemption the prompt is computed again, and some are known already.
                num_known = len(seq.prompt_logprobs) - chunk.start
                seq.prompt_logprobs += result.prompt_logprobs[i][num_known:]
            tokens = [] if row is None else result.sampled[row : row + 1 + len(chunk.drafts)]
            if tokens and tokens[0].token_id < 0:
                deltas.append(self._fail_row(seq))
                continue
            self.cache.commit(seq, chunk.start + chunk.length - chunk.num_deferred)
            if i in result.pooled:
                seq.pool(result.pooled[i])
            if seq.request.embeds and chunk.samples:
                deltas.append(self._embedded(seq))
            if tokens:
                deltas += self._append(seq, chunk, tokens)
        return deltas

    def _append(self, seq: Sequence, chunk: Chunk, tokens: list[Sampled]) -> list[Delta]:
        """Record the sampled token, and those that were sampled after drafts which agree with what
        was sampled in their place. `tokens`: of the chunk, then of its drafts."""
        num_accepted = 0
        for draft, token in zip(chunk.drafts, tokens):
            if token.token_id != draft:
                break
            num_accepted += 1
        if chunk.draft is not None and self.scheduler.drafting is not None:
            self.scheduler.drafting.verified(chunk, num_accepted)
        deltas = [seq.append(tokens[0].token_id, tokens[0].logprob)]
        for token in tokens[1 : num_accepted + 1]:
            if deltas[-1].finish_reason is not None:
                break
            seq.mark_accepted()
            if token.token_id < 0:
                return [*deltas, self._fail_row(seq)]
            self.cache.commit(seq, seq.num_computed_tokens)
            deltas.append(seq.append(token.token_id, token.logprob))
        self.totals.num_generated_tokens += len(deltas)
        reason = deltas[-1].finish_reason
        if reason is not None:
            self._finish(seq, reason)
        elif chunk.draft is not None:
            self.cache.give_back(seq, seq.num_computed_tokens)
        return deltas

    def _lose(self, seq: Sequence) -> list[Delta]:
        """A step that computed tokens of `seq` could not be read."""
        self.scheduler.mark_read(seq)
        is_here = seq.state is SequenceState.RUNNING
        return [self._fail(seq, "internal_error")] if is_here else []

    def _run_each_alone(self, plan: Plan) -> list[Delta]:
        """After a failed step: a sequence that fails again ends with an error, the others go on.

        The failed step left no record, and writing the same K and V twice is harmless.
        """
        deltas = []
        for chunk in plan.chunks:
            if chunk.seq.state is not SequenceState.RUNNING:  # the step before was its last
                continue
            if chunk.draft is not None:
                self.cache.give_back(chunk.seq, chunk.start + chunk.length)
            alone = Plan()
            alone.add(replace(chunk, draft=None))
            try:
                launched = self._launch(alone)
                launched.read()
            except StoreUnavailable:  # its client has logged it
                deltas.append(self._fail(chunk.seq, STORE_UNAVAILABLE))
            except Exception:
                log.exception("request %s failed alone; ending it", chunk.seq.request.request_id)
                deltas.append(self._fail(chunk.seq, "internal_error"))
            else:
                self._mark_launched(launched)
                deltas += self._commit(launched)
        return deltas

    def _drop_expired(self) -> list[Delta]:
        """End waiting requests whose deadline has passed, before they cost a step."""
        deltas = []
        for seq in self.scheduler.expired(time.monotonic()):
            self._finish(seq, FinishReason.ERROR)
            delta = Delta(seq.request.request_id, [], FinishReason.ERROR, error="deadline_exceeded")
            deltas.append(delta)
        return deltas

    def _fail(self, seq: Sequence, code: str) -> Delta:
        self.cache.forget(seq)
        self.totals.num_corrupted += code == "numerical_error"
        self._finish(seq, FinishReason.ERROR)
        return Delta(seq.request.request_id, [], FinishReason.ERROR, error=code)

    def _fail_row(self, seq: Sequence) -> Delta:
        """No token could be sampled: the logits were not finite, or the grammar failed."""
        matcher = seq.matcher
        if matcher is None or not matcher.has_failed:
            return self._fail(seq, "numerical_error")
        delta = self._fail(seq, "invalid_value")
        delta.error_param = matcher.param
        delta.error_message = f"{matcher.param} became too complex in the course of the answer"
        return delta

    def _embedded(self, seq: Sequence) -> Delta:
        """All of the prompt of `seq` is computed, and it asks for nothing else."""
        if seq.pooled is None or not np.isfinite(seq.pooled).all():
            return self._fail(seq, "numerical_error")
        if self.pooling.score_vector is not None:
            seq.pooled = np.array([seq.pooled @ self.pooling.score_vector])
        delta = seq.embedded()
        self._finish(seq, FinishReason.STOP)
        return delta

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        del self._sequences[seq.request.request_id]
        self.scheduler.remove(seq)
        self.totals.num_finished[reason.value] += 1
