"""Loads a model: finds its checkpoint by name, and packs the tensors into a Decoder."""

from __future__ import annotations

import dataclasses
import logging
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.matmul import pack_linear
from penstock.kernels.quant import INT8_GROUP, QuantizedWeight
from penstock.kernels.types import PackedLinear
from penstock.workers.errors import ConfigError
from penstock.workers.experts.build import ExpertSettings, build_experts
from penstock.workers.experts.fused import expert_biases, fused_expert
from penstock.workers.experts.lookahead import RoutedLayer
from penstock.workers.experts.routed import RoutedExperts
from penstock.workers.families.table import FAMILIES
from penstock.workers.gguf.header import find_gguf
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.decoder_layer import DecoderLayer
from penstock.workers.models.layers import Attention, Mlp
from penstock.workers.models.moe import MoeMlp
from penstock.workers.models.shards.layers import (
    HeldExperts,
    ShardAttention,
    ShardDecoder,
    ShardMlp,
    ShardMoe,
)
from penstock.workers.models.shards.rank import Rank
from penstock.workers.models.shards.reading import own_part
from penstock.workers.models.shards.shard import Shard, cut
from penstock.workers.progress import LOADING, Report, counted, showing, told
from penstock.workers.quantization import (
    INT4,
    QUANTIZED_FORMATS,
    Int4Options,
    QuantizedFormat,
    WeightPlan,
    weight_plan,
)
from penstock.workers.weights.checkpoint import StoredTensor, is_headless, open_checkpoint
from penstock.workers.weights.gguf import open_gguf
from penstock.workers.weights.hub import resolve_model
from penstock.workers.weights.joined import joined, selected
from penstock.workers.weights.sources import (
    DTYPES,
    CheckpointWeights,
    RandomWeights,
    WeightSource,
    planned,
)
from penstock.workers.weights.stored import has_fused_experts

log = logging.getLogger("penstock.loader")


def load_model(
    path_or_id: str | Path,
    *,
    weights: str = "auto",
    quantize_o: bool = True,
    quantize_lm_head: bool = False,
    int8_group: int | None = INT8_GROUP,
    int4: Int4Options = INT4,
    dtype: str = "auto",
    device: str = "cpu",
    progress: bool | Report = True,
    experts: ExpertSettings | None = None,
    rank: Rank | None = None,
    max_model_len: int | None = None,
) -> Decoder:
    """Load a checkpoint into a Decoder, tensor by tensor: peak memory is one model and one layer.

    `weights`: "auto" (as the checkpoint), "fp32", "bf16", or int8, int4, nf4 or fp8: linear layers
    are quantised while they load, o_proj with `quantize_o` and the head with `quantize_lm_head`. A
    checkpoint that is already quantised is served as stored, but for a plain head with
    `quantize_lm_head`; or dequantised with "fp32" and "bf16".
    `int8_group`: inputs of int8 weights whose activations share a scale; None: a whole row.
    `dtype`: of activations and of weights that are not quantised: "auto" is the checkpoint's (fp16
    becomes bf16 or fp32 on a CPU), or `weights` if that is a float format. `progress`: who is told
    of it; True: a bar if stderr is a terminal; False: nobody. With `experts`, routed experts stay
    in host memory and are served from an expert cache, which `Decoder.close` ends. `rank`: load
    only what this rank of a group computes. `max_model_len`: the longest context that is served,
    which decides between the rotary embeddings of LongRoPE; None: the model's positions. Raises
    ConfigError for an unusable config and LoadError, naming file and tensor, for weights that do
    not match it.
    """
    folder, config, tensors = open_model(
        str(path_or_id), weights if dtype == "auto" else dtype, device
    )
    config = config.for_length(max_model_len)
    plan = weight_plan(config.stored_scheme, weights, quantize_o, quantize_lm_head)
    plan = dataclasses.replace(plan, int8_group=int8_group, int4=int4)
    routed, in_expert_file = None, set[str]()
    if experts is not None:
        routed, in_expert_file = build_experts(
            experts, folder, config, tensors, torch.device(device), weights, int8_group, int4
        )
    may_lack_head, in_part = is_headless(tensors), frozenset[str]()
    if rank is not None:
        tensors, in_part = own_part(tensors, Shard(config, rank.number, rank.num_ranks))
    elsewhere = in_expert_file | _of_more_layers(config, tensors)
    total = sum(each.num_bytes for name, each in tensors.items() if name not in elsewhere)
    with showing(told(progress)) as report:
        source = CheckpointWeights(
            folder,
            tensors,
            config.dtype,
            device,
            counted(report, LOADING, total),
            scheme=config.stored_scheme,
            dequantize=config.stored_scheme is not None and config.stored_scheme.is_opened(weights),
        )
        decoder = build_decoder(
            config, source, plan, routed, may_lack_head=may_lack_head, rank=rank, in_part=in_part
        )
    source.warn_of_unused(elsewhere)
    log.info("%s: %s; activations are %s", folder.name, decoder.weights, config.dtype)
    return decoder


