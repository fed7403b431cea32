"""Attention and MLPs of one rank: as layers.py, with the gathers between.

Each linear has this rank's outputs and the whole input. Rows are rounded to int8 after they have
been gathered, by every rank alike, as one process does.
"""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.matmul import linear
from penstock.kernels.quant import Int8Rows
from penstock.kernels.rowwise import act_mul, rms_norm
from penstock.workers.adapters.step import LayerRows
from penstock.workers.memory.workspace import Workspace
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
            qkv=columns_of(workspace.qkv, self.qkv.out_features),
            attended=columns_of(workspace.attended, self.attended[self.exchange.rank].size),
            deltas=None if added is None else added[1].deltas("qkv", added[0]),
        )  # fmt: skip
        whole = self.exchange.gather(attended, self.attended, workspace.attended)
        # Before the rows are rounded to int8 in place.
        deltas = None if added is None else added[1].deltas("o", whole)
        own = columns_of(workspace.projected, self.o.out_features)
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
        both = linear(x, self.gate_up, out=columns_of(memory, self.gate_up.out_features))
        if added is not None:
            added[1].deltas("gate_up", added[0]).add_to(both)
        span = self.inner[self.exchange.rank]
        own = act_mul(both, both[:, : span.size], self.activation)
        whole = self.exchange.gather(own, self.inner, columns_of(memory, span.whole))
        deltas = None if added is None else added[1].deltas("down", whole)
        own = columns_of(out, self.down.out_features)
        linear(rows_for(self.down, whole, ws), self.down, out=own)
        if deltas is not None:
            deltas.add_to(own)
        return self.exchange.gather(own, self.hidden, out)


def columns_of(memory: Tensor, columns: int) -> Tensor:
    """[T, columns], dense, at the beginning of a wider array [T, ...]."""
    num_rows = memory.shape[0]
    return memory.view(-1)[: num_rows * columns].view(num_rows, columns)
