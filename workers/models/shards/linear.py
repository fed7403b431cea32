"""Linear attention of one rank: its value heads with their key heads, and its columns of the
output; as models/linear_attention.py, with the gathers between."""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.matmul import linear
from penstock.kernels.quant import Int8Rows
from penstock.workers.memory.workspace import Workspace
from penstock.workers.models.layers import AttentionInputs, LayerCache, RolledRows, Turn, rows_for
from penstock.workers.models.linear_attention import LinearAttention
from penstock.workers.models.moe import narrowed
from penstock.workers.models.shards.exchange import Exchange
from penstock.workers.models.shards.shard import Shard


class ShardLinearAttention(LinearAttention):
    """The heads of one rank; their states lie in its slots."""

    def join(self, shard: Shard, exchange: Exchange) -> None:
        self.exchange = exchange
        self.values, self.hidden = shard.spans("delta_values"), shard.spans("hidden")

    def __call__(
        self,
        x: Tensor | Int8Rows,
        workspace: Workspace,
        inputs: AttentionInputs,
        cache: LayerCache,
        turn: Turn | None,
        rolled: RolledRows | None,
    ) -> Tensor:
        ws = workspace
        own = self.heads(
            x, ws, inputs, cache,
            qkvz=narrowed(ws.delta_qkvz, self.qkvz.out_features),
            ba=narrowed(ws.delta_ba, self.ba.out_features),
            out=narrowed(ws.delta_out, self.values[self.exchange.rank].size),
        )  # fmt: skip
        whole = self.exchange.gather(own, self.values, ws.delta_out)
        own = narrowed(ws.projected, self.o.out_features)
        linear(rows_for(self.o, whole, ws), self.o, out=own)
        return self.exchange.gather(own, self.hidden, ws.projected)
