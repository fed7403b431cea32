"""Attention, MLPs and decoder of one rank: as layers.py, moe.py and decoder.py, with the gathers
between.

Each linear has this rank's outputs and the whole input. Rows are rounded to int8 after they have
been gathered, by every rank alike, as one process does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.matmul import linear
from penstock.kernels.quant import Int8Rows
from penstock.kernels.rowwise import act_mul, rms_norm
from penstock.kernels.types import PackedLinear
from penstock.workers.adapters.packed import AdapterPart
from penstock.workers.adapters.step import LayerRows, StepAdapters
from penstock.workers.adapters.table import OtherRanks
from penstock.workers.experts.routed import RoutedExperts
from penstock.workers.memory.host_tier import HostMirror
from penstock.workers.memory.workspace import Workspace, activation_plan
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.decoder_layer import DecoderLayer
from penstock.workers.models.host_batch import GroupStep, HostBatch
from penstock.workers.models.layers import (
    Attention,
    AttentionInputs,
    LayerCache,
    Mlp,
    RolledRows,
    Turn,
    rows_for,
)
from penstock.workers.models.shards.exchange import Exchange
from penstock.workers.models.shards.shard import Shard
from penstock.workers.stats import RankStats

# Tells the other ranks of a step, or of the rows that logits are wanted of.
OnStep = Callable[[GroupStep], None]
OnLogits = Callable[[int], None]
# Tells the other ranks of the numbers of blocks and of tokens of a sequence, bytes of a block here,
# and the sizes of decode graphs, as wire.py has them.
OnMemory = Callable[[int, int, int, dict[str, Any] | None], None]
# Has the others capture decode graphs; returns what waits until they have.
OnCapture = Callable[[], Callable[[], None]]
OnAdapters = Callable[[StepAdapters | None], None]  # of the step that comes next
RankMemory = tuple[int, int]  # bytes of weights, and of K and V
# The input of a layer's part, not quantised, and what adapters add there.
Added = tuple[Tensor, LayerRows]


class ShardAttention(Attention):
    """The heads of one rank, and its columns of the output."""

    def join(self, shard: Shard, exchange: Exchange) -> None:
        self.exchange = exchange
        self.attended, self.hidden = shard.spans("attended"), shard.spans("hidden")
        self.normed = self.attended, shard.spans("key_columns")

    def __call__(
        self,
        x: Tensor | Int8Rows,
        workspace: Workspace,
        inputs: AttentionInputs,
        kv: LayerCache,
        turn: Turn | None,
        rolled: RolledRows | None,
    ) -> Tensor:
        return self._run(x, workspace, inputs, kv, turn, rolled)

    def adapted(
        self,
        x: Tensor | Int8Rows,
        plain: Tensor,
        workspace: Workspace,
        inputs: AttentionInputs,
        kv: LayerCache,
        turn: Turn | None,
        rolled: RolledRows | None,
        adapters: LayerRows,
    ) -> Tensor:
        return self._run(x, workspace, inputs, kv, turn, rolled, (plain, adapters))

    def _run(
        self,
        x: Tensor | Int8Rows,
        workspace: Workspace,
        inputs: AttentionInputs,
        kv: LayerCache,
        turn: Turn | None,
        rolled: RolledRows | None,
        added: Added | None = None,
    ) -> Tensor:
        attended = self.attend(
            x, workspace, inputs, kv, turn, rolled,
            qkv=_columns(workspace.qkv, self.qkv.out_features),
            attended=_columns(workspace.attended, self.attended[self.exchange.rank].size),
            deltas=None if added is None else added[1].deltas("qkv", added[0]),
        )  # fmt: skip
        whole = self.exchange.gather(attended, self.attended, workspace.attended)
        # Before the rows are rounded to int8 in place.
        deltas = None if added is None else added[1].deltas("o", whole)
        own = _columns(workspace.projected, self.o.out_features)
        linear(rows_for(self.o, whole, workspace), self.o, out=own)
        if deltas is not None:
            deltas.add_to(own)
        return self.exchange.gather(own, self.hidden, workspace.projected)

    def _normed(self, x: Tensor, which: int, weights: tuple[Tensor, Tensor]) -> Tensor:
        """Over the heads of all ranks, in other memory, or over each head, in place."""
        if not self.norm_over_all_heads:
            return super()._normed(x, which, weights)
        spans, rows = self.normed[which], x.view(x.shape[0], -1)
        span = spans[self.exchange.rank]
        whole = self.exchange.heads(which, len(rows), span.whole, x.dtype)
        self.exchange.gather(rows, spans, whole)
        rms_norm(whole, weights[which], self.eps, out=whole)
        return whole[:, span.first : span.end].unflatten(1, x.shape[1:])


class ShardMlp(Mlp):
    """Some inner columns of one rank, and its columns of the output."""

    def join(self, shard: Shard, exchange: Exchange, inner: str = "inner") -> None:
        """`inner`: the span of the shard that this MLP's inner columns are."""
        self.exchange = exchange
        self.inner, self.hidden = shard.spans(inner), shard.spans("hidden")

    def __call__(self, x: Tensor | Int8Rows, workspace: Workspace) -> Tensor:
        return self.run(x, workspace.gate_up, workspace.normed, workspace)

    def adapted(
        self, x: Tensor | Int8Rows, plain: Tensor, workspace: Workspace, adapters: LayerRows
    ) -> Tensor:
        return self.run(x, workspace.gate_up, workspace.normed, workspace, (plain, adapters))

    def run(
        self,
        x: Tensor | Int8Rows,
        memory: Tensor,
        out: Tensor,
        ws: Workspace,
        added: Added | None = None,
    ) -> Tensor:
        """`x` [T, hidden] -> [T, hidden] in `out`. `memory` [T, twice the inner columns of all]:
        for this rank's, and for their products."""
        both = linear(x, self.gate_up, out=_columns(memory, self.gate_up.out_features))
        if added is not None:
            added[1].deltas("gate_up", added[0]).add_to(both)
        span = self.inner[self.exchange.rank]
        own = act_mul(both, both[:, : span.size], self.activation)
        whole = self.exchange.gather(own, self.inner, _columns(memory, span.whole))
        deltas = None if added is None else added[1].deltas("down", whole)
        own = _columns(out, self.down.out_features)
        linear(rows_for(self.down, whole, ws), self.down, out=own)
        if deltas is not None:
            deltas.add_to(own)
        return self.exchange.gather(own, self.hidden, out)


