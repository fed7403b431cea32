"""A plan's batch goes to the device and through the model, and logits become token ids.

Knows nothing of who waits or which block is free: a plan's blocks are already in its sequences'
tables.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.workers.batch import HostBatch, host_batch
from penstock.workers.decode_graphs import Capture, DecodeGraphs, GraphSizes
from penstock.workers.experts.modes import Span, StepRows
from penstock.workers.logits import LogprobRows
from penstock.workers.memory import KvLayer
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.layers import AttentionInputs
from penstock.workers.replay import DecodeReplay
from penstock.workers.request import TokenLogprob
from penstock.workers.sampler import RowSampling, Sampled, SampledRows, sample, uniform_at
from penstock.workers.scheduler import Chunk, Plan
from penstock.workers.sequence import Sequence
from penstock.workers.step_times import StepTimes
from penstock.workers.transfer import Mark, to_device
from penstock.workers.workspace import StepMemory, Workspace

GREEDY_BELOW = 1e-5  # smaller temperatures overflow 1/T, and mean greedy anyway


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a plan gave: a token for each chunk that samples, in the order of `plan.chunks`.

    `prompt_logprobs`: by index of the chunk, those of the prompt tokens that follow its tokens.
    """

    sampled: list[Sampled]
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of a step whose prompt tokens' successors are to be scored."""

    chunk: int  # its index in the plan
    first_row: int
    following: tuple[int, ...]  # the prompt token behind each row's own
    num_top: int

    @classmethod
    def of(cls, index: int, chunk: Chunk, first_row: int) -> PromptRows:
        request, end = chunk.seq.request, chunk.start + chunk.length
        following = request.prompt_ids[chunk.start + 1 : end + 1]
        return cls(index, first_row, following, request.params.prompt_logprobs or 0)


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A step as the host gives it to the device."""

    batch: HostBatch
    last_rows: list[int]  # of the batch, that are sampled from
    row_of: dict[Sequence, int]  # their sequences, numbered
    rows: list[RowSampling]
    prompts: list[PromptRows]
    chunks: list[Chunk]

    @property
    def moe_spans(self) -> list[Span]:
        return [(c.seq.moe_mode, c.seq.num_prompt_tokens, c.start, c.length) for c in self.chunks]

    @property
    def samples_all(self) -> bool:
        """Whether all rows are sampled from, and nothing else is asked of them."""
        return not self.prompts and len(self.rows) == len(self.batch.token_ids)


class Launched:
    """A step that the device has been given. What it sampled is read once, by `read`."""

    def __init__(
        self,
        plan: Plan,
        row_of: dict[Sequence, int],
        sampled: SampledRows | None,
        prompt_logprobs: dict[int, list[LogprobRows]],
        mark: Mark,
        began_s: float,
    ):
        self.plan = plan
        self.row_of = row_of  # of the sequences that sample: their row of `sampled`
        self.sampled = sampled
        self.began_s = began_s
        self.done_s = time.perf_counter()  # or later, if the host did not wait
        self._prompt_logprobs = prompt_logprobs
        self._mark = mark
        self._result: StepResult | None = None

    def read(self) -> StepResult:
        """Wait until the device is done, and say what came out."""
        if self._result is None:
            self._mark.wait()
            if self._mark.is_waited_for:
                self.done_s = time.perf_counter()
            prompts = {
                i: [each for rows in parts for each in rows.listed()]
                for i, parts in self._prompt_logprobs.items()
            }
            sampled = [] if self.sampled is None else self.sampled.listed()
            self._result = StepResult(sampled, prompts)
        return self._result


class Executor:
    """Runs plans of one model over one set of KV views."""

    def __init__(
        self,
        model: Decoder,
        kv_layers: Seq[KvLayer],
        block_size: int,
        memory: StepMemory,
        replay: DecodeReplay | None = None,
    ):
        self.model = model
        self.memory = memory
        self.kv_layers = kv_layers
        self.block_size = block_size
        self.graphs: DecodeGraphs | None = None
        self.replay = replay  # of decode steps, on a CPU
        self.times = StepTimes()

    @torch.inference_mode()
    def launch(self, plan: Plan, before: Launched | None = None) -> Launched:
        """Compute K and V of all tokens of the plan, and sample where a chunk reaches the end.

        Where the host has not read yet what the step `before` sampled, its ids go from there to
        here on the device. On a GPU this returns before anything is computed.
        """
        began_s = time.perf_counter()
        step = self.prepare(plan, before)
        with self.memory.lease(plan.num_tokens) as workspace:
            sampled, prompt_logprobs = self.compute(step, before, workspace)
        return Launched(
            plan, step.row_of, sampled, prompt_logprobs, Mark(self.model.device), began_s
        )

    def prepare(self, plan: Plan, before: Launched | None) -> Prepared:
        """What the host adds to a plan. Nothing that it changes later is of effect."""
        batch = host_batch(plan, self.block_size, {} if before is None else before.row_of)
        first = 0
        last_rows, sampling, prompts = [], [], []
        for i, chunk in enumerate(plan.chunks):
            if _reports_prompt(chunk.seq):
                prompts.append(PromptRows.of(i, chunk, first))
            first += chunk.length
            if chunk.samples:
                last_rows.append(first - 1)
                sampling.append(chunk.seq)
        row_of = {seq: i for i, seq in enumerate(sampling)}
        rows = [row_sampling(seq) for seq in sampling]
        return Prepared(batch, last_rows, row_of, rows, prompts, plan.chunks)

    def compute(
        self, step: Prepared, before: Launched | None, workspace: Workspace
    ) -> tuple[SampledRows | None, dict[int, list[LogprobRows]]]:
        """Give the device all that `step` takes."""
        batch = step.batch
        if self.graphs is not None and step.samples_all and self.graphs.takes(batch):
            return self._replay(self.graphs, step, before), {}
        token_ids, positions = self._put(batch.token_ids), self._put(batch.positions)
        inputs = batch.inputs(self._put)
        self._feed(token_ids, batch, before)
        self.times.lap("copy")
        moe_rows = None
        if self.model.routed is not None:
            moe_rows = StepRows.of(step.moe_spans, self.model.device)
        hidden = self._hidden(token_ids, positions, inputs, workspace, moe_rows)
        self.times.lap("model")
        if moe_rows is not None and self.model.routed is not None:
            self.model.routed.count_neurons(*_count_neurons(step.chunks, moe_rows))
        prompt_logprobs = {each.chunk: self._prompt_logprobs(each, hidden) for each in step.prompts}
        self.times.lap("sample")
        if not step.rows:
            return None, prompt_logprobs
        if len(step.rows) < hidden.shape[0]:
            # The residual stream has had its day.
            out = workspace.residual[: len(step.rows)]
            last_rows = self._put(np.array(step.last_rows))
            hidden = torch.index_select(hidden, 0, last_rows, out=out)
        logits = self._logits(hidden)
        self.times.lap("model")
        sampled = sample(logits, step.rows)
        self.times.lap("sample")
        return sampled, prompt_logprobs

    def _replay(self, graphs: DecodeGraphs, step: Prepared, before: Launched | None) -> SampledRows:
        """The same for decode rows, in one launch."""
        replay = graphs.fill(step.batch)
        self._feed(graphs.token_ids, step.batch, before)
        self.times.lap("copy")
        replay()
        self.times.lap("model")
        sampled = sample(self.memory.logits[: len(step.rows)], step.rows)
        self.times.lap("sample")
        return sampled

    @torch.inference_mode()
    def capture(self, sizes: GraphSizes, capture: Capture, memory: Tensor) -> DecodeGraphs:
        """Graphs of decode steps that read their inputs in `memory`."""

        def run(token_ids: Tensor, positions: Tensor, inputs: AttentionInputs) -> None:
            assert not self.memory.blocks_for(len(token_ids)), "its activations would move"
            with self.memory.lease(len(token_ids)) as workspace:
                self._logits(
                    self.model.forward(token_ids, positions, inputs, self.kv_layers, workspace)
                )

        return DecodeGraphs(sizes, run, capture, memory)

    def _hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        inputs: AttentionInputs,
        workspace: Workspace,
        moe_rows: StepRows | None = None,
    ) -> Tensor:
        """`Decoder.forward`, which a step of decode rows need not walk through again."""
        self.model.begin(token_ids, positions, inputs, workspace, moe_rows)
        if self.replay is None or not self.replay.suits(inputs):
            return self.model.run_layers(inputs, self.kv_layers, workspace)
        self.replay.run_layers(inputs, workspace)
        return workspace.normed

    @torch.inference_mode()
    def run_rows(self, num_rows: int) -> None:
        """Compute so many decode rows over block 0, and wait for them: only the time is of use.

        Leaves garbage in block 0. Before any sequence is there.
        """
        nothing = torch.zeros(num_rows, dtype=torch.int64, device=self.model.device)
        one = torch.ones(num_rows, dtype=torch.int32, device=self.model.device)
        inputs = AttentionInputs(
            slots=nothing,
            num_decode=num_rows,
            decode_tables=torch.zeros_like(one)[:, None],
            decode_lens=one,
            max_decode_len=1,
            prefill_tables=one[:0, None],
            prefill_starts=one[:1] - 1,
            prefill_lens=one[:0],
            max_prefill_chunk=0,
            max_prefill_len=0,
        )
        with self.memory.lease(num_rows) as workspace:
            hidden = self._hidden(nothing, nothing, inputs, workspace)
            self._logits(hidden[: self.memory.logits.shape[0]]).sum().item()

    def _prompt_logprobs(self, prompt: PromptRows, hidden: Tensor) -> list[LogprobRows]:
        """`hidden` [T, hidden] of the whole step."""
        found = []
        most = self.memory.logits.shape[0]
        for i in range(0, len(prompt.following), most):
            ids = self._put(np.array(prompt.following[i : i + most]))
            first = prompt.first_row + i
            logits = self._logits(hidden[first : first + len(ids)])
            found.append(LogprobRows.of(logits, ids, prompt.num_top).to_host())
        return found

    def _logits(self, hidden: Tensor) -> Tensor:
        """fp32 [rows, vocab], in the reserve: good until the next call."""
        num_rows = hidden.shape[0]
        return self.model.logits(
            hidden, self.memory.logits[:num_rows], self.memory.narrow[:num_rows]
        )

    def _feed(self, token_ids: Tensor, batch: HostBatch, before: Launched | None) -> None:
        """Put what the step before has sampled, and nobody has read, where it is computed next."""
        if not batch.unread.size:
            return
        assert before is not None and before.sampled is not None
        at, rows = self._put(batch.unread)
        # A row that had no token to choose has ended, but that is not known yet.
        token_ids.index_copy_(0, at, before.sampled.ids[rows].clamp_(min=0))

    def _put(self, values: NDArray[np.generic]) -> Tensor:
        return to_device(torch.from_numpy(values), self.model.device)


def _count_neurons(chunks: list[Chunk], rows: StepRows) -> tuple[int, int]:
    """Add to each sequence what was left out of how much; tokens that are computed again count
    once there. The sums of the step."""
    if rows.sparse is None:
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


def _reports_prompt(seq: Sequence) -> bool:
    """Whether the logprobs of the prompt are asked for, and not handed out yet."""
    return seq.request.params.prompt_logprobs is not None and not seq.num_generated_tokens


def row_sampling(seq: Sequence) -> RowSampling:
    """The sampling of the next token of `seq`."""
    params = seq.request.params
    greedy = params.temperature < GREEDY_BELOW
    banned_ids = tuple(seq.stop_ids) if seq.must_go_on else ()
    edit = None if seq.editor is None else partial(seq.editor.edit, token_ids=seq.token_ids)
    if seq.matcher is not None:  # which has the last word, also on what is banned
        if params.ignore_eos:
            banned_ids += seq.matcher.eos_token_ids
        edit = partial(seq.matcher.constrain, edit=edit, forbidden=banned_ids)
        banned_ids = ()
    return RowSampling(
        temperature=0.0 if greedy else params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        uniform=0.0 if greedy else uniform_at(seq.seed, seq.num_generated_tokens),
        banned_ids=banned_ids,
        edit=edit,
        num_logprobs=params.logprobs,
    )