def _of_more_layers(config: ModelConfig, tensors: dict[str, StoredTensor]) -> set[str]:
    """Names of tensors of layers after the last one, which predict further tokens."""
    if not FAMILIES[config.architecture].more_layers:
        return set()

    def number(name: str) -> int:
        layer = name.removeprefix("model.layers.").split(".", 1)[0]
        return int(layer) if name.startswith("model.layers.") and layer.isdigit() else -1

    return {name for name in tensors if number(name) >= config.num_layers}


def open_model(
    name: str, weights: str, device: str
) -> tuple[Path, ModelConfig, dict[str, StoredTensor]]:
    """Folder, config and tensors of a model; `config.dtype` is `weights` if that is a float format.

    Reads no tensor. Raises as `load_model` does.
    """
    folder = resolve_model(name)
    config = ModelConfig.from_pretrained(folder)
    gguf = find_gguf(folder)
    tensors = open_checkpoint(folder) if gguf is None else open_gguf(gguf)
    if config.dtype == "auto":
        config = dataclasses.replace(config, dtype=_stored_dtype(tensors))
    return folder, _with_dtype(config, weights, torch.device(device)), tensors


def build_random(
    config: ModelConfig,
    weights: str = "auto",
    seed: int = 0,
    device: str = "cpu",
    *,
    quantize_o: bool = True,
    quantize_lm_head: bool = False,
    int8_group: int | None = INT8_GROUP,
    int4: Int4Options = INT4,
) -> Decoder:
    """A decoder with random weights (normal, standard deviation 0.02), for benchmarks."""
    config = dataclasses.replace(config, dtype="fp32") if config.dtype == "auto" else config
    config = dataclasses.replace(config, stored_scheme=None)
    plan = weight_plan(None, weights, quantize_o, quantize_lm_head)
    plan = dataclasses.replace(plan, int8_group=int8_group, int4=int4)
    config = _with_dtype(config, weights, torch.device(device))
    return build_decoder(config, RandomWeights(config, seed, device), plan)


def build_decoder(
    config: ModelConfig,
    source: WeightSource,
    plan: WeightPlan | None = None,
    routed: RoutedExperts | None = None,
    *,
    may_lack_head: bool = False,
    rank: Rank | None = None,
    in_part: frozenset[str] = frozenset(),
) -> Decoder:
    """Take each weight that `config` implies from `source`, fuse, quantise as `plan` says, pack.

    With `routed`, MoE layers use its experts, which are not taken from `source`. With
    `may_lack_head`, a model whose head is neither stored nor tied does not generate, but embeds.
    `rank`: what this rank of a group has; `in_part`: modules of which `source` has only that.
    """
    builder = _Builder(config, source, plan or WeightPlan(), routed, rank, in_part)
    return builder.decoder(may_lack_head)


