"""Attention, MLP and decoder of one rank: as layers.py and decoder.py, with the gathers between.

Each linear has this rank's outputs and the whole input. Rows are rounded to int8 after they have
been gathered, by every rank alike, as one process does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.kernels.matmul import linear
from penstock.kernels.quant import Int8Rows
from penstock.kernels.rowwise import act_mul
from penstock.kernels.types import PackedLinear, PagedKv
from penstock.workers.experts.modes import StepRows
from penstock.workers.memory.workspace import Workspace, activation_plan
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.decoder_layer import DecoderLayer
from penstock.workers.models.layers import (
    Attention,
    AttentionInputs,
    Mlp,
    RolledRows,
    Turn,
    rows_for,
)
from penstock.workers.models.shards.exchange import Exchange
from penstock.workers.models.shards.shard import Shard

# Tells the other ranks of a step, or of the rows that logits are wanted of.
OnStep = Callable[[Tensor, Tensor, AttentionInputs], None]
OnLogits = Callable[[Tensor], None]


class ShardAttention(Attention):
    """The heads of one rank, and its columns of the output."""

    shard: Shard
    exchange: Exchange

    def __call__(
        self,
        x: Tensor | Int8Rows,
        workspace: Workspace,
        inputs: AttentionInputs,
        kv: PagedKv,
        turn: Turn | None,
        rolled: RolledRows | None,
    ) -> Tensor:
        attended = self.attend(
            x, workspace, inputs, kv, turn, rolled,
            qkv=_columns(workspace.qkv, self.qkv.out_features),
            attended=_columns(workspace.attended, self.shard.attended.size),
        )  # fmt: skip
        whole = self.exchange.gather(attended, self.shard.attended, workspace.attended)
        own = _columns(workspace.projected, self.o.out_features)
        linear(rows_for(self.o, whole, workspace), self.o, out=own)
        return self.exchange.gather(own, self.shard.hidden, workspace.projected)


class ShardMlp(Mlp):
    """Some inner columns of one rank, and its columns of the output."""

    shard: Shard
    exchange: Exchange

    def __call__(self, x: Tensor | Int8Rows, workspace: Workspace) -> Tensor:
        both = linear(x, self.gate_up, out=_columns(workspace.gate_up, self.gate_up.out_features))
        own = act_mul(both, both[:, : self.shard.inner.size], self.activation)
        inner = _columns(workspace.gate_up, self.shard.inner.whole)
        whole = self.exchange.gather(own, self.shard.inner, inner)
        out = _columns(workspace.normed, self.down.out_features)
        linear(rows_for(self.down, whole, workspace), self.down, out=out)
        return self.exchange.gather(out, self.shard.hidden, workspace.normed)


class ShardDecoder(Decoder):
    """The decoder of one rank. `config` is of its heads alone: for its KV cache."""

    def __init__(
        self,
        shard: Shard,
        exchange: Exchange,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        lm_head: PackedLinear,
        *,
        generates: bool = True,
    ):
        super().__init__(
            shard.own_config, embedding, layers, final_norm, lm_head, generates=generates
        )
        self.shard, self.exchange = shard, exchange
        self.plan = activation_plan(shard.config, self.dtype, self.num_scales)
        self.on_step: OnStep | None = None  # of the first rank, once there are others
        self.on_logits: OnLogits | None = None
        self.on_memory: Callable[[int, int], None] | None = None  # of blocks, and tokens a sequence
        self.on_close: Callable[[], None] | None = None

    def begin(
        self,
        token_ids: Tensor,
        positions: Tensor,
        inputs: AttentionInputs,
        ws: Workspace,
        moe_rows: StepRows | None = None,
    ) -> None:
        if self.on_step is not None:
            self.on_step(token_ids, positions, inputs)
        super().begin(token_ids, positions, inputs, ws, moe_rows)

    def run_layers(
        self, inputs: AttentionInputs, kv_layers: Sequence[PagedKv], ws: Workspace
    ) -> Tensor:
        self.exchange.begin()
        return super().run_layers(inputs, kv_layers, ws)

    def sink_queries(self, ws: Workspace) -> Tensor:
        return _columns(ws.q_sink, self.shard.attended.size)

    @torch.inference_mode()
    def logits(
        self, hidden: Tensor, out: Tensor | None = None, narrow: Tensor | None = None
    ) -> Tensor:
        rows, size = hidden.shape
        if self.on_logits is not None:
            self.exchange.hidden_rows(rows, size, hidden.dtype).copy_(hidden)
            self.on_logits(hidden)
        span = self.shard.vocab
        whole = out if self.dtype == torch.float32 else narrow
        if whole is None:
            whole = hidden.new_empty(rows, span.whole)
        self.exchange.gather_logits(linear(hidden, self.lm_head), span, whole)
        if out is None:
            out = whole.float()
        elif whole is not out:
            out.copy_(whole)
        return self.logit_scaling.apply_(out)

    def close(self) -> None:
        if self.on_close is not None:
            self.on_close()

    @torch.inference_mode()
    def own_logits(self, num_rows: int) -> None:
        """This rank's part of the logits that the first rank wants."""
        hidden = self.exchange.hidden_rows(num_rows, self.config.hidden_size, self.dtype)
        self.exchange.gather_logits(linear(hidden, self.lm_head), self.shard.vocab, None)


def _columns(memory: Tensor, columns: int) -> Tensor:
    """[T, columns], dense, at the beginning of a wider array [T, ...]."""
    num_rows = memory.shape[0]
    return memory.view(-1)[: num_rows * columns].view(num_rows, columns)
