"""A model's shape from the metadata of a GGUF file, in the words of a config.json.

So everything behind it is the path of other checkpoints. What the file holds and the model would
not use is refused here: an answer without it would be wrong, and look right.
"""

from __future__ import annotations

import math
import struct
from types import SimpleNamespace
from typing import Any

from penstock.workers.errors import ConfigError
from penstock.workers.gguf.dense import by_layer, dense_attributes
from penstock.workers.gguf.experts import routed_experts
from penstock.workers.gguf.header import GgufHeader, TensorInfo
from penstock.workers.gguf.metadata import (
    ARCHITECTURES,
    architecture_of,
    optional_size,
    positive_float,
    size_of,
)
from penstock.workers.quantization import StoredFormat, StoredScheme

MIXTRAL = "MixtralForCausalLM"
# Architectures whose files have the rows of q and k in the order of adjacent rotary pairs.
ADJACENT_PAIRS = ("llama", "granite", "smollm3")
FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# The format that keeps the codes of each block type, and the weights that share a scale.
KEPT_FORMATS: dict[str, tuple[StoredFormat, int]] = {
    "Q4_0": ("int4", 32), "Q4_1": ("int4", 32), "Q4_K": ("int4", 32),
    "Q5_0": ("int8g", 32), "Q5_1": ("int8g", 32), "Q5_K": ("int8g", 32),
    "Q8_0": ("int8g", 32), "Q6_K": ("int8g", 16),
}  # fmt: skip
WITH_MINIMUMS = ("Q4_1", "Q4_K", "Q5_1", "Q5_K")  # which become zero points, one of each scale
_MATRICES = (2, 3)  # dimensions: 3 of the experts' matrices in one tensor
_ATTENTION = frozenset({"attn_q", "attn_k", "attn_v", "attn_output"})
_MLP = frozenset({"ffn_gate", "ffn_up", "ffn_down"})
# token_id keys; all three end a turn.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def stated_by(header: GgufHeader) -> tuple[str, SimpleNamespace]:
    """transformers' name of the architecture, and the attributes of its configuration.

    Raises ConfigError naming the file and the key or tensor.
    """
    name = architecture_of(header)
    if header.metadata.get("split.count", 1) != 1:
        raise ConfigError(
            f"{header.file} is one part of several; join them: llama-gguf-split --merge"
        )
    heads, hidden = size_of(header, "attention.head_count"), size_of(header, "embedding_length")
    head_dim = size_of(header, "attention.key_length", hidden // heads)
    if size_of(header, "attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"{header.file}: keys and values of different lengths are not supported")
    window = optional_size(header, "attention.sliding_window")
    context = size_of(header, "context_length")
    num_layers = size_of(header, "block_count")
    if num_layers > len(header.tensors):
        raise ConfigError(
            f"{header.file}: {name}.block_count is {num_layers}, and the file has "
            f"{len(header.tensors)} tensors"
        )
    experts = routed_experts(header, name)
    if experts is None:
        experts = {"intermediate_size": size_of(header, "feed_forward_length")}
    is_routed = "num_experts" in experts
    biases = _biases(header, name, is_routed)
    rope = _rope(header, name, head_dim)
    return _transformers_name(name, is_routed, window, context), SimpleNamespace(
        **experts,
        hidden_act="silu",
        vocab_size=_vocab_size(header),
        hidden_size=hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=size_of(header, "attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=positive_float(header, f"{name}.attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="output.weight" not in header.tensors,
        max_position_embeddings=context,
        rope_parameters=by_layer(header, rope) if name == "gemma3" else rope,
        sliding_window=window,
        attention_bias=bool(biases & _ATTENTION),
        qkv_bias=bool(biases & _ATTENTION),  # as qwen2_moe calls it
        mlp_bias=bool(biases & _MLP),
        eos_token_id=list(end_ids(header)),
        bos_token_id=token_id(header, "bos_token_id"),
        dtype=dtype_of(header),
        **dense_attributes(header),
    )


def _transformers_name(name: str, is_routed: bool, window: int | None, context: int) -> str:
    """Files of Mistral and Mixtral say llama."""
    if name == "llama" and is_routed:
        return MIXTRAL
    if name == "llama" and window is not None and window < context:
        return "MistralForCausalLM"
    return ARCHITECTURES[name]


def stored_scheme(header: GgufHeader) -> StoredScheme | None:
    """How the codes of the file's blocks are kept, the format of most elements first; None for a
    file of plain numbers."""
    totals: dict[tuple[StoredFormat, int], int] = {}
    for info in header.tensors.values():
        if is_kept(info):
            kept = KEPT_FORMATS[info.type.name]
            totals[kept] = totals.get(kept, 0) + math.prod(info.shape)
    if not totals:
        return None
    ordered = sorted(totals, key=lambda kept: -totals[kept])
    formats = tuple(dict.fromkeys(format for format, _ in ordered))
    return StoredScheme("gguf", formats, tuple(dict.fromkeys(group for _, group in ordered)))


def is_kept(info: TensorInfo) -> bool:
    """Whether the tensor is a matrix, or one of each expert, whose codes are kept."""
    return info.type.name in KEPT_FORMATS and len(info.shape) in _MATRICES


def token_id(header: GgufHeader, name: str) -> int | None:
    """`tokenizer.ggml.{name}`, an id of the vocabulary; None if it is not given."""
    value = header.metadata.get(f"tokenizer.ggml.{name}")
    if value is None or (type(value) is int and value in (-1, 0xFFFFFFFF)):  # how some write none
        return None
    if type(value) is not int or not 0 <= value < _vocab_size(header):
        raise ConfigError(f"{header.file}: tokenizer.ggml.{name} is {value!r}, which is no token")
    return value


def end_ids(header: GgufHeader) -> tuple[int, ...]:
    """The ids that end an answer."""
    found = {token_id(header, name) for name in _END_KEYS}
    return tuple(sorted(each for each in found if each is not None))


def _vocab_size(header: GgufHeader) -> int:
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ConfigError(f"{header.file}: tensor 'token_embd.weight' is missing, or no matrix")
    return table.shape[0]


def _rope(header: GgufHeader, name: str, head_dim: int) -> dict[str, Any]:
    """As `rope_parameters` of a config.json."""
    theta = positive_float(header, f"{name}.rope.freq_base", 10000.0)
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    rotary = size_of(header, "rope.dimension_count", head_dim)
    if rotary != head_dim:
        share = rotary / head_dim
        found["partial_rotary_factor"] = (
            share if int(head_dim * share) == rotary else math.nextafter(share, 2.0)
        )
    if "rope_factors_long.weight" in header.tensors:
        return found | _longrope(header, name, rotary)
    kind = header.metadata.get(f"{name}.rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise ConfigError(
            f"{header.file}: {name}.rope.scaling.type {kind!r} is not supported; supported are "
            "none, linear, yarn, and longrope with its factors"
        )
    factors = header.tensors.get("rope_freqs.weight")
    if factors is not None:
        if kind != "none":
            raise ConfigError(
                f"{header.file}: rope_freqs.weight together with {name}.rope.scaling.type {kind} "
                "is not supported"
            )
        return {**found, "rope_type": "factors", "factors": _factors(header, factors, rotary)}
    if kind == "none":
        return found
    found |= {"rope_type": kind, "factor": positive_float(header, f"{name}.rope.scaling.factor")}
    if kind == "yarn":
        found["original_max_position_embeddings"] = size_of(
            header, "rope.scaling.original_context_length"
        )
        for key, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if f"{name}.rope.scaling.{key}" in header.metadata:
                found[ours] = positive_float(header, f"{name}.rope.scaling.{key}")
        if positive_float(header, f"{name}.rope.scaling.attn_factor", 1.0) != 1.0:
            raise ConfigError(
                f"{header.file}: {name}.rope.scaling.attn_factor is supported as 1 only"
            )
    return found


def _longrope(header: GgufHeader, name: str, rotary_dim: int) -> dict[str, Any]:
    """LongRoPE, whose two sets of factors are tensors."""
    key = f"{name}.rope.scaling.attn_factor"
    found: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": size_of(header, "rope.scaling.original_context_length"),
        "attention_factor": positive_float(header, key) if key in header.metadata else None,
    }
    for side in ("long", "short"):
        info = header.tensors.get(f"rope_factors_{side}.weight")
        if info is None:
            raise ConfigError(f"{header.file}: tensor 'rope_factors_{side}.weight' is missing")
        found[f"{side}_factor"] = _factors(header, info, rotary_dim)
    return found


def _factors(header: GgufHeader, info: TensorInfo, rotary_dim: int) -> tuple[float, ...]:
    """The divisors of the rotary frequencies: how files say Llama 3.1's scaling, and LongRoPE."""
    if info.type.name != "F32" or info.shape != (rotary_dim // 2,):
        raise ConfigError(
            f"{header.file}: tensor {info.name!r} is {info.type.name} {list(info.shape)}; "
            f"F32 [{rotary_dim // 2}] was expected"
        )
    try:
        with header.file.open("rb") as file:
            file.seek(info.offset)
            values = struct.unpack(f"<{info.shape[0]}f", file.read(info.num_bytes))
    except (OSError, struct.error) as error:
        raise ConfigError(f"{header.file}: {info.name!r} cannot be read: {error}") from error
    if not all(math.isfinite(each) and each > 0 for each in values):
        raise ConfigError(f"{header.file}: tensor {info.name!r} holds no positive factors")
    return values


def _biases(header: GgufHeader, name: str, is_routed: bool) -> frozenset[str]:
    """The linear layers of a block that have a bias."""
    prefix, suffix = "blk.0.", ".bias"
    found = frozenset(
        each.removeprefix(prefix).removesuffix(suffix)
        for each in header.tensors
        if each.startswith(prefix) and each.endswith(suffix)
    )
    without_o = _ATTENTION - {"attn_output"}
    if name == "qwen2":
        known = [without_o]
    elif name == "qwen2moe":
        known = [frozenset(), without_o]
    elif name in ("qwen3", "qwen3moe"):
        known = [frozenset(), _ATTENTION]
    elif is_routed or name in ("phi3", "olmo2", "gemma2", "gemma3"):  # Mixtral
        known = [frozenset()]
    else:
        known = [frozenset(), _ATTENTION, _MLP, _ATTENTION | _MLP]
    if found not in known:
        raise ConfigError(
            f"{header.file}: biases of {', '.join(sorted(found)) or 'no layer'} are not what a "
            f"model of architecture {name!r} has"
        )
    return found


def _main_type(header: GgufHeader) -> str:
    """The type of most elements in the matrices of the blocks."""
    totals: dict[str, int] = {}
    for info in header.tensors.values():
        if info.name.startswith("blk.") and len(info.shape) in _MATRICES:
            totals[info.type.name] = totals.get(info.type.name, 0) + math.prod(info.shape)
    return max(totals, key=lambda name: totals[name], default="F32")


def dtype_of(header: GgufHeader) -> str:
    """Of activations, and of weights that are not quantised: for block types, bf16."""
    return FLOAT_TYPES.get(_main_type(header), "bfloat16")
