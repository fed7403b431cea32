"""From a model's name to a Decoder: finds the checkpoint, and turns its tensors into packed layers.

Knows the names of tensors in checkpoints; nothing of the files' format, and nothing of engines.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from penstock.kernels.matmul import PackedLinear, pack_linear
from penstock.workers.config import ConfigError
from penstock.workers.experts.predictor import RoutedLayer
from penstock.workers.experts.routed import (
    CachedExperts,
    ExpertSettings,
    RoutedExperts,
    open_experts,
)
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.checkpoint import StoredTensor, find_tensor, open_checkpoint
from penstock.workers.models.decoder import Decoder, DecoderLayer
from penstock.workers.models.folder import resolve_model
from penstock.workers.models.layers import Attention, Mlp
from penstock.workers.models.moe import MoeMlp

log = logging.getLogger("penstock.loader")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Left by older versions of transformers; computed, not learned.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")


class WeightSource(Protocol):
    """Where a decoder's weights come from, one at a time."""

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor `name` of `shape`, in the dtype and on the device of the model to be."""


def load_model(
    path_or_id: str | Path,
    *,
    weights: str = "auto",
    device: str = "cpu",
    progress: bool = True,
    experts: ExpertSettings | None = None,
) -> Decoder:
    """Load a checkpoint into a Decoder, tensor by tensor: peak memory is one model and one layer.

    `weights`: "fp32", "bf16", or "auto" (as the checkpoint, but fp16 becomes bf16 or fp32 on a
    CPU). With `progress`, a bar of bytes on stderr. With `experts`, routed experts stay in host
    memory behind a cache, which `Decoder.routed.close` ends. Raises ConfigError for an unusable
    config and LoadError, naming file and tensor, for weights that do not match it.
    """
    folder, config, tensors = open_model(str(path_or_id), weights, device)
    routed, in_arena = None, set[str]()
    if experts is not None:
        routed, in_arena = open_experts(experts, folder, config, tensors, torch.device(device))
    total = sum(stored.num_bytes for stored in tensors.values())
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="loading",
        file=sys.stderr,
        disable=not progress,
    ) as bar:
        source = CheckpointWeights(folder, tensors, config.dtype, device, bar.update)
        decoder = build_decoder(config, source, routed)
        bar.update(total - bar.n)
    source.warn_of_unused(in_arena)
    return decoder


def open_model(
    name: str, weights: str, device: str
) -> tuple[Path, ModelConfig, dict[str, StoredTensor]]:
    """Folder, shape and tensors of a model, with the dtype that it will compute in.

    Reads no tensor. Raises as `load_model` does.
    """
    folder = resolve_model(name)
    config = ModelConfig.from_pretrained(folder)
    tensors = open_checkpoint(folder)
    if config.dtype == "auto":
        config = dataclasses.replace(config, dtype=_stored_dtype(tensors))
    return folder, _with_dtype(config, weights, torch.device(device)), tensors


def build_random(
    config: ModelConfig, weights: str = "auto", seed: int = 0, device: str = "cpu"
) -> Decoder:
    """A decoder with random weights (normal, standard deviation 0.02), for benchmarks."""
    config = dataclasses.replace(config, dtype="fp32") if config.dtype == "auto" else config
    config = _with_dtype(config, weights, torch.device(device))
    return build_decoder(config, RandomWeights(config, seed, device))


class CheckpointWeights:
    """Tensors of a checkpoint, checked against the expected shape and cast as they are taken."""

    def __init__(
        self,
        folder: Path,
        tensors: dict[str, StoredTensor],
        dtype: str,
        device: str,
        on_bytes: Callable[[int], object],
    ):
        self.folder = folder
        self.tensors = tensors
        self.dtype = DTYPES[dtype]
        self.device = device
        self._on_bytes = on_bytes
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, *shape: int) -> Tensor:
        stored = find_tensor(self.tensors, self.folder, name, shape)
        tensor = stored.read().to(device=self.device, dtype=self.dtype)
        self._taken.add(name)
        self._on_bytes(stored.num_bytes)
        return tensor

    def warn_of_unused(self, elsewhere: set[str]) -> None:
        """Log tensors that nobody took, here or `elsewhere`, except those known to be of no use."""
        unused = [n for n in self.tensors if n not in self._taken and n not in elsewhere]
        unused = [n for n in unused if not n.endswith(IGNORED_SUFFIXES)]
        if unused:
            some = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
            log.warning("%s: %d unknown tensors are ignored: %s", self.folder, len(unused), some)


class RandomWeights:
    """Normal matrices, zero biases, unit norms."""

    def __init__(self, config: ModelConfig, seed: int, device: str):
        self.tied = config.tie_word_embeddings
        self.dtype = DTYPES[config.dtype]
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def __contains__(self, name: str) -> bool:
        return "block_sparse_moe" not in name and not (self.tied and name == "lm_head.weight")

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        if len(shape) == 1:
            return tensor.fill_(0.0 if name.endswith(".bias") else 1.0)
        return tensor.normal_(0.0, 0.02, generator=self._generator)


def build_decoder(
    config: ModelConfig, source: WeightSource, routed: RoutedExperts | None = None
) -> Decoder:
    """Take every weight that `config` implies from `source`, fuse, pack.

    With `routed`, the experts of MoE layers are its own, and not taken.
    """
    vocab, hidden = config.vocab_size, config.hidden_size
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    if config.tie_word_embeddings:
        # Either may have been left out; where both are there and differ, both count.
        names = [name for name in names if name in source] or names[:1]
    embedding = source.take(names[0], vocab, hidden)
    head = source.take(names[1], vocab, hidden) if len(names) > 1 else embedding
    if head is not embedding and torch.equal(head, embedding):
        head = embedding  # one copy where the packed form can share it
    layers = [_layer(config, source, index, routed) for index in range(config.num_layers)]
    if routed is not None:
        routed.look_ahead_by(
            [
                RoutedLayer(index, layer.post_attention_norm, layer.mlp.choose)
                for index, layer in enumerate(layers)
                if isinstance(layer.mlp, MoeMlp)
            ]
        )
    final_norm = source.take("model.norm.weight", hidden)
    return Decoder(config, embedding, layers, final_norm, pack_linear(head, None), routed)


def _layer(
    config: ModelConfig, source: WeightSource, index: int, routed: RoutedExperts | None
) -> DecoderLayer:
    name, hidden = f"model.layers.{index}", config.hidden_size
    return DecoderLayer(
        input_norm=source.take(f"{name}.input_layernorm.weight", hidden),
        attention=_attention(config, source, index, f"{name}.self_attn"),
        post_attention_norm=source.take(f"{name}.post_attention_layernorm.weight", hidden),
        mlp=(
            _moe(config, source, name, None if routed is None else routed.layer(index))
            if config.moe_layers[index]
            else _mlp(source, f"{name}.mlp", hidden, config.intermediate_size, config.mlp_bias)
        ),
    )


def _attention(config: ModelConfig, source: WeightSource, index: int, name: str) -> Attention:
    hidden, dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    parts = {f"{name}.q_proj": q_size, f"{name}.k_proj": kv_size, f"{name}.v_proj": kv_size}
    norms = None
    if config.qk_norm != "none":
        full = config.qk_norm == "full"
        norms = (
            source.take(f"{name}.q_norm.weight", q_size if full else dim),
            source.take(f"{name}.k_norm.weight", kv_size if full else dim),
        )
    qkv = _fused(source, parts, hidden, config.qkv_bias)
    o = _fused(source, {f"{name}.o_proj": hidden}, q_size, config.o_bias)
    return Attention(config, index, qkv, o, norms)


def _mlp(source: WeightSource, name: str, hidden: int, inner: int, bias: bool = False) -> Mlp:
    gate_up = {f"{name}.gate_proj": inner, f"{name}.up_proj": inner}
    return Mlp(
        _fused(source, gate_up, hidden, bias),
        _fused(source, {f"{name}.down_proj": hidden}, inner, bias),
    )


def _moe(
    config: ModelConfig, source: WeightSource, layer: str, cached: CachedExperts | None
) -> MoeMlp:
    name, hidden = f"{layer}.mlp", config.hidden_size
    if f"{layer}.block_sparse_moe.gate.weight" in source:  # Mixtral, as published
        name = f"{layer}.block_sparse_moe"
    router, shared = {f"{name}.gate": config.num_experts}, None
    if config.shared_expert_intermediate_size:
        router[f"{name}.shared_expert_gate"] = 1
        inner = config.shared_expert_intermediate_size
        shared = _mlp(source, f"{name}.shared_expert", hidden, inner)
    packed_router = _fused(source, router, hidden)
    experts = _experts(config, source, f"{name}.experts") if cached is None else cached
    return MoeMlp(config, packed_router, experts, shared)


def _experts(
    config: ModelConfig, source: WeightSource, name: str
) -> list[tuple[PackedLinear, PackedLinear]]:
    """One matrix an expert, as published checkpoints have it, or all experts of a layer in one."""
    count, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    if f"{name}.gate_up_proj" in source:
        gate_ups = source.take(f"{name}.gate_up_proj", count, 2 * inner, hidden)
        downs = source.take(f"{name}.down_proj", count, hidden, inner)
        return [(pack_linear(g, None), pack_linear(d, None)) for g, d in zip(gate_ups, downs)]
    mixtral = config.model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    return [
        (
            _fused(source, {f"{name}.{e}.{gate}": inner, f"{name}.{e}.{up}": inner}, hidden),
            _fused(source, {f"{name}.{e}.{down}": hidden}, inner),
        )
        for e in range(count)
    ]


def _fused(
    source: WeightSource, parts: dict[str, int], in_features: int, bias: bool = False
) -> PackedLinear:
    """Several linears over the same input as one packed matrix. `parts`: name -> out features."""
    weights = [source.take(f"{name}.weight", size, in_features) for name, size in parts.items()]
    biases = [source.take(f"{name}.bias", size) for name, size in parts.items()] if bias else []
    return pack_linear(_joined(weights), _joined(biases) if bias else None)


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _stored_dtype(tensors: dict[str, StoredTensor]) -> str:
    """What most bytes of the checkpoint are stored as, for configs that do not say."""
    names = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
    num_bytes = dict.fromkeys(names, 0)
    for stored in tensors.values():
        if stored.dtype in num_bytes:
            num_bytes[stored.dtype] += stored.num_bytes
    return names[max(num_bytes, key=lambda dtype: num_bytes[dtype])]


def _with_dtype(config: ModelConfig, weights: str, device: torch.device) -> ModelConfig:
    dtype = config.dtype if weights == "auto" else weights
    if dtype not in DTYPES:
        raise ConfigError(f"weights {weights!r} is unknown; known are auto, {', '.join(DTYPES)}")
    if dtype == "fp16" and device.type == "cpu":
        # CPUs multiply fp16 slowly or not at all.
        dtype = "bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32"
        log.info("fp16 weights become %s on this CPU; ask for fp32 to keep every bit", dtype)
    return dataclasses.replace(config, dtype=dtype)
