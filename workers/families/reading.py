"""The part of a configuration that all families share, and what several of them have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.workers.errors import ConfigError
from penstock.workers.families.family import Family, Fields
from penstock.workers.rope_config import rope_config

Windows = tuple[int | None, ...]


def fields_of(family: Family, hf: Any, generation: Mapping[str, Any]) -> Fields:
    """All fields of ModelConfig but those of the files: how they are quantised.

    `hf`: transformers' configuration, or its attributes. `generation`: generation_config.json.
    Raises ConfigError, and for unusable values what Python raises.
    """
    return {**_common(family, hf, generation), **family.read(hf)}


def _common(family: Family, hf: Any, generation: Mapping[str, Any]) -> Fields:
    """A dense pre-norm decoder without biases, every layer over the whole context."""
    if hf.hidden_act not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {hf.hidden_act!r} is not supported; supported is 'silu'")
    head_dim = head_dim_of(hf)
    return {
        "architecture": family.architecture,
        "model_type": family.model_type,
        "vocab_size": hf.vocab_size,
        "hidden_size": hf.hidden_size,
        "num_layers": hf.num_hidden_layers,
        "num_heads": hf.num_attention_heads,
        "num_kv_heads": hf.num_key_value_heads or hf.num_attention_heads,
        "head_dim": head_dim,
        "intermediate_size": hf.intermediate_size,
        "rms_norm_eps": float(hf.rms_norm_eps),
        "tie_word_embeddings": bool(hf.tie_word_embeddings),
        "max_position_embeddings": hf.max_position_embeddings,
        "rope": rope_config(hf, head_dim),
        "sliding_window": (None,) * hf.num_hidden_layers,
        "moe_layers": (False,) * hf.num_hidden_layers,
        "eos_token_ids": _eos_token_ids(hf, generation),
        "bos_token_id": hf.bos_token_id,
        "dtype": _dtype(hf),
    }


def head_dim_of(hf: Any) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def attention_biases(hf: Any) -> Fields:
    """`attention_bias`, of all four projections."""
    has_bias = bool(getattr(hf, "attention_bias", False))
    return {"qkv_bias": has_bias, "o_bias": has_bias}


def window_of(hf: Any) -> int | None:
    return getattr(hf, "sliding_window", None) or None  # Qwen2-MoE writes 0 for none


def same_window(hf: Any) -> Windows:
    """One window for all layers, or none."""
    return (window_of(hf),) * hf.num_hidden_layers


def windows_by_layer(hf: Any) -> Windows:
    """The window of each layer as `layer_types` says; without it the same for all."""
    layer_types = getattr(hf, "layer_types", None)
    if layer_types is None:
        return same_window(hf)
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown or len(layer_types) != hf.num_hidden_layers:
        raise ConfigError(
            "layer_types must name full_attention or sliding_attention for each layer; "
            f"got {layer_types}"
        )
    window = window_of(hf)
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _eos_token_ids(hf: Any, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The union of both files, without ids outside the vocabulary, which some files contain."""
    found: set[int] = set()
    for value in (hf.eos_token_id, generation.get("eos_token_id")):
        ids = value if isinstance(value, list) else [value]
        found.update(i for i in ids if isinstance(i, int) and 0 <= i < hf.vocab_size)
    return tuple(sorted(found))


def _dtype(hf: Any) -> str:
    if hf.dtype is None:
        return "auto"
    name = str(hf.dtype).removeprefix("torch.")
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    if name not in names:
        raise ConfigError(f"dtype {name!r} is not supported; supported are {', '.join(names)}")
    return names[name]
