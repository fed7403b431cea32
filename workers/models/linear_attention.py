"""Linear attention of a decoder layer: gated DeltaNet, whose state takes the place of K and V."""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.delta import gated_delta
from penstock.kernels.delta_types import DeltaWeights
from penstock.kernels.matmul import linear
from penstock.kernels.quant import Int8Rows
from penstock.kernels.types import PackedLinear, PagedKv
from penstock.workers.errors import InvariantError
from penstock.workers.memory.workspace import Workspace
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.layers import AttentionInputs, LayerCache, RolledRows, Turn, rows_for


class LinearAttention:
    """Gated DeltaNet of one layer, from normed hidden states to the output."""

    row_form = None  # b and a are never rounded, so its rows come as they are

    def __init__(
        self,
        config: ModelConfig,
        qkvz: PackedLinear,
        ba: PackedLinear,
        o: PackedLinear,
        weights: DeltaWeights,
    ):
        """`qkvz`: q, k and v of all heads, then the gate z. `ba`: b of all value heads, then a."""
        shape = config.linear_attention
        if shape is None:
            raise InvariantError("this model has no linear attention")
        self.qkvz = qkvz
        self.ba = ba
        self.o = o
        self.weights = weights
        self._parts = [shape.channels, shape.values]

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        return self.qkvz, self.ba, self.o

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its other weights."""
        return self.weights.tensors

    def __call__(
        self,
        x: Tensor | Int8Rows,
        workspace: Workspace,
        inputs: AttentionInputs,
        cache: LayerCache,
        turn: Turn | None,
        rolled: RolledRows | None,
    ) -> Tensor:
        """`x` [T, hidden] -> [T, hidden] in R3; the states are in their slots afterwards.

        `x` may lie in R2, which is overwritten. It has no positions: `turn` is not used.
        """
        ws = workspace
        out = self.heads(x, ws, inputs, cache, qkvz=ws.delta_qkvz, ba=ws.delta_ba, out=ws.delta_out)
        return linear(rows_for(self.o, out, ws), self.o, out=ws.projected)

    def heads(
        self,
        x: Tensor | Int8Rows,
        workspace: Workspace,
        inputs: AttentionInputs,
        cache: LayerCache,
        *,
        qkvz: Tensor,
        ba: Tensor,
        out: Tensor,
    ) -> Tensor:
        """The heads' output before the projection, in `out` [T, values]; `qkvz` and `ba` hold the
        projections meanwhile."""
        if isinstance(x, Int8Rows) or inputs.states is None or isinstance(cache, PagedKv):
            raise InvariantError("linear attention takes plain rows, and states")
        linear(x, self.ba, out=ba)
        linear(rows_for(self.qkvz, x, workspace), self.qkvz, out=qkvz)
        mixed, z = qkvz.split_with_sizes(self._parts, dim=1)
        return gated_delta(mixed, z, ba, self.weights, cache, inputs.states, out=out)
