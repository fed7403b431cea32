"""Builds a Decoder: takes each weight that a configuration implies, and packs it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.cpu import huge_pages
from penstock.kernels.matmul import pack_linear
from penstock.kernels.types import PackedLinear
from penstock.workers.errors import InvariantError
from penstock.workers.experts.fused import expert_biases, fused_expert
from penstock.workers.experts.lookahead import RoutedLayer
from penstock.workers.experts.routed import RoutedExperts
from penstock.workers.families.table import FAMILIES
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.decoder_layer import DecoderLayer
from penstock.workers.models.layers import Attention, Mlp
from penstock.workers.models.linear_attention import LinearAttention
from penstock.workers.models.linear_build import build_linear_attention, gates_last
from penstock.workers.models.linears import Linears, Weight
from penstock.workers.models.moe import MoeMlp
from penstock.workers.models.shards.decoder import ShardDecoder
from penstock.workers.models.shards.layers import ShardAttention, ShardMlp
from penstock.workers.models.shards.linear import ShardLinearAttention
from penstock.workers.models.shards.moe import (
    AbsentExperts,
    ColumnMoe,
    HeldExperts,
    OwnExperts,
    ShardMoe,
)
from penstock.workers.models.shards.rank import Rank
from penstock.workers.models.stages.decoder import StageDecoder, no_embedding
from penstock.workers.models.stages.stage import Stage
from penstock.workers.models.weight_summary import linears_of
from penstock.workers.packed.parts import PackedParts
from penstock.workers.quantization import WeightPlan
from penstock.workers.weights.joined import selected
from penstock.workers.weights.sources import DTYPES, WeightSource
from penstock.workers.weights.stored import has_fused_experts

RETURN_BYTES = 128 << 20  # of packed weights, after which freed memory goes back to the system


def build_decoder(
    config: ModelConfig,
    source: WeightSource,
    plan: WeightPlan | None = None,
    routed: RoutedExperts | None = None,
    *,
    may_lack_head: bool = False,
    rank: Rank | None = None,
    in_part: frozenset[str] = frozenset(),
    beside: ShardDecoder | None = None,
    parts: PackedParts | None = None,
) -> Decoder:
    """Take each weight that `config` implies from `source`, fuse, quantise as `plan` says, pack.

    With `routed`, MoE layers use its experts, which are not taken from `source`. With
    `may_lack_head`, a model whose head is neither stored nor tied does not generate, but embeds.
    `rank`: what this rank of a group has; `in_part`: modules of which `source` has only that;
    `beside`: as of load_model. `parts`: has those that need not be taken from `source`.
    """
    builder = _Builder(config, source, plan or WeightPlan(), routed, rank, in_part, beside, parts)
    return builder.decoder(may_lack_head)


def build_attention(config: ModelConfig, source: WeightSource, layer: int) -> Attention:
    """The attention of one layer, its weights as `source` has them."""
    if config.is_linear(layer):
        raise InvariantError("a layer with linear attention has no other")
    return _Builder(config, source, WeightPlan(), None).attention(layer)


def build_mlp(config: ModelConfig, source: WeightSource, layer: int) -> Mlp | MoeMlp:
    """The MLP of one layer, likewise."""
    return _Builder(config, source, WeightPlan(), None).mlp(layer)


class _Builder:
    """Builds one decoder."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        plan: WeightPlan,
        routed: RoutedExperts | None,
        rank: Rank | None = None,
        in_part: frozenset[str] = frozenset(),
        beside: ShardDecoder | None = None,
        parts: PackedParts | None = None,
    ):
        self.rank, self.beside = rank, beside
        self.shard = None if rank is None else rank.shard_of(config)
        self.stage = Stage(0, 1, config.num_layers) if rank is None else rank.stage_of(config)
        self.routed = routed
        self.config = config
        self.family = FAMILIES[config.architecture]
        self.names = self.family.names
        self.source = source
        self.plan = plan
        self.parts = PackedParts({}) if parts is None else parts
        self.linears = Linears(config, source, plan, self.shard, in_part, self.parts)

    def decoder(self, may_lack_head: bool) -> Decoder:
        config = self.config
        if not self.stage.is_first:
            device = torch.device(self.source.device)
            embedding = no_embedding(config.hidden_size, DTYPES[config.dtype], device)
            return self._joined(self._layers(), embedding, None, None, generates=True)
        table, head, generates = self._ends(may_lack_head)
        vocab, hidden = config.vocab_size, config.hidden_size
        embedding = self.parts.tensor(
            "embedding", lambda: self.source.take(f"{table}.weight", vocab, hidden)
        )
        # Before the layers: what it takes to pack the largest matrix is free for them again.
        lm_head = self.parts.linear("head", lambda: self._packed_head(table, head, embedding))
        layers = self._layers()
        final_norm = self._norm("model.norm", hidden)
        return self._joined(layers, embedding, final_norm, lm_head, generates)

    def _layers(self) -> list[DecoderLayer]:
        layers, num_bytes = [], 0
        for index in self.stage.layers:
            layer = self._layer(index)
            layers.append(layer)
            num_bytes += sum(each.num_bytes for each in linears_of([layer]))
            if num_bytes > RETURN_BYTES:  # else what was read piles up, to half a model
                huge_pages.return_freed()
                num_bytes = 0
        return layers

    def _ends(self, may_lack_head: bool) -> tuple[str, str, bool]:
        """The names of the embedding and of the head, and whether the head is one of its own."""
        config, source = self.config, self.source
        table, head = "model.embed_tokens", "lm_head"
        if config.tie_word_embeddings:
            # Either may be left out; if both are stored and differ, both are used.
            table = table if source.has_linear(table) else head
            head = head if source.has_linear(head) else table
        generates = config.tie_word_embeddings or not may_lack_head or source.has_linear(head)
        return table, head if generates else table, generates  # one that is never asked is no copy

    def _packed_head(self, table: str, head: str, embedding: Tensor) -> PackedLinear:
        output: Weight = embedding
        if head != table:
            output = self.linears.stored(head, *embedding.shape)
            if isinstance(output, Tensor) and torch.equal(output.to(embedding.dtype), embedding):
                output = embedding  # one copy where the packed form can share it
        return self.linears.packed_head(head, output)

    def _joined(
        self,
        layers: list[DecoderLayer],
        embedding: Tensor,
        final_norm: Tensor | None,
        lm_head: PackedLinear | None,
        generates: bool,
    ) -> Decoder:
        if self.routed is not None:
            self.routed.look_ahead_by(
                [
                    RoutedLayer(index, layer.mlp_norm, layer.mlp.choose)
                    for index, layer in zip(self.stage.layers, layers, strict=True)
                    if isinstance(layer.mlp, MoeMlp) and layer.mlp_norm is not None
                ]
            )
        if self.rank is None or self.shard is None:
            return Decoder(
                self.config, embedding, layers, final_norm, lm_head, self.routed,
                generates=generates,
            )  # fmt: skip
        beside = self.beside
        exchange = (
            self.rank.exchange_for(self.config, embedding.device)
            if beside is None
            else beside.exchange
        )
        for layer in layers:
            for part in (layer.mixer, layer.mlp):
                kinds = ShardAttention | ShardLinearAttention | ShardMlp | ShardMoe | ColumnMoe
                assert isinstance(part, kinds)
                part.join(self.shard, exchange)
        ends = embedding, layers, final_norm, lm_head
        if self.rank.num_stages == 1:
            return ShardDecoder(
                self.shard, exchange, *ends, generates=generates, routed=self.routed
            )
        return StageDecoder(
            self.stage,
            beside.link if isinstance(beside, StageDecoder) else self.rank.link(),
            self.shard,
            exchange,
            *ends,
            generates=generates,
            routed=self.routed,
        )

    def _layer(self, index: int) -> DecoderLayer:
        names, place = self.names, self.config.norm_place

        def norm(name: str, is_there: bool) -> Tensor | None:
            hidden = self.config.hidden_size
            return self._norm(f"model.layers.{index}.{name}", hidden) if is_there else None

        return DecoderLayer(
            attention_norm=norm(names.attention_norm, place != "post"),
            mixer=self.mixer(index),
            attention_out_norm=norm(names.attention_out_norm, place != "pre"),
            mlp_norm=norm(names.mlp_norm, place != "post"),
            mlp=self.mlp(index),
            mlp_out_norm=norm(names.mlp_out_norm, place != "pre"),
        )

    def _norm(self, name: str, size: int) -> Tensor:
        """The weight of a norm, with the offset that its checkpoint leaves out."""
        dtype = torch.float32 if self.family.wide_norms else None
        weight = self.source.take(f"{name}.weight", size, dtype=dtype)
        return weight + self.config.norm_offset if self.config.norm_offset else weight

    def mlp(self, index: int) -> Mlp | MoeMlp:
        if self.config.moe_layers[index]:
            return self._moe(index)
        inner, bias = self.config.intermediate_size, self.config.mlp_bias
        return self._mlp(index, f"model.layers.{index}.mlp", inner, bias)

    def mixer(self, index: int) -> Attention | LinearAttention:
        """What makes the tokens of a layer see one another."""
        linear = self.config.linear_attention
        if linear is None or not self.config.is_linear(index):
            return self.attention(index)
        return build_linear_attention(
            self.config, linear, self.source, self.linears, self.plan, index
        )

    def attention(self, index: int) -> Attention:
        name = f"model.layers.{index}.self_attn"
        config = self.config
        hidden, dim = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        order, q_rows = None, q_size
        if config.attention_gate:  # stored beside each head's q; here after v
            q_rows = 2 * q_size
            own = config if self.shard is None else self.shard.own_config
            order = gates_last(own.num_heads, dim, 2 * own.num_kv_heads * dim)
        parts = {f"{name}.q_proj": q_rows, f"{name}.k_proj": kv_size, f"{name}.v_proj": kv_size}
        norms = None
        if config.qk_norm != "none":
            full = config.qk_norm == "full"
            norms = (
                self._norm(f"{name}.q_norm", q_size if full else dim),
                self._norm(f"{name}.k_norm", kv_size if full else dim),
            )
        stored_as = self.names.qkv and f"{name}.{self.names.qkv}"
        format = self.plan.of_sensitive(index, config.num_layers)
        qkv = self.linears.fused(parts, hidden, format, config.qkv_bias, stored_as, order)
        o = self.linears.fused({f"{name}.o_proj": hidden}, q_size, self.plan.of_o(), config.o_bias)
        sinks = None
        if config.attention_sinks:
            sinks = self.source.take(f"{name}.sinks", config.num_heads, dtype=torch.float32)
        if self.shard is None:
            return Attention(config, index, qkv, o, norms, sinks)
        if sinks is not None:
            sinks = sinks[self.shard.heads.first : self.shard.heads.end].contiguous()
        return ShardAttention(self.shard.own_config, index, qkv, o, norms, sinks)

    def _mlp(self, index: int, name: str, inner: int, bias: bool = False) -> Mlp:
        gate_up = {f"{name}.gate_proj": inner, f"{name}.up_proj": inner}
        down = {f"{name}.down_proj": self.config.hidden_size}
        kind = Mlp if self.shard is None else ShardMlp
        stored_as = self.names.gate_up and f"{name}.{self.names.gate_up}"
        return kind(
            self.linears.fused(gate_up, self.config.hidden_size, self.plan.format, bias, stored_as),
            self.linears.fused(
                down, inner, self.plan.of_sensitive(index, self.config.num_layers), bias
            ),
            self.config.activation,
        )

    def _moe(self, index: int) -> MoeMlp:
        config = self.config
        name = self.names.moe_block(index, self.source.__contains__)
        router, shared, bias = {f"{name}.{self.names.router}": config.num_experts}, None, None
        if config.shared_expert_intermediate_size:
            shared_name = f"{name}.{self.names.shared_expert}"
            shared = self._mlp(index, shared_name, config.shared_expert_intermediate_size)
            if config.shared_expert_gate:
                router[f"{name}.shared_expert_gate"] = 1
        if config.router.has_choice_bias:
            bias = self.source.take(
                f"{name}.{self.names.choice_bias}", config.num_experts, dtype=torch.float32
            )
        packed_router = self._router(router)
        if self.shard is None:
            if self.routed is not None:
                return MoeMlp(config, packed_router, self.routed.layer(index), shared, bias)
            experts = self._experts(name, range(config.num_experts))
            return MoeMlp(config, packed_router, experts, shared, bias)
        if self.shard.cuts_experts:
            experts = self._experts(name, range(config.num_experts))
            return ColumnMoe(config, packed_router, experts, shared, bias)
        span = self.shard.experts
        if self.routed is not None:
            own = OwnExperts(self.routed.layer(index), span)
            return ShardMoe(config, packed_router, own, shared, bias)
        if not span.size:
            absent = AbsentExperts(span.whole)
            return ShardMoe(config, packed_router, absent, shared, bias)
        held = HeldExperts(self._experts(name, range(span.first, span.end)), span)
        return ShardMoe(config, packed_router, held, shared, bias)

    def _router(self, parts: dict[str, int]) -> PackedLinear:
        """Of experts and perhaps of the shared expert's gate; never quantised."""
        config = self.config
        if not config.router.in_fp32:
            return self.linears.fused(parts, config.hidden_size, None, config.router.has_bias)
        rows = [
            self.source.take(f"{name}.weight", size, config.hidden_size, dtype=torch.float32)
            for name, size in parts.items()
        ]
        return pack_linear(torch.cat(rows))

    def _experts(self, name: str, numbers: range) -> list[tuple[PackedLinear, PackedLinear]]:
        """Experts stored as one matrix each, as published checkpoints do, or fused by layer."""
        config, source, format = self.config, self.source, self.plan.format
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        if has_fused_experts(source.__contains__, f"{name}.{self.names.fused_experts[0]}"):
            return self._fused_experts(name, numbers)
        gate, up, down = self.names.expert
        fused, experts = self.linears.fused, []
        for one in (f"{name}.experts.{number}" for number in numbers):
            both = {f"{one}.{gate}": inner, f"{one}.{up}": inner}
            last = {f"{one}.{down}": hidden}
            experts.append((fused(both, hidden, format), fused(last, inner, format)))
        return experts

    def _fused_experts(self, name: str, numbers: range) -> list[tuple[PackedLinear, PackedLinear]]:
        biases = expert_biases(self.source, self.config, name)
        return [self._fused_expert(name, number, biases) for number in numbers]

    def _fused_expert(
        self, name: str, expert: int, biases: tuple[Tensor, Tensor] | None
    ) -> tuple[PackedLinear, PackedLinear]:
        rows = None if self.shard is None else self.shard.expert_rows

        @functools.cache  # both are read at once
        def stored() -> Sequence[tuple[Weight, Tensor | None]]:
            weights = fused_expert(self.source, self.config, name, expert)
            own: list[Tensor | None] = [None, None]
            if biases is not None:
                own = [each[expert] for each in biases]
            if rows is not None:
                weights = selected(weights[0], rows[0]), selected(weights[1], rows[1])
                own = [None if bias is None else bias[r] for bias, r in zip(own, rows)]
            return list(zip(weights, own, strict=True))

        def linear(index: int, part: str) -> PackedLinear:
            return self.parts.linear(
                f"{name}.experts.{expert}.{part}",
                lambda: self.linears.packed(*stored()[index], self.plan.format),
            )

        return linear(0, "gate_up"), linear(1, "down")
