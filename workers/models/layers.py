"""The dense parts of a decoder layer: attention over the paged KV cache, and the gated MLP."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from penstock.kernels.attention import (
    decode_attention,
    prefill_attention,
    rope_write_kv,
    write_kv,
)
from penstock.kernels.delta import gate_mul_
from penstock.kernels.delta_types import DeltaState, StateRows
from penstock.kernels.matmul import linear
from penstock.kernels.moe.mlp import gated_down, gated_mlp
from penstock.kernels.quant import Int8Rows
from penstock.kernels.rowwise import act_mul, quantize_int8, rms_norm, rope_to, soft_cap_
from penstock.kernels.types import (
    Activation,
    DecodeBatch,
    PackedLinear,
    PagedKv,
    PrefillBatch,
    Rolling,
)
from penstock.workers.adapters.step import Deltas, LayerRows
from penstock.workers.errors import InvariantError
from penstock.workers.memory.workspace import Workspace
from penstock.workers.model_config import ModelConfig

LayerCache = PagedKv | DeltaState  # what one layer keeps of the tokens that are computed


@dataclass(frozen=True, slots=True)
class RolledRows:
    """The rolled contexts of one step, for the decode and the prefill kernel; for all layers."""

    q_sink: Tensor  # [T, heads, head_dim], which each layer writes; both parts are views of it
    decode: Rolling
    prefill: Rolling

    def unturned(self, q: Tensor) -> RolledRows:
        """For a layer without rotary embedding: distance is nothing to it, and `q` serves all."""
        num_decode = self.decode.q_sink.shape[0]
        return RolledRows(
            q,
            replace(self.decode, q_sink=q[:num_decode]),
            replace(self.prefill, q_sink=q[num_decode:]),
        )


@dataclass(frozen=True, slots=True)
class RollingInputs:
    """The keys visible to each row if sequences have evicted tokens (context_policy.py).

    In the order of the batch's rows: `sink_positions` int64 [T], `sink_ends` and `window_starts`
    int32 [T]. In the order of its sequences, those that decode first: `sink_blocks` and `bases`
    int32, blocks of sinks and blocks freed after them.
    """

    sink_positions: Tensor
    sink_ends: Tensor
    window_starts: Tensor
    sink_blocks: Tensor
    bases: Tensor
    max_visible_len: int  # upper bound of the visible keys of a row after the sinks

    def split(self, q_sink: Tensor, num_decode: int) -> RolledRows:
        """The same with `q_sink` [T, heads, head_dim], for the decode rows and for the others."""
        decode, prefill = (
            Rolling(
                q_sink[part],
                self.sink_ends[part],
                self.window_starts[part],
                self.sink_blocks[part],
                self.bases[part],
                self.max_visible_len,
            )
            for part in (slice(num_decode), slice(num_decode, None))
        )
        return RolledRows(q_sink, decode, prefill)


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Positions and block tables of the rows of one flat batch; the same for all layers.

    Rows [0, num_decode) are one token of one sequence each; the rest are prefill chunks, one after
    the other, whose `query_starts` count from row num_decode.
    """

    slots: Tensor  # int64 [T]: block_id * block_size + offset of each row's K and V
    num_decode: int
    decode: DecodeBatch  # of num_decode sequences
    prefill: PrefillBatch
    rolling: RollingInputs | None = None  # None: every row sees its whole context
    states: StateRows | None = None  # None: the model has no recurrent states
    uses_scratch: bool = False  # keys of some rows lie in scratch blocks, which layers share


@dataclass(frozen=True, slots=True)
class Turn:
    """One rotary embedding of a step's rows, fp32 [T, rotary_dim / 2] each; see Workspace."""

    cos: Tensor
    sin: Tensor
    sink_cos: Tensor
    sink_sin: Tensor

    @classmethod
    def all_in(cls, ws: Workspace, count: int) -> list[Turn]:
        """The `count` rotary embeddings of a model, in its order."""
        if count == 1:
            return [cls(ws.cos, ws.sin, ws.sink_cos, ws.sink_sin)]
        each = [_parts(table, count) for table in (ws.cos, ws.sin, ws.sink_cos, ws.sink_sin)]
        return [cls(*tables) for tables in zip(*each, strict=True)]


