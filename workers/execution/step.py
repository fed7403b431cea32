"""A step prepared on the host, and its result once the device is done.

Plain records; a plan says which rows are sampled from, and the requests' parameters say how.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.workers.adapters.packed import Adapter
from penstock.workers.execution.batch import host_batch
from penstock.workers.experts.modes import Span, StepRows
from penstock.workers.models.host_batch import HostBatch
from penstock.workers.request import TokenLogprob
from penstock.workers.sampling.device_copy import Mark
from penstock.workers.sampling.logits import LogprobRows
from penstock.workers.sampling.sampler import RowSampling, Sampled, SampledRows, uniform_at
from penstock.workers.scheduling.plan import Chunk, Plan
from penstock.workers.scheduling.sequence import Sequence

GREEDY_BELOW = 1e-5  # smaller temperatures overflow 1/T, and are greedy in effect


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a plan: a token for each chunk that samples, in the order of `plan.chunks`, and
    after it one for each of the chunk's drafts.

    `prompt_logprobs`: by index of the chunk, those of the prompt tokens that follow its tokens.
    `pooled`: by index of the chunk, fp64 [hidden], the sum of the hidden states that it adds.
    """

    sampled: list[Sampled]
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    pooled: dict[int, NDArray[np.float64]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of a step that give logprobs of prompt tokens: each scores the token that follows."""

    chunk: int  # its index in the plan
    first_row: int
    following: tuple[int, ...]  # the prompt token after each row's own
    num_top: int
    request_id: str = ""
    start: int = 0  # position in the prompt of the first row's token

    @classmethod
    def of(cls, index: int, chunk: Chunk, first_row: int) -> PromptRows:
        request, end = chunk.seq.request, chunk.start + chunk.length
        following = request.prompt_ids[chunk.start + 1 : end + 1]
        num_top = request.params.prompt_logprobs or 0
        return cls(index, first_row, following, num_top, request.request_id, chunk.start)


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogits:
    """What the model says of prompt tokens [start + 1, start + 1 + R) of one request.

    `hidden` [R, hidden] in the model's dtype and `logits` fp32 [R, vocab] are memory of the step:
    a function that keeps them copies them. A preempted prompt is computed, and seen, once more.
    """

    request_id: str
    start: int
    following: Tensor  # int64 [R], those tokens
    hidden: Tensor
    logits: Tensor


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Rows of a step whose hidden states are part of an embedding."""

    chunk: int  # its index in the plan
    first_row: int
    num_rows: int

    @classmethod
    def of(cls, index: int, chunk: Chunk, first_row: int) -> PooledRows:
        """Those of `chunk`, whose first row is `first_row`: the last row of a prompt, or with mean
        pooling all that were not pooled before a preemption. There may be none."""
        seq, end = chunk.seq, chunk.start + chunk.length
        begin = max(chunk.start, seq.num_pooled_tokens)
        if seq.pooling == "last":
            begin = end - chunk.samples
        return cls(index, first_row + begin - chunk.start, max(0, end - begin))


@dataclass(frozen=True, slots=True, eq=False)
class PreparedStep:
    """A step on the host, ready to be copied to the device."""

    batch: HostBatch
    last_rows: list[int]  # rows of the batch that are sampled from
    row_of: dict[Sequence, int]  # sequence -> its first index in last_rows
    rows: list[RowSampling]
    prompts: list[PromptRows]
    chunks: list[Chunk]
    pooled: list[PooledRows] = field(default_factory=list)
    adapted: list[tuple[Adapter, int, int]] = field(default_factory=list)  # first and end of rows

    @property
    def moe_spans(self) -> list[Span]:
        return [(c.seq.moe_mode, c.seq.num_prompt_tokens, c.start, c.num_rows) for c in self.chunks]

    @property
    def samples_all(self) -> bool:
        """Whether all rows are sampled from, and no prompt logprobs are wanted."""
        return not self.prompts and len(self.rows) == len(self.batch.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What a launch gives: tensors that may still be on their way, and host time by phase.

    `prompt_logprobs`, and `pooled` fp64 [hidden]: by index of the chunk.
    """

    sampled: SampledRows | None  # None: no chunk samples
    prompt_logprobs: dict[int, list[LogprobRows]]
    model_s: float  # to launch the forward pass; on a CPU, to compute it
    sample_s: float  # the same for sampling and logprobs
    pooled: dict[int, Tensor] = field(default_factory=dict)


class StepInFlight:
    """A launched step. `read` waits for the device and returns what it sampled."""

    def __init__(
        self,
        plan: Plan,
        row_of: dict[Sequence, int],
        output: StepOutput,
        mark: Mark,
        began_s: float,
    ):
        self.plan = plan
        self.row_of = row_of  # sequence that samples -> its first row of `output.sampled`
        self.output = output
        self.began_s = began_s
        self.done_s = time.perf_counter()  # replaced by `read` where the device runs on
        self._mark = mark
        self._result: StepResult | None = None

    def read(self) -> StepResult:
        """Wait until the device is done, and return the result; later calls return the same."""
        if self._result is None:
            self._mark.wait()
            if self._mark.is_waited_for:
                self.done_s = time.perf_counter()
            prompts = {
                i: [each for part in parts for each in part.listed()]
                for i, parts in self.output.prompt_logprobs.items()
            }
            rows = self.output.sampled
            sampled = [] if rows is None else rows.listed()
            pooled = {i: each.numpy() for i, each in self.output.pooled.items()}
            self._result = StepResult(sampled, prompts, pooled)
        return self._result


def prepare(plan: Plan, before: StepInFlight | None, block_size: int) -> PreparedStep:
    """The step of `plan`. Later changes to the plan's sequences do not affect it."""
    batch = host_batch(plan, block_size, {} if before is None else before.row_of)
    first = 0
    last_rows: list[int] = []
    rows: list[RowSampling] = []
    row_of: dict[Sequence, int] = {}
    prompts, pooled, adapted = [], [], []
    for i, chunk in enumerate(plan.chunks):
        if _reports_prompt(chunk.seq):
            prompts.append(PromptRows.of(i, chunk, first))
        embeds = chunk.seq.request.embeds
        if embeds and (rows_of := PooledRows.of(i, chunk, first)).num_rows:
            pooled.append(rows_of)
        if chunk.samples and not embeds:
            row_of[chunk.seq] = len(rows)
            last_rows += range(first + chunk.length - 1, first + chunk.num_rows)
            rows += [row_sampling(chunk.seq, chunk.drafts[:n]) for n in range(chunk.num_samples)]
        if chunk.seq.adapter is not None:
            adapted.append((chunk.seq.adapter, first, first + chunk.num_rows))
        first += chunk.num_rows
    return PreparedStep(batch, last_rows, row_of, rows, prompts, plan.chunks, pooled, adapted)


def _reports_prompt(seq: Sequence) -> bool:
    """Whether logprobs of the prompt were requested and have not been sent yet."""
    return seq.request.params.prompt_logprobs is not None and not seq.num_generated_tokens


def row_sampling(
    seq: Sequence, drafts: tuple[int, ...] = (), *, is_draft: bool = False
) -> RowSampling:
    """How the next token of `seq` is sampled; that after `drafts`, if they come next.

    `is_draft`: it only becomes a draft, and its probability is reported. The grammar is left alone,
    as its matcher takes its time, and cuts drafts that it forbids in one go.
    """
    params = seq.request.params
    greedy = params.temperature < GREEDY_BELOW
    index = seq.num_generated_tokens + len(drafts)
    banned_ids = tuple(seq.stop_ids) if index < params.min_tokens else ()
    edit = None
    if seq.editor is not None:
        edit = partial(seq.editor.edit, token_ids=seq.token_ids, drafts=drafts)
    if seq.matcher is not None and not is_draft:  # the grammar decides last, also about banned ids
        if params.ignore_eos:
            banned_ids += seq.matcher.eos_token_ids
        edit = partial(seq.matcher.constrain, edit=edit, forbidden=banned_ids, drafts=drafts)
        banned_ids = ()
    return RowSampling(
        temperature=0.0 if greedy else params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        uniform=0.0 if greedy else uniform_at(seq.seed, index),
        banned_ids=banned_ids,
        edit=edit,
        num_logprobs=0 if is_draft else params.logprobs,
    )


def count_neurons(chunks: list[Chunk], rows: StepRows) -> tuple[int, int]:
    """Count neurons, and those that were skipped, for each sequence; returns both sums of the step.

    A token that is computed again counts once for its sequence, and each time in the sums.
    """
    if not rows.leaves_out:
        return 0, 0
    neurons, skipped = rows.num_neurons.cpu().numpy(), rows.num_skipped.cpu().numpy()
    first = 0
    for chunk in chunks:
        seq, end = chunk.seq, chunk.start + chunk.length
        new = slice(first + max(0, seq.num_counted_tokens - chunk.start), first + chunk.length)
        seq.num_neurons += int(neurons[new].sum())
        seq.num_skipped_neurons += int(skipped[new].sum())
        seq.num_counted_tokens = max(seq.num_counted_tokens, end)
        first += chunk.length
    return int(neurons.sum()), int(skipped.sum())
