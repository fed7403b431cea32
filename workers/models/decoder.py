"""One pre-norm decoder for all supported model families, which differ in their ModelConfig only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.matmul import linear
from penstock.kernels.quant import Int8Rows, num_groups
from penstock.kernels.rowwise import rms_norm, rms_norm_int8
from penstock.kernels.types import PackedLinear, PagedKv
from penstock.workers.experts.modes import StepRows
from penstock.workers.experts.routed import RoutedExperts
from penstock.workers.memory.workspace import Workspace, activation_plan
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.decoder_layer import DecoderLayer
from penstock.workers.models.layers import AttentionInputs
from penstock.workers.models.rope import Rope
from penstock.workers.models.weight_summary import linears_of, weight_facts
from penstock.workers.stats import RankStats


class Decoder:
    """Token ids in, hidden states and logits out. Holds weights only, no state between calls."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        lm_head: PackedLinear,
        routed: RoutedExperts | None = None,
        *,
        generates: bool = True,
    ):
        """`generates`: False: it has no LM head of its own, and `logits` say nothing."""
        self.config = config
        self.generates = generates
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.embedding = embedding  # [vocab, hidden]
        self.layers = layers
        self.final_norm = final_norm
        self.lm_head = lm_head
        self.routed = routed  # None unless experts are served from a cache
        self.num_scales = max(  # of a row that is rounded to int8
            (num_groups(p.in_features, p.group) for p in linears_of(layers) if p.takes_int8),
            default=1,
        )
        self.plan = activation_plan(config, self.dtype, self.num_scales)
        slots = () if routed is None else routed.cache.table
        cached = [packed for slot in slots for packed in slot.widest]
        self.weights = weight_facts(layers, embedding, final_norm, lm_head, cached)
        self.rope = Rope(config.rope, config.max_position_embeddings, self.device)
        # Each layer's MLP output is added and normalised with the next layer's norm, which writes
        # int8 rows at once, in its form, if that layer takes them.
        self._next_norms = [layer.attention_norm for layer in layers[1:]] + [final_norm]
        parts = [part for layer in layers for part in (layer.attention, layer.mlp)]
        self._row_forms = [part.row_form for part in parts]

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        inputs: AttentionInputs,
        kv_layers: Sequence[PagedKv],
        workspace: Workspace | None = None,
        moe_rows: StepRows | None = None,
    ) -> Tensor:
        """Run one flat batch: `token_ids`, `positions` int64 [T] -> [T, hidden], final-normed.

        Writes K and V of all rows into `kv_layers` (one a layer, in this decoder's dtype or
        quantised) and reads the rest of each context from there. All arrays of T rows, the result
        included, lie in `workspace` (by default a new one). Every layer overwrites the scratch
        blocks of the layer before it. `moe_rows`: rows that are not exact, with an expert cache.
        """
        if workspace is None:
            workspace = Workspace.allocate(self.plan, len(token_ids), self.device)
        self.begin(token_ids, positions, inputs, workspace, moe_rows)
        return self.run_layers(inputs, kv_layers, workspace)

    def begin(
        self,
        token_ids: Tensor,
        positions: Tensor,
        inputs: AttentionInputs,
        ws: Workspace,
        moe_rows: StepRows | None = None,
    ) -> None:
        """Write the layers' inputs into the workspace: embeddings, cos and sin."""
        if self.routed is not None:
            self.routed.rows = moe_rows
        self.rope.write_tables(positions, ws.cos, ws.sin, ws.angles, ws.turned)
        if inputs.rolling is not None:
            self.rope.write_tables(
                inputs.rolling.sink_positions, ws.sink_cos, ws.sink_sin, ws.angles, ws.turned
            )
        torch.index_select(self.embedding, 0, token_ids, out=ws.residual)

    def run_layers(
        self, inputs: AttentionInputs, kv_layers: Sequence[PagedKv], ws: Workspace
    ) -> Tensor:
        """The rest of `forward`, after `begin`: `ws.normed` [T, hidden]."""
        eps, hidden = self.config.rms_norm_eps, ws.residual
        first = self.layers[0]
        of_form = {  # the codes lie in the same memory, whatever groups they have
            form: Int8Rows.inside(ws.normed, form[0], ws.row_scales, hadamard=form[1])
            for form in set(self._row_forms)
            if form is not None
        }
        rows = [None if form is None else of_form[form] for form in self._row_forms] + [None]
        rolled = None
        if inputs.rolling is not None:
            q_sink = self.sink_queries(ws).unflatten(1, (-1, self.config.head_dim))
            rolled = inputs.rolling.split(q_sink, inputs.num_decode)
        x: Tensor | Int8Rows
        if rows[0] is not None:
            x = rms_norm_int8(hidden, first.attention_norm, eps, out=rows[0])
        else:
            x = rms_norm(hidden, first.attention_norm, eps, out=ws.normed)
        for layer, next_norm, mlp_rows, next_rows, cache in zip(
            self.layers, self._next_norms, rows[1::2], rows[2::2], kv_layers, strict=True
        ):
            y = layer.attention(x, ws, inputs, cache, rolled)
            x = self._add_norm(y, layer.mlp_norm, ws, mlp_rows)
            y = layer.mlp(x, ws)
            x = self._add_norm(y, next_norm, ws, next_rows)
        return ws.normed

    def ranks(self) -> tuple[RankStats, ...]:
        """Of a group of processes, each of them; none of one alone."""
        return ()

    def close(self) -> None:
        """End what computes beside this process: threads that copy experts, other ranks."""
        if self.routed is not None:
            self.routed.close()

    def sink_queries(self, ws: Workspace) -> Tensor:
        """[T, heads * head_dim], for the queries that are turned towards the sinks."""
        return ws.q_sink

    def _add_norm(
        self, y: Tensor, weight: Tensor, ws: Workspace, rows: Int8Rows | None
    ) -> Tensor | Int8Rows:
        """The residual stream grows by `y`; its norm lies where the last one did, maybe as int8."""
        hidden, eps = ws.residual, self.config.rms_norm_eps
        if rows is not None:
            return rms_norm_int8(y, weight, eps, residual=hidden, out=rows, total=hidden)
        return rms_norm(y, weight, eps, residual=hidden, out=ws.normed, total=hidden)[0]

    @torch.inference_mode()
    def logits(
        self, hidden: Tensor, out: Tensor | None = None, narrow: Tensor | None = None
    ) -> Tensor:
        """`hidden` [R, hidden] as `forward` returns it -> fp32 [R, vocab], in `out` if given.

        `narrow` [R, vocab] of the model's dtype holds them before, where that is not fp32.
        """
        if out is None:
            return linear(hidden, self.lm_head).float()
        if self.dtype == torch.float32:
            return linear(hidden, self.lm_head, out=out)
        return out.copy_(linear(hidden, self.lm_head, out=narrow))