def _parts(table: Tensor, count: int) -> list[Tensor]:
    """[T, count * n] as `count` dense [T, n], one after the other in the same memory."""
    num_rows, columns = table.shape
    return list(table.view(-1).view(count, num_rows, columns // count).unbind(0))


class Attention:
    """Causal grouped-query attention of one layer, from normed hidden states to the output."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        qkv: PackedLinear,
        o: PackedLinear,
        qk_norms: tuple[Tensor, Tensor] | None,
        sink_scores: Tensor | None = None,
    ):
        """`sink_scores` fp32 [heads]: as `decode_attention` has it."""
        self.sink_scores = sink_scores
        self.qkv = qkv
        self.o = o
        self.head_dim = config.head_dim
        self.heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.scale = config.scale
        self.window = config.sliding_window[layer]
        self.qk_norms = qk_norms
        self.norm_over_all_heads = config.qk_norm == "full"
        self.eps = config.rms_norm_eps
        self.clip = config.clip_qkv
        self.softcap = config.attention_softcap
        self.scales_queries = config.query_scaling is not None
        self.row_form = qkv.row_form
        self.is_gated = config.attention_gate
        if self.is_gated:  # sigmoids of as many outputs as q has weight the heads' outputs
            self.heads.append(config.num_heads)

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        return self.qkv, self.o

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its other weights."""
        sinks = () if self.sink_scores is None else (self.sink_scores,)
        return (*(self.qk_norms or ()), *sinks)

    def __call__(
        self,
        x: Tensor | Int8Rows,
        workspace: Workspace,
        inputs: AttentionInputs,
        kv: LayerCache,
        turn: Turn | None,
        rolled: RolledRows | None,
    ) -> Tensor:
        """`x` [T, hidden] -> [T, hidden] in R3; K and V of all rows are in the cache afterwards.

        `x` may lie in R2, which is overwritten. Int8 rows have `row_form`. `turn`: this layer's
        rotary embedding; None: it has none. `rolled`: `inputs.rolling` split, if there is any.
        """
        attended = self.attend(
            x, workspace, inputs, kv, turn, rolled, qkv=workspace.qkv, attended=workspace.attended
        )
        return linear(rows_for(self.o, attended, workspace), self.o, out=workspace.projected)

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
        """`__call__` with the additions of `adapters`. `plain` [T, hidden]: `x`, not quantised."""
        attended = self.attend(
            x, workspace, inputs, kv, turn, rolled, qkv=workspace.qkv, attended=workspace.attended,
            deltas=adapters.deltas("qkv", plain),
        )  # fmt: skip
        deltas = adapters.deltas("o", attended)  # before its rows are rounded to int8 in place
        out = linear(rows_for(self.o, attended, workspace), self.o, out=workspace.projected)
        return deltas.add_to(out)

    def attend(
        self,
        x: Tensor | Int8Rows,
        workspace: Workspace,
        inputs: AttentionInputs,
        kv: LayerCache,
        turn: Turn | None,
        rolled: RolledRows | None,
        *,
        qkv: Tensor,
        attended: Tensor,
        deltas: Deltas | None = None,
    ) -> Tensor:
        """The heads' output before the projection, in `attended` [T, heads * head_dim]; q, k and v
        lie in `qkv` meanwhile. `deltas`: added to them first."""
        if isinstance(kv, DeltaState):
            raise InvariantError("attention over a recurrent state")
        num_tokens = x.shape[0]
        qkv = linear(x, self.qkv, out=qkv)
        if deltas is not None:
            deltas.add_to(qkv)
        qkv = qkv.view(num_tokens, -1, self.head_dim)
        q, k, v, *gates = qkv.split_with_sizes(self.heads, dim=1)  # [T, heads, head_dim]
        if self.qk_norms is not None:
            q, k = self._normed(q, 0, self.qk_norms), self._normed(k, 1, self.qk_norms)
        if self.clip is not None:
            for part in (q, k, v):
                part.clamp_(-self.clip, self.clip)
        if self.scales_queries:
            q.mul_(workspace.query_scales[:, :, None])
        if turn is None:
            write_kv(k, v, kv, inputs.slots)
            rolled = None if rolled is None else rolled.unturned(q)
        else:
            if rolled is not None:  # evicted tokens reduce the distance to the sinks
                rope_to(q, turn.sink_cos, turn.sink_sin, out=rolled.q_sink)
            rope_write_kv(q, k, v, turn.cos, turn.sin, kv, inputs.slots)
        self._attend(q, rolled, inputs, kv, attended.view(num_tokens, -1, self.head_dim))
        for gate in gates:
            gate_mul_(attended, gate.flatten(1))
        return attended

    def _normed(self, x: Tensor, which: int, weights: tuple[Tensor, Tensor]) -> Tensor:
        """RMSNorm of `x` [T, heads, head_dim] in place: over each head, or over a row's heads.
        `which`: 0 for q, 1 for k."""
        rows = x.view(x.shape[0], -1) if self.norm_over_all_heads else x
        rms_norm(rows, weights[which], self.eps, out=rows)
        return x

    def _attend(
        self,
        q: Tensor,
        rolled: RolledRows | None,
        inputs: AttentionInputs,
        kv: PagedKv,
        out: Tensor,
    ) -> None:
        """Decode rows through the decode kernel, the rest through prefill: [T, heads, head_dim]."""
        num_decode = inputs.num_decode
        if num_decode:
            decode_attention(
                q[:num_decode],
                kv,
                inputs.decode,
                scale=self.scale,
                window=self.window,
                softcap=self.softcap,
                out=out[:num_decode],
                rolling=None if rolled is None else rolled.decode,
                sink_scores=self.sink_scores,
            )
        if num_decode < q.shape[0]:
            prefill_attention(
                q[num_decode:],
                kv,
                inputs.prefill,
                scale=self.scale,
                window=self.window,
                softcap=self.softcap,
                out=out[num_decode:],
                rolling=None if rolled is None else rolled.prefill,
                sink_scores=self.sink_scores,
            )


def rows_for(weight: PackedLinear, x: Tensor, workspace: Workspace) -> Tensor | Int8Rows:
    """`x` as `weight` takes it: where that is int8, the codes overwrite `x`."""
    if not weight.takes_int8:
        return x
    rows = Int8Rows.inside(x, weight.group, workspace.row_scales, hadamard=weight.hadamard)
    return quantize_int8(x, out=rows)


class Mlp:
    """down(activation(gate(x)) * up(x)), gate and up in one matrix."""

    def __init__(self, gate_up: PackedLinear, down: PackedLinear, activation: Activation = "silu"):
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self.row_form = gate_up.row_form

    def __call__(self, x: Tensor | Int8Rows, workspace: Workspace) -> Tensor:
        """`x` [T, hidden], which may lie in R2 -> [T, hidden] in R2. Int8 rows: as `Attention`."""
        return gated_mlp(
            x,
            self.gate_up,
            self.down,
            workspace.gate_up,
            out=workspace.normed,
            scales=workspace.row_scales,
            activation=self.activation,
        )

    def adapted(
        self, x: Tensor | Int8Rows, plain: Tensor, workspace: Workspace, adapters: LayerRows
    ) -> Tensor:
        """`__call__` with the additions of `adapters`. `plain` [T, hidden]: `x`, not quantised."""
        deltas = adapters.deltas("gate_up", plain)
        both = deltas.add_to(linear(x, self.gate_up, out=workspace.gate_up[: x.shape[0]]))
        deltas = adapters.deltas("down", both, self._product)
        out = gated_down(
            both, self.down, workspace.normed, scales=workspace.row_scales,
            activation=self.activation,
        )  # fmt: skip
        return deltas.add_to(out)

    def _product(self, both: Tensor) -> Tensor:
        """activation(gate) * up of `both` [T, 2I], in new memory: [T, I]."""
        gate = both.new_empty(both.shape[0], both.shape[1] // 2)
        return act_mul(both, gate, self.activation)


@dataclass(frozen=True, slots=True)
class LogitScaling:
    """What becomes of the head's products: a division, then a soft cap; 1 and 0: nothing."""

    divisor: float
    softcap: float

    @classmethod
    def of(cls, config: ModelConfig) -> LogitScaling:
        return cls(config.logits_divisor, config.logits_softcap)

    def apply_(self, logits: Tensor) -> Tensor:
        """In place, of fp32 [R, vocab]."""
        if self.divisor != 1.0:
            logits.div_(self.divisor)
        return soft_cap_(logits, self.softcap) if self.softcap else logits
