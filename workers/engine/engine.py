"""The one loop: add, abort, step.

Plain and synchronous: no Ray, no threads, no text. A request that cannot be served is refused by
`add`; one that fails in a step ends alone, and the others go on.
"""

from __future__ import annotations

import logging
import random
import time

import torch

from penstock.workers.config import EngineConfig
from penstock.workers.context_policy import ContextSettings, unsupported_reason
from penstock.workers.engine.build import build_parts
from penstock.workers.engine.counters import Totals, stats_of
from penstock.workers.engine.validation import RequestValidator
from penstock.workers.execution.cuda_graphs import Capture
from penstock.workers.execution.step import StepInFlight
from penstock.workers.models.decoder import Decoder
from penstock.workers.request import Delta, FinishReason, Request, RequestError
from penstock.workers.scheduling.deferral import Rule
from penstock.workers.scheduling.plan import Plan
from penstock.workers.scheduling.sequence import Sequence, SequenceState
from penstock.workers.stats import EngineStats
from penstock.workers.structured.grammar import GrammarMatcher

log = logging.getLogger("penstock.engine")

DECLINED = "declined"  # a code that no client sees: the request is sent elsewhere
LOAD_WAIT_S = 0.01  # with nothing else to do; then the inbox is looked at again


class Engine:
    """Continuous batching of one model on one device."""

    def __init__(
        self,
        config: EngineConfig,
        model: Decoder,
        commit_rule: Rule | None = None,
        capture: Capture | None = None,
    ):
        """`commit_rule` decides on deferred commit; None: by the ridge, which is measured.

        `capture` makes the decode graphs; None: CUDA does, where the configuration wants it.
        """
        parts = build_parts(config, model, commit_rule, capture)
        self.config = config
        self.model = model
        self.memory, self.cache, self.scheduler = parts.memory, parts.cache, parts.scheduler
        self.arena, self.pool = parts.memory.arena, parts.memory.pool
        self.executor, self.max_model_len = parts.executor, parts.max_model_len
        self.totals = Totals(rates=parts.rates)
        self.times = self.executor.times
        self.async_scheduling = wants_async_scheduling(
            config, model.device, model.routed is not None
        )
        self._in_flight: StepInFlight | None = None  # the last step, not read yet
        contexts = ContextSettings.of(config, self.max_model_len, unsupported_reason(model.config))
        moe_mode = "exact" if model.routed is None else config.moe_mode
        self.validator = RequestValidator(
            model.config.vocab_size, contexts, self.pool.num_blocks, moe_mode
        )
        self._sequences: dict[str, Sequence] = {}
        self._num_added = 0
        self._random = random.Random(config.seed)

    def add(self, request: Request, matcher: GrammarMatcher | None = None) -> None:
        """Queue a request. Raises RequestError if it can never be served, or the queue is full.

        `matcher`: of its `structured`, behind its emitted ids. GrammarCompiler makes them, which
        takes too long for the thread of the engine.
        """
        if request.request_id in self._sequences:
            raise RequestError("this request id is already running", code="internal_error")
        max_total = self.validator.check(request, matcher)
        context = self.validator.context(request)
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
            moe_mode=self.validator.mode(request),
        )
        self._num_added += 1
        self._sequences[request.request_id] = seq
        self.scheduler.add(seq)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks, now or when the step in flight that names them is
        done. False if it is not (or no longer) here."""
        seq = self._sequences.pop(request_id, None)
        if seq is None:
            return False
        self.scheduler.remove(seq)
        self.totals.num_finished[FinishReason.ABORT.value] += 1
        return True

    def has_work(self) -> bool:
        return bool(self._sequences) or self._in_flight is not None

    def step(self) -> list[Delta]:
        """Launch one batch, and read the one before or, where need be, this one, too; what was
        read, finished requests included.

        The order without `async_scheduling` is launch n, read n; with it, launch n + 1, read n.
        """
        self.times.begin()
        deltas = self._drop_expired()
        plan = self.scheduler.schedule()
        self.times.lap("schedule")
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
            launched = self.executor.launch(plan, before)
            if not self.async_scheduling:
                launched.read()
        except Exception:
            log.exception("a step of %d sequences failed; trying each alone", len(plan.chunks))
            if before is not None:
                deltas += self._commit(before)
            return deltas + self._run_each_alone(plan)
        self._mark_launched(launched)
        if before is not None:
            deltas += self._commit(before)
        if self.async_scheduling and self.scheduler.may_run_ahead():
            self._in_flight = launched
        else:
            deltas += self._commit(launched)
        return deltas

    def close(self) -> None:
        """End what runs beside the engine."""
        if self.cache.swap is not None:
            self.cache.swap.close()
        if self.model.routed is not None:
            self.model.routed.close()

    def stats(self) -> EngineStats:
        num_outstanding = sum(map(_outstanding, self._sequences.values()))
        return stats_of(self.config, self.executor, self.scheduler, self.totals, num_outstanding)

    def check(self) -> None:
        """Assert that the block ledger is whole. Cheap enough for idle time and for tests."""
        leaving = self.scheduler.leaving
        self.pool.check([s.block_table for s in (*self.scheduler.sequences(), *leaving)])
        assert self._in_flight is not None or not leaving, "nothing in flight holds their blocks"
        assert not self.pool.num_lent, "a loan has outlived its step"
        for seq in self.scheduler.waiting:
            assert not seq.block_table, "a waiting sequence owns blocks"
        assert len(self._sequences) == len(list(self.scheduler.sequences()))

    def _mark_launched(self, launched: StepInFlight) -> None:
        """Take a step as done that has been launched: the next one is chosen behind it."""
        for chunk in launched.plan.chunks:
            seq, samples = chunk.seq, chunk.seq in launched.row_of
            self.totals.count_chunk(chunk, samples)
            seq.mark_launched(chunk.length, chunk.num_deferred, samples)

    def _commit(self, launched: StepInFlight) -> list[Delta]:
        """Read a step, and record what it computed: full blocks, sampled tokens, endings."""
        plan, deltas = launched.plan, []
        try:
            result = launched.read()
        except Exception:
            log.exception("a step of %d sequences was lost; ending them", len(plan.chunks))
            return [delta for chunk in plan.chunks for delta in self._lose(chunk.seq)]
        self.times.lap("wait")
        self.totals.observe(launched)
        for i, chunk in enumerate(plan.chunks):
            seq, row = chunk.seq, launched.row_of.get(chunk.seq)
            self.scheduler.mark_read(seq)
            if seq.state is not SequenceState.RUNNING:  # it has ended since, or was aborted
                self.totals.num_discarded_tokens += row is not None
                continue
            if i in result.prompt_logprobs:
                # After a preemption the prompt is computed again, and some are there already.
                num_known = len(seq.prompt_logprobs) - chunk.start
                seq.prompt_logprobs += result.prompt_logprobs[i][num_known:]
            token = None if row is None else result.sampled[row]
            if token is not None and token.token_id < 0:
                deltas.append(self._fail_row(seq))
                continue
            self.cache.commit(seq, chunk.start + chunk.length - chunk.num_deferred)
            if token is not None:
                delta = seq.append(token.token_id, token.logprob)
                self.totals.num_generated_tokens += 1
                deltas.append(delta)
                if delta.finish_reason is not None:
                    self._finish(seq, delta.finish_reason)
        self.times.lap("deliver")
        return deltas

    def _lose(self, seq: Sequence) -> list[Delta]:
        """A step that named `seq` could not be read."""
        self.scheduler.mark_read(seq)
        is_here = seq.state is SequenceState.RUNNING
        return [self._fail(seq, "internal_error")] if is_here else []

    def _run_each_alone(self, plan: Plan) -> list[Delta]:
        """After a failed step: whoever fails again ends with an error, the others go on.

        Nothing was recorded of the failed step, and writing the same K and V twice is harmless.
        """
        deltas = []
        for chunk in plan.chunks:
            if chunk.seq.state is not SequenceState.RUNNING:  # the step before was its last
                continue
            alone = Plan()
            alone.add(chunk)
            try:
                launched = self.executor.launch(alone)
                launched.read()
            except Exception:
                log.exception("request %s failed alone; ending it", chunk.seq.request.request_id)
                deltas.append(self._fail(chunk.seq, "internal_error"))
            else:
                self._mark_launched(launched)
                deltas += self._commit(launched)
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
        self.totals.num_corrupted += code == "numerical_error"
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
        self.totals.num_finished[reason.value] += 1


def _outstanding(seq: Sequence) -> int:
    """Tokens still to come for `seq`, at most; one without end counts as what it sees at once."""
    rest, most = seq.max_total_tokens - seq.num_computed_tokens, seq.context.full_tokens
    return rest if most is None else min(rest, most)


def wants_async_scheduling(
    config: EngineConfig, device: torch.device, is_routed: bool = False
) -> bool:
    """Whether steps are launched before the one before was read, where that can be done.

    Never if it `is_routed`, its experts out of a cache: the host waits for routes in every layer.
    """
    is_on = config.async_scheduling == "on" or (
        config.async_scheduling == "auto" and device.type == "cuda"
    )
    return is_on and not is_routed
