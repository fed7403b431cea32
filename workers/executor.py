"""A plan becomes tensors, tensors go through the model, logits become token ids.

Knows nothing of who waits or which block is free: a plan's blocks are already in its sequences'
tables.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from penstock.workers.experts.modes import StepRows
from penstock.workers.logits import logprobs_of
from penstock.workers.memory import KvLayer
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.layers import AttentionInputs, RollingInputs
from penstock.workers.request import TokenLogprob
from penstock.workers.sampler import RowSampling, Sampled, sample, uniform_at
from penstock.workers.scheduler import Chunk, Plan
from penstock.workers.sequence import Sequence
from penstock.workers.step_times import StepTimes
from penstock.workers.workspace import StepMemory, Workspace

GREEDY_BELOW = 1e-5  # smaller temperatures overflow 1/T, and mean greedy anyway


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a plan gave: a token for each chunk that samples, in the order of `plan.chunks`.

    `prompt_logprobs`: by index of the chunk, those of the prompt tokens that follow its tokens.
    """

    sampled: list[Sampled]
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)


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
    def run(self, plan: Plan) -> StepResult:
        """Compute K and V of all tokens of the plan, and sample where a chunk reaches the end."""
        with self.memory.lease(plan.num_tokens) as workspace:
            return self._run(plan, workspace)

    def _run(self, plan: Plan, workspace: Workspace) -> StepResult:
        chunks = plan.chunks
        token_ids, positions, inputs = self._inputs(plan)
        self.times.lap("copy")
        moe_rows = self._moe_rows(chunks)
        hidden = self.model.forward(
            token_ids, positions, inputs, self.kv_layers, workspace, moe_rows
        )
        self.times.lap("model")
        if moe_rows is not None and self.model.routed is not None:
            skipped = _count_neurons(chunks, moe_rows)
            self.model.routed.count_neurons(*skipped)
        ends = np.cumsum([chunk.length for chunk in chunks])
        prompt_logprobs = {
            i: self._prompt_logprobs(chunk, hidden[int(end) - chunk.length : int(end)])
            for i, (chunk, end) in enumerate(zip(chunks, ends))
            if _reports_prompt(chunk.seq)
        }
        self.times.lap("sample")
        last_rows = [int(end) - 1 for end, chunk in zip(ends, chunks) if chunk.samples]
        if not last_rows:
            return StepResult([], prompt_logprobs)
        if len(last_rows) < hidden.shape[0]:
            indices = torch.tensor(last_rows, device=hidden.device)
            # The residual stream has had its day.
            hidden = torch.index_select(
                hidden, 0, indices, out=workspace.residual[: len(last_rows)]
            )
        rows = [row_sampling(chunk.seq) for chunk in chunks if chunk.samples]
        logits = self._logits(hidden)
        self.times.lap("model")
        sampled = sample(logits, rows)
        self.times.lap("sample")
        return StepResult(sampled, prompt_logprobs)

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

    def _prompt_logprobs(self, chunk: Chunk, hidden: torch.Tensor) -> list[TokenLogprob]:
        """Of the prompt tokens that follow the tokens of `chunk`, `hidden` [chunk, hidden]."""
        seq = chunk.seq
        num_top = seq.request.params.prompt_logprobs or 0
        following = seq.request.prompt_ids[chunk.start + 1 : chunk.start + chunk.length + 1]
        found: list[TokenLogprob] = []
        most = self.memory.logits.shape[0]
        for i in range(0, len(following), most):
            ids = following[i : i + most]
            found += logprobs_of(self._logits(hidden[i : i + len(ids)]), ids, num_top)
        return found

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [rows, vocab], in the reserve: good until the next call."""
        num_rows = hidden.shape[0]
        return self.model.logits(
            hidden, self.memory.logits[:num_rows], self.memory.narrow[:num_rows]
        )

    def _inputs(self, plan: Plan) -> tuple[torch.Tensor, torch.Tensor, AttentionInputs]:
        decode, prefill = plan.decode, plan.prefill
        decode_tables, prefill_tables = self._tables(decode), self._tables(prefill)
        position = np.array([chunk.start for chunk in decode], dtype=np.int64)
        slots = [self._slots_of_rows(decode, decode_tables, position)] if decode else []
        token_ids = [np.array([c.seq.token_ids[c.start] for c in decode], dtype=np.int64)]
        positions = [position]
        for chunk, table in zip(prefill, prefill_tables):
            span = np.arange(chunk.start, chunk.start + chunk.length, dtype=np.int64)
            entry = span // self.block_size - _rolled_before(chunk.seq, span, self.block_size)
            slots.append(table[entry] * np.int64(self.block_size) + span % self.block_size)
            ids = np.frombuffer(chunk.seq.token_ids, dtype=np.int32)
            token_ids.append(ids[chunk.start : chunk.start + chunk.length].astype(np.int64))
            positions.append(span)
        decode_lens = position + 1
        prefill_lens = [chunk.start + chunk.length for chunk in prefill]
        starts = np.cumsum([0] + [chunk.length for chunk in prefill])
        inputs = AttentionInputs(
            slots=self._put(np.concatenate(slots)),
            num_decode=len(decode),
            decode_tables=self._put(decode_tables),
            decode_lens=self._put(decode_lens.astype(np.int32)),
            max_decode_len=int(decode_lens.max(initial=0)),
            prefill_tables=self._put(prefill_tables),
            prefill_starts=self._put(starts.astype(np.int32)),
            prefill_lens=self._put(np.array(prefill_lens, dtype=np.int32)),
            max_prefill_chunk=max((chunk.length for chunk in prefill), default=0),
            max_prefill_len=max(prefill_lens, default=0),
            rolling=self._rolling(plan.chunks, positions),
        )
        return self._put(np.concatenate(token_ids)), self._put(np.concatenate(positions)), inputs

    def _moe_rows(self, chunks: list[Chunk]) -> StepRows | None:
        """Which rows have experts that are not exact; None where none has."""
        if self.model.routed is None:
            return None
        spans = [(c.seq.moe_mode, c.seq.num_prompt_tokens, c.start, c.length) for c in chunks]
        return StepRows.of(spans, self.model.device)

    def _rolling(self, chunks: list[Chunk], positions: list[np.ndarray]) -> RollingInputs | None:
        """Who sees what, where a sequence of the step has evicted tokens; else None."""
        if not any(c.seq.context.num_evicted(c.start + c.length - 1) for c in chunks):
            return None
        spans = [*positions[0][:, None], *positions[1:]]
        rows = [chunk.seq.context.rows(span) for chunk, span in zip(chunks, spans, strict=True)]
        sink_ends, window_starts, sink_positions = (np.concatenate(each) for each in zip(*rows))
        per_chunk = [(c.seq.context.num_sink_blocks, c.seq.num_rolled_blocks) for c in chunks]
        sink_blocks, bases = np.array(per_chunk, dtype=np.int32).T
        return RollingInputs(
            sink_positions=self._put(sink_positions),
            sink_ends=self._put(sink_ends.astype(np.int32)),
            window_starts=self._put(window_starts.astype(np.int32)),
            sink_blocks=self._put(np.ascontiguousarray(sink_blocks)),
            bases=self._put(np.ascontiguousarray(bases)),
            max_visible_len=int(np.max(np.concatenate(spans) - window_starts)) + 1,
        )

    def _tables(self, chunks: list[Chunk]) -> np.ndarray:
        """Block tables, int32 [chunks, longest]; entries beyond a sequence's own are 0, unread."""
        longest = max((len(c.seq.block_table) + len(c.scratch) for c in chunks), default=0)
        tables = np.zeros((len(chunks), longest), dtype=np.int32)
        for row, chunk in zip(tables, chunks):
            num_own = len(chunk.seq.block_table)
            row[:num_own] = np.frombuffer(chunk.seq.block_table, dtype=np.int32)
            row[num_own : num_own + len(chunk.scratch)] = chunk.scratch
        return tables

    def _slots_of_rows(
        self, chunks: list[Chunk], tables: np.ndarray, position: np.ndarray
    ) -> np.ndarray:
        rolled = np.array([chunk.seq.num_rolled_blocks for chunk in chunks], dtype=np.int64)
        sinks = np.array([chunk.seq.context.num_sink_blocks for chunk in chunks], dtype=np.int64)
        page = position // self.block_size
        entry = page - np.where(page >= sinks, rolled, 0)
        block = tables[np.arange(len(position)), entry].astype(np.int64)
        return block * self.block_size + position % self.block_size

    def _put(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.model.device, non_blocking=True)


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


def _rolled_before(seq: Sequence, span: np.ndarray, block_size: int) -> np.ndarray:
    """How many blocks the compact table lacks before the one of each position."""
    in_window = span // block_size >= seq.context.num_sink_blocks
    return np.where(in_window, seq.num_rolled_blocks, 0)


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
