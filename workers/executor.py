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
from penstock.workers.logits import LogprobRows
from penstock.workers.memory import KvLayer
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.layers import AttentionInputs
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
    ):
        self.model = model
        self.memory = memory
        self.kv_layers = kv_layers
        self.block_size = block_size
        self.times = StepTimes()

    @torch.inference_mode()
    def launch(self, plan: Plan, before: Launched | None = None) -> Launched:
        """Compute K and V of all tokens of the plan, and sample where a chunk reaches the end.

        Where the host has not read yet what the step `before` sampled, its ids go from there to
        here on the device. On a GPU this returns before anything is computed.
        """
        began_s = time.perf_counter()
        with self.memory.lease(plan.num_tokens) as workspace:
            sampled, prompt_logprobs = self._launch(plan, before, workspace)
        sampling = [chunk.seq for chunk in plan.chunks if chunk.samples]
        row_of = {seq: i for i, seq in enumerate(sampling)}
        mark = Mark(self.model.device)
        return Launched(plan, row_of, sampled, prompt_logprobs, mark, began_s)

    def _launch(
        self, plan: Plan, before: Launched | None, workspace: Workspace
    ) -> tuple[SampledRows | None, dict[int, list[LogprobRows]]]:
        chunks = plan.chunks
        batch = host_batch(plan, self.block_size, {} if before is None else before.row_of)
        token_ids, positions = self._put(batch.token_ids), self._put(batch.positions)
        inputs = batch.inputs(self._put)
        self._feed(token_ids, batch, before)
        self.times.lap("copy")
        hidden = self.model.forward(token_ids, positions, inputs, self.kv_layers, workspace)
        self.times.lap("model")
        ends = np.cumsum([chunk.length for chunk in chunks])
        prompt_logprobs = {
            i: self._prompt_logprobs(chunk, hidden[int(end) - chunk.length : int(end)])
            for i, (chunk, end) in enumerate(zip(chunks, ends))
            if _reports_prompt(chunk.seq)
        }
        self.times.lap("sample")
        last_rows = [int(end) - 1 for end, chunk in zip(ends, chunks) if chunk.samples]
        if not last_rows:
            return None, prompt_logprobs
        if len(last_rows) < hidden.shape[0]:
            indices = self._put(np.array(last_rows))
            # The residual stream has had its day.
            hidden = torch.index_select(
                hidden, 0, indices, out=workspace.residual[: len(last_rows)]
            )
        rows = [row_sampling(chunk.seq) for chunk in chunks if chunk.samples]
        logits = self._logits(hidden)
        self.times.lap("model")
        sampled = sample(logits, rows)
        self.times.lap("sample")
        return sampled, prompt_logprobs

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
            hidden = self.model.forward(nothing, nothing, inputs, self.kv_layers, workspace)
            self._logits(hidden[: self.memory.logits.shape[0]]).sum().item()

    def _prompt_logprobs(self, chunk: Chunk, hidden: Tensor) -> list[LogprobRows]:
        """Of the prompt tokens that follow the tokens of `chunk`, `hidden` [chunk, hidden]."""
        seq = chunk.seq
        num_top = seq.request.params.prompt_logprobs or 0
        following = seq.request.prompt_ids[chunk.start + 1 : chunk.start + chunk.length + 1]
        found = []
        most = self.memory.logits.shape[0]
        for i in range(0, len(following), most):
            ids = self._put(np.array(following[i : i + most]))
            logits = self._logits(hidden[i : i + len(ids)])
            found.append(LogprobRows.of(logits, ids, num_top).to_host())
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
