"""A plan's batch goes to the device and through the model, and logits become token ids.

Knows nothing of who waits or which block is free: a plan's blocks are already in its sequences'
tables.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.types import PagedKv
from penstock.workers.device_copy import Mark, to_device
from penstock.workers.execution.batch import HostBatch
from penstock.workers.execution.cpu_replay import DecodeReplay
from penstock.workers.execution.cuda_graphs import Capture, DecodeGraphs, GraphSizes
from penstock.workers.execution.step import (
    PreparedStep,
    PromptRows,
    StepInFlight,
    count_neurons,
    prepare,
)
from penstock.workers.execution.timing import StepTimes
from penstock.workers.experts.modes import StepRows
from penstock.workers.memory.workspace import StepMemory, Workspace
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.layers import AttentionInputs
from penstock.workers.sampling.logits import LogprobRows
from penstock.workers.sampling.sampler import SampledRows, sample
from penstock.workers.scheduling.plan import Plan


class Executor:
    """Runs plans of one model over one set of KV views."""

    def __init__(
        self,
        model: Decoder,
        kv_layers: Seq[PagedKv],
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
    def launch(self, plan: Plan, before: StepInFlight | None = None) -> StepInFlight:
        """Compute K and V of all tokens of the plan, and sample where a chunk reaches the end.

        Where the host has not read yet what the step `before` sampled, its ids go from there to
        here on the device. On a GPU this returns before anything is computed.
        """
        began_s = time.perf_counter()
        step = prepare(plan, before, self.block_size)
        with self.memory.lease(plan.num_tokens) as workspace:
            sampled, prompt_logprobs = self.compute(step, before, workspace)
        return StepInFlight(
            plan, step.row_of, sampled, prompt_logprobs, Mark(self.model.device), began_s
        )

    def compute(
        self, step: PreparedStep, before: StepInFlight | None, workspace: Workspace
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
            self.model.routed.count_neurons(*count_neurons(step.chunks, moe_rows))
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

    def _replay(
        self, graphs: DecodeGraphs, step: PreparedStep, before: StepInFlight | None
    ) -> SampledRows:
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

    def _feed(self, token_ids: Tensor, batch: HostBatch, before: StepInFlight | None) -> None:
        """Put what the step before has sampled, and nobody has read, where it is computed next."""
        if not batch.unread.size:
            return
        assert before is not None and before.sampled is not None
        at, rows = self._put(batch.unread)
        # A row that had no token to choose has ended, but that is not known yet.
        token_ids.index_copy_(0, at, before.sampled.ids[rows].clamp_(min=0))

    def _put(self, values: NDArray[np.generic]) -> Tensor:
        return to_device(torch.from_numpy(values), self.model.device)
