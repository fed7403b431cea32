"""Runs a plan: copies its batch to the device, computes the forward pass, samples token ids.

Decides nothing about scheduling or blocks: the plan's blocks are already in its sequences' block
tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.workers.adapters.step import StepAdapters
from penstock.workers.errors import InvariantError
from penstock.workers.execution.batch import measured_batch
from penstock.workers.execution.cpu_replay import DecodeReplay
from penstock.workers.execution.cuda_graphs import Capture, DecodeGraphs, GraphSizes
from penstock.workers.execution.step import (
    PooledRows,
    PreparedStep,
    PromptLogits,
    PromptRows,
    StepInFlight,
    StepOutput,
    count_neurons,
    prepare,
)
from penstock.workers.execution.timing import Clock
from penstock.workers.experts.modes import StepRows, row_modes
from penstock.workers.memory.workspace import StepMemory, Workspace
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.host_batch import HostBatch
from penstock.workers.models.layers import AttentionInputs, LayerCache
from penstock.workers.sampling.device_copy import Mark, to_device, to_host
from penstock.workers.sampling.logits import LogprobRows
from penstock.workers.sampling.sampler import sample
from penstock.workers.scheduling.plan import Plan


class Executor:
    """Runs plans of one model over one set of KV views."""

    def __init__(
        self,
        model: Decoder,
        kv_layers: Seq[LayerCache],
        block_size: int,
        memory: StepMemory,
        replay: DecodeReplay | None = None,
        *,
        samples_fast: bool = True,
    ):
        """`samples_fast`: False: by plain PyTorch, with a sort."""
        self.model = model
        self.samples_fast = samples_fast
        self.memory = memory
        self.kv_layers = kv_layers
        self.block_size = block_size
        self.graphs: DecodeGraphs | None = None
        self.replay = replay  # of batches of decode rows, on a CPU
        self.clock: Clock = time.perf_counter  # of the durations in StepOutput
        # Sees the full logits of prompts whose logprobs are requested: for evaluation.
        self.watch_prompts: Callable[[PromptLogits], object] | None = None

    @torch.inference_mode()
    def launch(self, plan: Plan, before: StepInFlight | None = None) -> StepInFlight:
        """Compute K and V of all tokens of the plan, and sample where a chunk reaches the end.

        `before` is the step before, where the host has not read it: its sampled ids are copied into
        this batch on the device. On a GPU this returns before anything is computed.
        """
        began_s = time.perf_counter()
        step = prepare(plan, before, self.block_size)
        with self.memory.lease(plan.num_tokens) as workspace:
            output = self.compute(step, before, workspace)
        return StepInFlight(plan, step.row_of, output, Mark(self.model.device), began_s)

    def compute(
        self, step: PreparedStep, before: StepInFlight | None, workspace: Workspace
    ) -> StepOutput:
        """Launch the forward pass and the sampling of `step`, and time both."""
        batch, clock = step.batch, self.clock
        adapters = None
        if step.adapted:
            adapters = StepAdapters(step.adapted, self.model.device)
        elif self.graphs is not None and step.samples_all and self.graphs.takes(batch):
            return self._replay(self.graphs, step, before)
        token_ids, positions = self.put(batch.token_ids), self.put(batch.positions)
        inputs = batch.inputs(self.put)
        self._feed(token_ids, batch, before)
        modes = row_modes(step.moe_spans) if self.model.has_expert_caches else None
        self.model.announce(batch, token_ids, adapters, modes=modes)
        began_s = clock()
        moe_rows = None if modes is None else StepRows.with_modes(modes, self.model.device)
        hidden = self.hidden(token_ids, positions, inputs, workspace, moe_rows, adapters)
        hidden_s = clock()
        if moe_rows is not None:
            counted = count_neurons(step.chunks, moe_rows)
            if self.model.routed is not None:
                self.model.routed.count_neurons(*counted)
        prompt_logprobs = {each.chunk: self._prompt_logprobs(each, hidden) for each in step.prompts}
        pooled = {each.chunk: _pooled(each, hidden) for each in step.pooled}
        prompts_s = clock()
        if not step.rows:
            return StepOutput(
                None, prompt_logprobs, hidden_s - began_s, prompts_s - hidden_s, pooled
            )
        if len(step.rows) < hidden.shape[0]:
            # The residual buffer is no longer needed; reuse it.
            out = workspace.residual[: len(step.rows)]
            last_rows = self.put(np.array(step.last_rows))
            hidden = torch.index_select(hidden, 0, last_rows, out=out)
        logits = self._logits(hidden)
        logits_s = clock()
        sampled = sample(logits, step.rows, is_fast=self.samples_fast)
        sample_s = clock() - logits_s + prompts_s - hidden_s
        return StepOutput(
            sampled, prompt_logprobs, logits_s - prompts_s + hidden_s - began_s, sample_s, pooled
        )

    def _replay(
        self, graphs: DecodeGraphs, step: PreparedStep, before: StepInFlight | None
    ) -> StepOutput:
        """`compute` for a batch of decode rows, in one launch."""
        clock = self.clock
        replay = graphs.fill(step.batch)
        self._feed(graphs.token_ids, step.batch, before)
        token_ids = graphs.token_ids[: len(step.batch.token_ids)]
        self.model.announce(step.batch, token_ids, is_graph=True)
        began_s = clock()
        replay()
        logits_s = clock()
        logits = self.memory.logits[: len(step.rows)]
        sampled = sample(logits, step.rows, is_fast=self.samples_fast)
        return StepOutput(sampled, {}, logits_s - began_s, clock() - logits_s)

    @torch.inference_mode()
    def capture(self, sizes: GraphSizes, capture: Capture, memory: Tensor) -> DecodeGraphs:
        """Graphs of decode steps that read their inputs in `memory`."""

        def run(token_ids: Tensor, positions: Tensor, inputs: AttentionInputs) -> None:
            if self.memory.blocks_for(len(token_ids)):
                raise InvariantError("the activations of a graph would move")
            num_rows = len(token_ids)
            with self.memory.lease(num_rows) as workspace:
                self.model.graph_logits(
                    self.model.forward(token_ids, positions, inputs, self.kv_layers, workspace),
                    self.memory.logits[:num_rows],
                    self.memory.narrow[:num_rows],
                )

        return DecodeGraphs(sizes, run, capture, memory)

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        inputs: AttentionInputs,
        workspace: Workspace,
        moe_rows: StepRows | None = None,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """`Decoder.forward`; on a CPU, a batch of decode rows without adapters is replayed
        instead, with the same bits."""
        self.model.begin(token_ids, positions, inputs, workspace, moe_rows)
        if adapters is not None:
            return self.model.run_layers(inputs, self.kv_layers, workspace, adapters)
        if self.replay is None or not self.replay.suits(inputs):
            return self.model.run_layers(inputs, self.kv_layers, workspace)
        self.replay.run_layers(inputs, workspace)
        return workspace.normed

    @torch.inference_mode()
    def run_rows(self, num_rows: int, num_keys: int = 1) -> None:
        """Compute `num_rows` decode rows that see `num_keys` keys each, all in block 0, and wait
        for them: for measurements.

        Leaves garbage in block 0, so call it before the first sequence is added.
        """
        batch = measured_batch(
            num_rows, num_keys, self.block_size, has_states=self.model.whole_config.has_states
        )
        token_ids, inputs = self.put(batch.token_ids), batch.inputs(self.put)
        with self.memory.lease(num_rows) as workspace:
            self.model.announce(batch, token_ids)
            hidden = self.hidden(token_ids, self.put(batch.positions), inputs, workspace)
            self._logits(hidden[: self.memory.logits.shape[0]]).sum().item()

    def _prompt_logprobs(self, prompt: PromptRows, hidden: Tensor) -> list[LogprobRows]:
        """Logprobs of prompt tokens, as the model gave them. `hidden` [T, hidden] of the step."""
        found = []
        most = self.memory.logits.shape[0]
        for i in range(0, len(prompt.following), most):
            ids = self.put(np.array(prompt.following[i : i + most]))
            first = prompt.first_row + i
            rows = hidden[first : first + len(ids)]
            logits = self._logits(rows)
            if self.watch_prompts is not None:
                seen = PromptLogits(prompt.request_id, prompt.start + i, ids, rows, logits)
                self.watch_prompts(seen)
            found.append(LogprobRows.of(logits, ids, prompt.num_top).to_host())
        return found

    def _logits(self, hidden: Tensor) -> Tensor:
        """fp32 [rows, vocab], in the reserve: valid until the next call."""
        num_rows = hidden.shape[0]
        return self.model.logits(
            hidden, self.memory.logits[:num_rows], self.memory.narrow[:num_rows]
        )

    def _feed(self, token_ids: Tensor, batch: HostBatch, before: StepInFlight | None) -> None:
        """Copy ids that the step before sampled, and the host has not read, into this batch."""
        if not batch.unread.size:
            return
        sampled = None if before is None else before.output.sampled
        assert sampled is not None
        at, rows = self.put(batch.unread)
        # A row without a valid token has ended, but the host does not know that yet.
        token_ids.index_copy_(0, at, sampled.ids[rows].clamp_(min=0))

    def put(self, values: NDArray[np.generic]) -> Tensor:
        """`values` on the model's device."""
        return to_device(torch.from_numpy(values), self.model.device)


def _pooled(rows: PooledRows, hidden: Tensor) -> Tensor:
    """The sum of the hidden states of `rows`, fp64 [hidden], on its way to the host. `hidden`
    [T, hidden] of the step.

    In fp64, sums of a prompt's chunks give the embedding of the whole: 45 bits beyond those of bf16
    hold any of its sums, and what fp32 loses is far below the embedding's last bit.
    """
    own = hidden[rows.first_row : rows.first_row + rows.num_rows]
    return to_host(own.sum(dim=0, dtype=torch.float64))
