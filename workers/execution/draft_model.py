"""A draft model: proposes tokens of decoding sequences, a step of its own for each.

It runs over the block tables of the sequences, before the step that verifies its drafts. One with
`progress` has K and V of its own in blocks of the same numbers. The other is the model itself in a
smaller format: it reads the model's K and V, and writes those of draft tokens, and of the newest
one, where the step writes the model's before it reads them. QSpec (arXiv 2410.11305) shares a KV
cache in this way.

A draft token is drawn as the model draws the token in its place: same parameters, same random
number. So where both have the same probabilities, the draft is right, sampled or not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch

from penstock.workers.execution.batch import draft_batch, host_batch
from penstock.workers.execution.draft_progress import DraftProgress
from penstock.workers.execution.executor import Executor
from penstock.workers.execution.step import GREEDY_BELOW, PreparedStep, row_sampling
from penstock.workers.sampling.device_copy import Mark
from penstock.workers.sampling.sampler import Sampled
from penstock.workers.scheduling.plan import Chunk, Plan
from penstock.workers.scheduling.sequence import Sequence
from penstock.workers.speculation.draft import Draft, Drafted, DraftSteps, StepSize

NEAR = 8  # tokens before the newest one, whose K and V are computed as rows beside it
CATCH_UP_ROWS = 256  # of a step, in which the draft model computes a longer gap
# A gap is computed where the answer may get at least one token for each 32 tokens of the gap: with
# a draft model a tenth of the size, a prompt token costs about a hundredth of a decode step.
GAP_PER_TOKEN = 32


@dataclass(slots=True)
class _Growing:
    """A draft of one sequence that still grows."""

    chunk: Chunk
    most: int
    num_missing: int  # tokens before the newest one without K and V
    probabilities: list[float] = field(default_factory=list)
    num_computed: int = 0  # tokens from the newest one on
    survival: float = 1.0

    @property
    def is_sampled(self) -> bool:
        return self.chunk.seq.request.params.temperature >= GREEDY_BELOW

    @property
    def draft(self) -> Draft | None:
        if not self.chunk.drafts:
            return None
        drawn = tuple(self.probabilities)
        return Draft(self.chunk.drafts, "draft", probabilities=drawn, is_sampled=self.is_sampled)


class DraftModel:
    """Proposes drafts for several sequences at once. `steps` says how far it goes on."""

    def __init__(self, executor: Executor, steps: DraftSteps, progress: DraftProgress | None):
        """`progress`: of one that has K and V of its own."""
        self.executor = executor
        self.steps = steps
        self.max_rows: int = executor.memory.logits.shape[0]
        self._progress = progress

    @torch.inference_mode()
    def propose(
        self, asked: Seq[tuple[Chunk, int]], step: StepSize, num_keys: int
    ) -> list[Draft | None]:
        """A draft for each chunk, of at most the number of tokens beside it; the sequence has slots
        for these.

        `step`: that of all chunks, without drafts. `num_keys`: that a row of it sees, about.
        """
        growing = [self._begun(chunk, most) for chunk, most in asked]
        live = self._within_rows([each for each in growing if each is not None])
        gain, num_rows, seconds = 0.0, 0, 0.0
        while live:
            live.sort(key=lambda each: -each.survival)
            survivals = tuple(each.survival for each in live)
            state = Drafted(survivals, gain, num_rows, num_keys, seconds)
            live = live[: self.steps.choose(state, step)]
            if not live:
                break
            began_s = time.perf_counter()
            self._extend(live)
            took_s = time.perf_counter() - began_s
            self.steps.observe(len(live), len(live) * num_keys, took_s)
            live = [each for each in live if len(each.probabilities) == each.num_computed]
            gain += sum(each.survival for each in live)
            num_rows, seconds = num_rows + len(live), seconds + took_s
            live = [each for each in live if len(each.probabilities) < each.most]
        for each in growing:
            if each is not None and self._progress is not None:
                self._progress.fed(each.chunk, each.num_computed)
        return [None if each is None else each.draft for each in growing]

    def suits(self, draft: Draft) -> bool:
        """Whether `draft`, which costs nothing, is better than one of this model."""
        return draft.source == "grammar" or self.steps.is_likely(draft.first(1))

    def end(self, seq: Sequence) -> None:
        """`seq` has ended."""
        if self._progress is not None:
            self._progress.end(seq)

    def _begun(self, chunk: Chunk, most: int) -> _Growing | None:
        """None: K and V of earlier tokens are missing, and computed in part now."""
        if self._progress is None:
            return _Growing(chunk, most, 0)
        seq = chunk.seq
        first = self._progress.num_computed(seq, chunk.start)
        num_missing = chunk.start - first
        if num_missing <= NEAR:
            return _Growing(chunk, most, num_missing)
        if seq.max_total_tokens - seq.num_tokens >= num_missing // GAP_PER_TOKEN:
            plan = Plan(prefill=[Chunk(seq, first, min(num_missing, CATCH_UP_ROWS))])
            batch = host_batch(plan, self.executor.block_size, {})
            with self.executor.memory.lease(plan.num_tokens) as workspace:
                step = PreparedStep(batch, [], {}, [], [], plan.chunks)
                self.executor.compute(step, None, workspace)
            self._progress.computed(seq, first + plan.num_tokens)
        return None

    def _within_rows(self, growing: list[_Growing]) -> list[_Growing]:
        """Those whose rows fit into a step of the draft model."""
        kept, num_rows = [], 0
        for each in growing:
            num_rows += 1 + each.num_missing
            if num_rows <= self.max_rows:
                kept.append(each)
        return kept

    def _extend(self, growing: list[_Growing]) -> None:
        """One more token for each, but where it cannot be part of an answer that goes on."""
        chunks = [each.chunk for each in growing]
        num_rows = [1 + each.num_missing for each in growing]
        batch = draft_batch(chunks, num_rows, self.executor.block_size)
        rows = [row_sampling(chunk.seq, chunk.drafts, is_draft=True) for chunk in chunks]
        last_rows = [sum(num_rows[: i + 1]) - 1 for i in range(len(chunks))]
        step = PreparedStep(batch, last_rows, {}, rows, [], chunks)
        with self.executor.memory.lease(sum(num_rows)) as workspace:
            output = self.executor.compute(step, None, workspace)
        assert output.sampled is not None, "all chunks are sampled from"
        Mark(self.executor.model.device).wait()
        for each, found in zip(growing, output.sampled.listed(), strict=True):
            each.num_missing = 0
            each.num_computed += 1
            self._append(each, found)

    def _append(self, each: _Growing, found: Sampled) -> None:
        if found.token_id < 0 or found.token_id in each.chunk.seq.stop_ids:
            return
        assert found.logprob is not None, "drafts ask for it"
        each.probabilities.append(math.exp(found.logprob.logprob))
        token_ids = (*each.chunk.drafts, found.token_id)
        each.chunk = replace(each.chunk, draft=Draft(token_ids))
        draft = each.draft
        assert draft is not None
        each.survival = self.steps.survival(draft)