def build_attention(config: ModelConfig, source: WeightSource, layer: int) -> Attention:
    """The attention of one layer, its weights as `source` has them."""
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
    ):
        self.rank, self.in_part = rank, in_part
        self.shard = None if rank is None else Shard(config, rank.number, rank.num_ranks)
        self.routed = routed
        self.config = config
        self.family = FAMILIES[config.architecture]
        self.names = self.family.names
        self.source = source
        self.plan = plan
        self.dtype = DTYPES[config.dtype]

    def decoder(self, may_lack_head: bool) -> Decoder:
        config, source = self.config, self.source
        vocab, hidden = config.vocab_size, config.hidden_size
        table, head = "model.embed_tokens", "lm_head"
        if config.tie_word_embeddings:
            # Either may be left out; if both are stored and differ, both are used.
            table = table if source.has_linear(table) else head
            head = head if source.has_linear(head) else table
        generates = config.tie_word_embeddings or not may_lack_head or source.has_linear(head)
        if not generates:
            head = table  # takes no memory, and is never asked
        embedding = source.take(f"{table}.weight", vocab, hidden)
        output: Tensor | QuantizedWeight = embedding
        if head != table:
            output = source.take_linear(head, self._num_rows(head, vocab), hidden)
            if isinstance(output, Tensor) and torch.equal(output.to(self.dtype), embedding):
                output = embedding  # one copy where the packed form can share it
        layers = [self._layer(index) for index in range(config.num_layers)]
        if self.routed is not None:
            self.routed.look_ahead_by(
                [
                    RoutedLayer(index, layer.mlp_norm, layer.mlp.choose)
                    for index, layer in enumerate(layers)
                    if isinstance(layer.mlp, MoeMlp) and layer.mlp_norm is not None
                ]
            )
        final_norm = self._norm("model.norm", hidden)
        if self.rank is not None and self.shard is not None:
            if head not in self.in_part:
                output = cut(output, self.shard.vocab)
            own = self._packed(output, None, self.plan.head)
            exchange = self.rank.exchange_for(config, embedding.device)
            for layer in layers:
                for part in (layer.attention, layer.mlp):
                    assert isinstance(part, ShardAttention | ShardMlp | ShardMoe)
                    part.join(self.shard, exchange)
            return ShardDecoder(
                self.shard, exchange, embedding, layers, final_norm, own, generates=generates
            )
        lm_head = self._packed(output, None, self.plan.head)
        return Decoder(
            config, embedding, layers, final_norm, lm_head, self.routed, generates=generates
        )

    def _layer(self, index: int) -> DecoderLayer:
        names, place = self.names, self.config.norm_place

        def norm(name: str, is_there: bool) -> Tensor | None:
            hidden = self.config.hidden_size
            return self._norm(f"model.layers.{index}.{name}", hidden) if is_there else None

        return DecoderLayer(
            attention_norm=norm(names.attention_norm, place != "post"),
            attention=self.attention(index),
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
        return self._mlp(f"model.layers.{index}.mlp", inner, bias)

    def attention(self, index: int) -> Attention:
        name = f"model.layers.{index}.self_attn"
        config = self.config
        hidden, dim = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        parts = {f"{name}.q_proj": q_size, f"{name}.k_proj": kv_size, f"{name}.v_proj": kv_size}
        norms = None
        if config.qk_norm != "none":
            full = config.qk_norm == "full"
            norms = (
                self._norm(f"{name}.q_norm", q_size if full else dim),
                self._norm(f"{name}.k_norm", kv_size if full else dim),
            )
        stored_as = self.names.qkv and f"{name}.{self.names.qkv}"
        qkv = self._fused(parts, hidden, self.plan.format, config.qkv_bias, stored_as)
        o = self._fused({f"{name}.o_proj": hidden}, q_size, self.plan.of_o(), config.o_bias)
        sinks = None
        if config.attention_sinks:
            sinks = self.source.take(f"{name}.sinks", config.num_heads, dtype=torch.float32)
        if self.shard is None:
            return Attention(config, index, qkv, o, norms, sinks)
        if sinks is not None:
            sinks = sinks[self.shard.heads.first : self.shard.heads.end].contiguous()
        return ShardAttention(self.shard.own_config, index, qkv, o, norms, sinks)

    def _mlp(self, name: str, inner: int, bias: bool = False) -> Mlp:
        gate_up = {f"{name}.gate_proj": inner, f"{name}.up_proj": inner}
        down = {f"{name}.down_proj": self.config.hidden_size}
        kind = Mlp if self.shard is None else ShardMlp
        stored_as = self.names.gate_up and f"{name}.{self.names.gate_up}"
        return kind(
            self._fused(gate_up, self.config.hidden_size, self.plan.format, bias, stored_as),
            self._fused(down, inner, self.plan.format, bias),
            self.config.activation,
        )

    def _moe(self, index: int) -> MoeMlp:
        config = self.config
        name = self.names.moe_block(index, self.source.__contains__)
        router, shared, bias = {f"{name}.{self.names.router}": config.num_experts}, None, None
        if config.shared_expert_intermediate_size:
            shared = self._mlp(
                f"{name}.{self.names.shared_expert}", config.shared_expert_intermediate_size
            )
            if config.shared_expert_gate:
                router[f"{name}.shared_expert_gate"] = 1
        if config.router.has_choice_bias:
            bias = self.source.take(
                f"{name}.{self.names.choice_bias}", config.num_experts, dtype=torch.float32
            )
        packed_router = self._router(router)
        if self.routed is not None:
            return MoeMlp(config, packed_router, self.routed.layer(index), shared, bias)
        if self.shard is None:
            experts = self._experts(name, range(config.num_experts))
            return MoeMlp(config, packed_router, experts, shared, bias)
        span = self.shard.experts
        own = HeldExperts(self._experts(name, range(span.first, span.end)), span)
        return ShardMoe(config, packed_router, own, shared, bias)

    def _router(self, parts: dict[str, int]) -> PackedLinear:
        """Of experts and perhaps of the shared expert's gate; never quantised."""
        config = self.config
        if not config.router.in_fp32:
            return self._fused(parts, config.hidden_size, None, config.router.has_bias)
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
        experts = []
        for one in (f"{name}.experts.{number}" for number in numbers):
            both = {f"{one}.{gate}": inner, f"{one}.{up}": inner}
            last = {f"{one}.{down}": hidden}
            experts.append((self._fused(both, hidden, format), self._fused(last, inner, format)))
        return experts

    def _fused_experts(self, name: str, numbers: range) -> list[tuple[PackedLinear, PackedLinear]]:
        biases, experts = expert_biases(self.source, self.config, name), []
        for expert in numbers:
            weights = fused_expert(self.source, self.config, name, expert)
            own = [None, None] if biases is None else [each[expert] for each in biases]
            gate_up, down = (
                self._packed(weight, bias, self.plan.format)
                for weight, bias in zip(weights, own, strict=True)
            )
            experts.append((gate_up, down))
        return experts

    def _fused(
        self,
        parts: dict[str, int],
        in_features: int,
        format: QuantizedFormat | None,
        bias: bool = False,
        stored_as: str | None = None,
    ) -> PackedLinear:
        """Linears over the same input as one packed matrix. `parts`: name -> out features.

        `stored_as`: the name under which all of them may be stored, one after the other."""
        stored = parts
        if stored_as is not None and self.source.has_linear(stored_as):
            stored = {stored_as: sum(parts.values())}
        take = self.source.take
        weights = [
            self.source.take_linear(name, self._num_rows(name, size), in_features)
            for name, size in stored.items()
        ]
        biases = [take(f"{name}.bias", size) for name, size in stored.items()] if bias else []
        if self.shard is not None or self.family.adjacent_pairs:
            rows = [self._rows(name, size) for name, size in parts.items()]
            if len(stored) < len(parts):
                starts = accumulate(parts.values(), initial=0)
                rows = [torch.cat([each + start for each, start in zip(rows, starts)])]
            weights = [
                selected(weight, each - self._first_row(name))
                if name not in self.in_part or self.family.adjacent_pairs
                else weight
                for name, weight, each in zip(stored, weights, rows, strict=True)
            ]
            biases = [each_bias[each] for each_bias, each in zip(biases, rows)]
        return self._packed(joined(weights), torch.cat(biases) if bias else None, format)

    def _rows(self, module: str, size: int) -> Tensor:
        """Which of the stored outputs of a linear are computed here, in which order."""
        rows = torch.arange(size, device=self.source.device)
        if self.family.adjacent_pairs and module.endswith((".q_proj", ".k_proj")):
            heads = rows.view(-1, self.config.head_dim)
            turning, rest = heads.tensor_split([self.config.rotary_dim], dim=1)
            rows = torch.cat([turning[:, 0::2], turning[:, 1::2], rest], dim=1).flatten()
        span = None if self.shard is None else self.shard.rows_of(module)
        return rows if span is None else rows[span.first : span.end]

    def _num_rows(self, module: str, size: int) -> int:
        """How many rows the source has of a weight: all, or this rank's."""
        span = None if self.shard is None else self.shard.rows_of(module)
        return span.size if span is not None and module in self.in_part else size

    def _first_row(self, module: str) -> int:
        """The number of the first of them."""
        span = None if self.shard is None else self.shard.rows_of(module)
        return span.first if span is not None and module in self.in_part else 0

    def _packed(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, format: QuantizedFormat | None
    ) -> PackedLinear:
        return pack_linear(self._planned(weight, format), bias)

    def _planned(
        self, weight: Tensor | QuantizedWeight, format: QuantizedFormat | None
    ) -> Tensor | QuantizedWeight:
        return planned(weight, format, self.dtype, self.plan.int8_group, self.plan.int4)


def _with_dtype(config: ModelConfig, dtype: str, device: torch.device) -> ModelConfig:
    """With `dtype` for activations; the checkpoint's if `dtype` is not a float format."""
    if dtype not in DTYPES and dtype not in ("auto", *QUANTIZED_FORMATS):
        known = ", ".join((*DTYPES, *QUANTIZED_FORMATS))
        raise ConfigError(f"weights {dtype!r} is unknown; known are auto, {known}")
    dtype = dtype if dtype in DTYPES else config.dtype
    if dtype == "fp16" and device.type == "cpu":
        # CPUs multiply fp16 slowly or not at all.
        dtype = "bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32"
        log.info("fp16 weights become %s on this CPU; ask for fp32 to keep every bit", dtype)
    return dataclasses.replace(config, dtype=dtype)


def _stored_dtype(tensors: dict[str, StoredTensor]) -> str:
    """The dtype of most bytes of the checkpoint, for configs that do not name one."""
    names = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
    num_bytes = dict.fromkeys(names, 0)
    for stored in tensors.values():
        if stored.dtype in num_bytes:
            num_bytes[stored.dtype] += stored.num_bytes
    return names[max(num_bytes, key=lambda dtype: num_bytes[dtype])]