class ShardDecoder(Decoder):
    """The decoder of one rank. `config` is of its heads alone: for its KV cache."""

    def __init__(
        self,
        shard: Shard,
        exchange: Exchange,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor | None,
        lm_head: PackedLinear | None,
        *,
        generates: bool = True,
        routed: RoutedExperts | None = None,
        config: ModelConfig | None = None,
    ):
        """`config`: of what this rank holds; None: of all layers."""
        super().__init__(
            config or shard.own_config, embedding, layers, final_norm, lm_head, routed,
            generates=generates,
        )  # fmt: skip
        self.shard, self.exchange, self.whole_config = shard, exchange, shard.config
        self.vocab = shard.spans("vocab")
        self.plan = activation_plan(
            shard.config, self.dtype, self.num_scales, in_columns=shard.cuts_experts
        )
        self.memory_of: list[RankMemory] = []  # of all ranks, on the first one
        self.on_step: OnStep | None = None  # of the first rank, once there are others
        self.on_logits: OnLogits | None = None
        self.on_memory: OnMemory | None = None
        self.on_capture: OnCapture | None = None
        self.on_adapters: OnAdapters | None = None
        self.other_ranks: OtherRanks | None = None  # for its adapters
        # Takes host memory for a number of blocks on the other ranks.
        self.on_host: Callable[[int], HostMirror] | None = None
        self.on_broken: Callable[[], None] | None = None
        self.on_close: Callable[[], None] | None = None

    def connect(self, interface: str) -> None:
        """To the other ranks, at the same time as they: as Exchange.connect."""
        self.exchange.connect(interface)

    def disconnect(self) -> None:
        """The others have ended."""
        self.exchange.close()

    def announce(
        self,
        batch: HostBatch,
        token_ids: Tensor,
        adapters: StepAdapters | None = None,
        *,
        is_graph: bool = False,
    ) -> None:
        if self.on_adapters is not None:
            self.on_adapters(adapters)
        if self.on_step is None:
            return
        shares = bool(batch.unread.size) and self.exchange.shares_ids
        if batch.unread.size and not shares:  # a CPU: the step before is done
            batch = replace(batch, token_ids=token_ids.numpy())
        self.on_step(GroupStep(batch, is_graph, shares))
        if shares:
            self.exchange.share_ids(token_ids)

    def take_ids(self, token_ids: Tensor) -> None:
        """Receive the ids [T] of a step that the device of the first rank alone knows."""
        self.exchange.share_ids(token_ids)

    def run_layers(
        self,
        inputs: AttentionInputs,
        kv_layers: Sequence[LayerCache],
        ws: Workspace,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        with self._whole():
            return super().run_layers(inputs, kv_layers, ws, adapters)

    @property
    def adapter_part(self) -> AdapterPart:
        return AdapterPart(range(self.config.num_layers), self._outputs)

    def _outputs(self, module: str) -> slice:
        """Which outputs of a linear this rank has."""
        span = self.shard.rows_of(module)
        return slice(None) if span is None else slice(span.first, span.end)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Around what all ranks compute together: an error here leaves the others in the middle."""
        try:
            yield
        except BaseException:
            if self.on_broken is not None:
                self.on_broken()
            raise

    def sink_queries(self, ws: Workspace) -> Tensor:
        return _columns(ws.q_sink, self.shard.attended.size)

    def ranks(self) -> tuple[RankStats, ...]:
        waits = self.exchange.waits()
        return tuple(RankStats(*memory, *wait) for memory, wait in zip(self.memory_of, waits))

    @torch.inference_mode()
    def logits(
        self, hidden: Tensor, out: Tensor | None = None, narrow: Tensor | None = None
    ) -> Tensor:
        whole = out if self.dtype == torch.float32 else narrow
        if whole is None:
            whole = hidden.new_empty(len(hidden), self.shard.vocab.whole)
        with self._whole():
            if self.on_logits is not None:
                self.exchange.offer(hidden, partial(self.on_logits, len(hidden)))
            self.exchange.gather_logits(linear(hidden, self.lm_head), self.vocab, whole)
        return self._finished(whole, out)

    def graph_logits(self, hidden: Tensor, out: Tensor, narrow: Tensor) -> Tensor:
        """On every rank: all have all rows of a pass."""
        whole = out if self.dtype == torch.float32 else narrow
        self.exchange.gather_logits(linear(hidden, self.lm_head), self.vocab, whole)
        return self._finished(whole, out)

    def _finished(self, whole: Tensor, out: Tensor | None) -> Tensor:
        if out is None:
            out = whole.float()
        elif whole is not out:
            out.copy_(whole)
        return self.logit_scaling.apply_(out)

    def close(self) -> None:
        super().close()
        if self.on_close is not None:
            self.on_close()

    @torch.inference_mode()
    def own_logits(self, num_rows: int) -> None:
        """This rank's part of the logits that the first rank wants."""
        hidden = self.exchange.offered(num_rows, self.config.hidden_size, self.dtype)
        self.exchange.gather_logits(linear(hidden, self.lm_head), self.vocab, None)


def _columns(memory: Tensor, columns: int) -> Tensor:
    """[T, columns], dense, at the beginning of a wider array [T, ...]."""
    num_rows = memory.shape[0]
    return memory.view(-1)[: num_rows * columns].view(num_rows, columns)
