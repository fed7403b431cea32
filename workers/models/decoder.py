"""One decoder for all supported model families, which differ in their ModelConfig only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.matmul import linear
from penstock.kernels.quant import Int8Rows, num_groups
from penstock.kernels.rowwise import quantize_int8, rms_norm, rms_norm_int8
from penstock.kernels.types import PackedLinear
from penstock.workers.adapters.packed import AdapterPart
from penstock.workers.adapters.step import StepAdapters
from penstock.workers.errors import InvariantError
from penstock.workers.experts.expert_file import Manifest
from penstock.workers.experts.modes import Modes, StepRows
from penstock.workers.experts.routed import RoutedExperts
from penstock.workers.memory.workspace import BufferPlan, Workspace, activation_plan
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.decoder_layer import DecoderLayer
from penstock.workers.models.host_batch import HostBatch
from penstock.workers.models.layers import AttentionInputs, LayerCache, LogitScaling, Turn
from penstock.workers.models.linear_attention import LinearAttention
from penstock.workers.models.moe import MoeMlp
from penstock.workers.models.rope import Rope, write_query_scales
from penstock.workers.models.weight_summary import linears_of, weight_facts
from penstock.workers.stats import ExpertStats, RankStats


class Decoder:
    """Token ids in, hidden states and logits out. Holds weights only, no state between calls."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor | None,
        lm_head: PackedLinear | None,
        routed: RoutedExperts | None = None,
        *,
        generates: bool = True,
    ):
        """`generates`: False: it has no LM head of its own, and `logits` say nothing. Without
        `final_norm` or `lm_head`, another process computes what comes after the layers."""
        self.config = config
        self.whole_config = config  # of the model, of which a group's rank has a part
        self.generates = generates
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.embedding = embedding  # [vocab, hidden]
        self.layers = layers
        self._final_norm = final_norm
        self._lm_head = lm_head
        self.routed = routed  # None unless experts are served from a cache
        # On this rank, or on any rank of its group: then rows of a step may be inexact.
        self.has_expert_caches = routed is not None
        self.num_scales = max(  # of a row that is rounded to int8
            (num_groups(p.in_features, p.group) for p in linears_of(layers) if p.takes_int8),
            default=1,
        )
        self.plan = activation_plan(config, self.dtype, self.num_scales)
        slots = () if routed is None else routed.cache.table
        cached = [packed for slot in slots for packed in slot.widest]
        self.weights = weight_facts(layers, embedding, final_norm, lm_head, cached)
        context = config.max_position_embeddings
        self.ropes = [Rope(each, context, self.device) for each in config.ropes]
        self.logit_scaling = LogitScaling.of(config)
        # Rounded as the models' own code has it: a scalar of the activations' dtype.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self.dtype))
        # Each layer's MLP output is added and normalised with the next layer's norm, which writes
        # int8 rows at once, in its form, if that layer takes them. Without such a norm the rows are
        # those of the residual stream.
        self._next_norms = [*(layer.attention_norm for layer in layers[1:]), final_norm]
        parts = [part for layer in layers for part in (layer.mixer, layer.mlp)]
        self._row_forms = [part.row_form for part in parts]
        self._ropes_of = [config.rope_of(index) for index in range(len(layers))]

    @property
    def final_norm(self) -> Tensor:
        """On a process that computes what comes after the layers, as `lm_head`."""
        if self._final_norm is None:
            raise InvariantError("this stage has no final norm")
        return self._final_norm

    @property
    def lm_head(self) -> PackedLinear:
        if self._lm_head is None:
            raise InvariantError("this stage has no LM head")
        return self._lm_head

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        inputs: AttentionInputs,
        kv_layers: Sequence[LayerCache],
        workspace: Workspace | None = None,
        moe_rows: StepRows | None = None,
    ) -> Tensor:
        """Run one flat batch: `token_ids`, `positions` int64 [T] -> [T, hidden], final-normed.

        Writes K and V of all rows into `kv_layers` (one a layer, in this decoder's dtype or
        quantised) and reads the rest of each context from there; of a layer with linear attention
        it holds the states in their slots. All arrays of T rows, the result
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
        """Write the layers' inputs into the workspace: embeddings, cos and sin, query scales."""
        self.use_rows(moe_rows)
        self.write_tables(positions, inputs, ws)
        self.embed(token_ids, ws)

    def use_rows(self, rows: StepRows | None) -> None:
        """Set which rows of the next pass over the layers are not exact. None: all are exact."""
        if self.routed is not None:
            self.routed.rows = rows

    def write_tables(self, positions: Tensor, inputs: AttentionInputs, ws: Workspace) -> None:
        """What depends on the positions alone."""
        for rope, turn in zip(self.ropes, Turn.all_in(ws, len(self.ropes))):
            rope.write_tables(positions, turn.cos, turn.sin, ws.angles, ws.turned)
            if inputs.rolling is not None:
                at = inputs.rolling.sink_positions
                rope.write_tables(at, turn.sink_cos, turn.sink_sin, ws.angles, ws.turned)
        if self.config.query_scaling is not None:
            write_query_scales(self.config.query_scaling, positions, ws.query_scales)

    def embed(self, token_ids: Tensor, ws: Workspace) -> None:
        torch.index_select(self.embedding, 0, token_ids, out=ws.residual)
        if self._embedding_scale != 1.0:
            ws.residual.mul_(self._embedding_scale)

    def run_layers(
        self,
        inputs: AttentionInputs,
        kv_layers: Sequence[LayerCache],
        ws: Workspace,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """The rest of `forward`, after `begin`: `ws.normed` [T, hidden]. `adapters`: of rows that
        have one."""
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
        turns = Turn.all_in(ws, len(self.ropes))
        x = self._first_norm(self.layers[0].attention_norm, ws, rows[0])
        for index, layer, rope, next_norm, mlp_rows, next_rows, cache in zip(
            range(len(self.layers)), self.layers, self._ropes_of, self._next_norms, rows[1::2],
            rows[2::2], kv_layers, strict=True,
        ):  # fmt: skip
            turn = None if rope is None else turns[rope]
            own = None if adapters is None else adapters.layer(index)
            if own is None or isinstance(layer.mixer, LinearAttention):
                y = layer.mixer(x, ws, inputs, cache, turn, rolled)
            else:
                plain = self._plain(x, layer.attention_norm, ws)
                y = layer.mixer.adapted(x, plain, ws, inputs, cache, turn, rolled, own)
            x = self._add_norm(y, layer.attention_out_norm, layer.mlp_norm, ws, mlp_rows)
            if own is None or isinstance(layer.mlp, MoeMlp):
                y = layer.mlp(x, ws)
            else:
                y = layer.mlp.adapted(x, self._plain(x, layer.mlp_norm, ws), ws, own)
            x = self._add_norm(y, layer.mlp_out_norm, next_norm, ws, next_rows)
        return ws.normed

    def _plain(self, x: Tensor | Int8Rows, weight: Tensor | None, ws: Workspace) -> Tensor:
        """`x`, which is the norm of the residual stream, not quantised: for adapters."""
        if isinstance(x, Tensor):
            return x
        if weight is None:
            return ws.residual
        return rms_norm(ws.residual, weight, self.config.rms_norm_eps)

    def announce(
        self,
        batch: HostBatch,
        token_ids: Tensor,
        adapters: StepAdapters | None = None,
        *,
        modes: Modes | None = None,
        is_graph: bool = False,
    ) -> None:
        """Called before each pass, or replay of a graph: a group's first rank tells the others.
        `token_ids` int64 [T]: on the device, where they are all known. `adapters`: those that
        `run_layers` is given. `modes`: of the rows; None: all are exact."""
        return

    @property
    def adapter_part(self) -> AdapterPart:
        """What this process keeps of an adapter."""
        return AdapterPart.whole(self.config)

    @property
    def parts(self) -> tuple[ModelConfig, ...]:
        """What each process of a group has of the model; of one alone, all."""
        return (self.config,)

    @property
    def plans(self) -> tuple[BufferPlan, ...]:
        """The activation plan of each of these processes."""
        return (self.plan,)

    def ranks(self) -> tuple[RankStats, ...]:
        """Of a group of processes, each of them; none of one alone."""
        return ()

    def expert_stats(self) -> ExpertStats | None:
        """Of the expert caches, those of all ranks of a group together; None: there are none."""
        return None if self.routed is None else self.routed.stats()

    def use_experts(self, manifest: Manifest, machine: int = 0) -> None:
        """Fill the expert caches of a machine, this one being 0, from another epoch of the file
        there. Raises LoadError if this one's has other experts."""
        if self.routed is not None and machine == 0:
            self.routed.use_experts(manifest)

    def close(self) -> None:
        """End what computes beside this process: threads that copy experts, other ranks."""
        if self.routed is not None:
            self.routed.close()

    def sink_queries(self, ws: Workspace) -> Tensor:
        """[T, heads * head_dim], for the queries that are turned towards the sinks."""
        return ws.q_sink

    def _first_norm(
        self, weight: Tensor | None, ws: Workspace, rows: Int8Rows | None
    ) -> Tensor | Int8Rows:
        """The input of the first layer: the norm of the embeddings, or these themselves."""
        hidden, eps = ws.residual, self.config.rms_norm_eps
        if weight is None:
            return hidden if rows is None else quantize_int8(hidden, out=rows)
        if rows is not None:
            return rms_norm_int8(hidden, weight, eps, out=rows)
        return rms_norm(hidden, weight, eps, out=ws.normed)

    def _add_norm(
        self,
        y: Tensor,
        out_norm: Tensor | None,
        next_norm: Tensor | None,
        ws: Workspace,
        rows: Int8Rows | None,
    ) -> Tensor | Int8Rows:
        """The residual stream grows by `y`, which may be normed and scaled before; its norm, or
        itself, is what comes next, maybe as int8, where the last one lay. One pass."""
        hidden, eps, factor = ws.residual, self.config.rms_norm_eps, self.config.residual_scale
        if rows is not None:
            return rms_norm_int8(
                y, next_norm, eps, residual=hidden, out=rows, total=hidden, post=out_norm,
                factor=factor,
            )  # fmt: skip
        return rms_norm(
            y, next_norm, eps, residual=hidden, out=ws.normed, total=hidden, post=out_norm,
            factor=factor,
        )[0]  # fmt: skip

    @torch.inference_mode()
    def logits(
        self, hidden: Tensor, out: Tensor | None = None, narrow: Tensor | None = None
    ) -> Tensor:
        """`hidden` [R, hidden] as `forward` returns it -> fp32 [R, vocab], in `out` if given.

        `narrow` [R, vocab] of the model's dtype holds them before, where that is not fp32.
        """
        if out is None:
            out = linear(hidden, self.lm_head).float()
        elif self.dtype == torch.float32:
            linear(hidden, self.lm_head, out=out)
        else:
            out.copy_(linear(hidden, self.lm_head, out=narrow))
        return self.logit_scaling.apply_(out)

    def graph_logits(self, hidden: Tensor, out: Tensor, narrow: Tensor) -> Tensor:
        """`logits` of all rows of a pass, within a graph."""
        return self.logits(hidden, out, narrow)
