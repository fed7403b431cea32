"""The part of a configuration that all families share, and what several of them have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.workers.errors import ConfigError
from penstock.workers.families.family import Family, Fields
from penstock.workers.rope_config import RopeConfig, rope_config

FULL, SLIDING = "full_attention", "sliding_attention"  # of layer_types
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
Windows = tuple[int | None, ...]


def fields_of(family: Family, hf: Any, generation: Mapping[str, Any]) -> Fields:
    """All fields of ModelConfig but those of the files: how they are quantised.

    `hf`: transformers' configuration, or its attributes. `generation`: generation_config.json.
    Raises ConfigError, and for unusable values what Python raises.
    """
    text = getattr(hf, "text_config", None) or hf
    stated_eos = getattr(hf, "eos_token_id", None)
    eos_ids = (stated_eos, text.eos_token_id, generation.get("eos_token_id"))
    return {
        **_common(family, text),
        # The whole may tie by a default that its text does not have; a stored head is used anyway.
        "tie_word_embeddings": bool(
            getattr(hf, "tie_word_embeddings", False) or text.tie_word_embeddings
        ),
        "eos_token_ids": _eos_token_ids(eos_ids, text.vocab_size),
        "dtype": _dtype(hf.dtype or text.dtype),
        **family.read(text),
    }


def _common(family: Family, hf: Any) -> Fields:
    """A dense pre-norm decoder without biases, every layer over the whole context."""
    head_dim, positions = head_dim_of(hf), hf.max_position_embeddings
    return {
        "architecture": family.architecture,
        "model_type": family.model_type,
        "vocab_size": hf.vocab_size,
        "hidden_size": hf.hidden_size,
        "num_layers": hf.num_hidden_layers,
        "num_heads": hf.num_attention_heads,
        "num_kv_heads": hf.num_key_value_heads or hf.num_attention_heads,
        "head_dim": head_dim,
        # Models with nothing but experts may leave it out.
        "intermediate_size": getattr(hf, "intermediate_size", None) or hf.moe_intermediate_size,
        "rms_norm_eps": float(hf.rms_norm_eps),
        "max_position_embeddings": positions,
        "ropes": () if is_nested(hf) else (rope_config(hf.rope_parameters, head_dim, positions),),
        "activation": _activation(hf),
        "sliding_window": (None,) * hf.num_hidden_layers,
        "moe_layers": (False,) * hf.num_hidden_layers,
        "bos_token_id": hf.bos_token_id,
    }


def head_dim_of(hf: Any) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def is_nested(hf: Any) -> bool:
    """Whether `rope_parameters` has an entry for each kind of layer."""
    return isinstance(hf.rope_parameters.get(FULL), dict)


def ropes_by_layer(hf: Any) -> Fields:
    """The rotary embedding of each layer, where `rope_parameters` has one for each of its kinds.

    As transformers does it, `truncate` of yarn is not looked for there.
    """
    ropes: list[RopeConfig] = []
    of_kind: dict[str, int] = {}
    for kind in dict.fromkeys(hf.layer_types):
        given = {k: v for k, v in hf.rope_parameters[kind].items() if k != "truncate"}
        rope = rope_config(given, head_dim_of(hf), hf.max_position_embeddings)
        if rope not in ropes:
            ropes.append(rope)
        of_kind[kind] = ropes.index(rope)
    return {"ropes": tuple(ropes), "layer_ropes": tuple(of_kind[kind] for kind in hf.layer_types)}


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
    unknown = set(layer_types) - {FULL, SLIDING}
    if unknown or len(layer_types) != hf.num_hidden_layers:
        raise ConfigError(
            "layer_types must name full_attention or sliding_attention for each layer; "
            f"got {layer_types}"
        )
    window = window_of(hf)
    return tuple(window if kind == SLIDING else None for kind in layer_types)


def _activation(hf: Any) -> str:
    """Gemma says it in `hidden_activation`."""
    name = getattr(hf, "hidden_activation", None) or hf.hidden_act
    if name not in _ACTIVATIONS:
        known = ", ".join(map(repr, _ACTIVATIONS))
        raise ConfigError(f"hidden_act {name!r} is not supported; supported are {known}")
    return _ACTIVATIONS[name]


def _eos_token_ids(stated: Iterable[Any], vocab_size: int) -> tuple[int, ...]:
    """All that the files state, without ids outside the vocabulary, which some files contain."""
    found: set[int] = set()
    for value in stated:
        ids = value if isinstance(value, list) else [value]
        found.update(i for i in ids if isinstance(i, int) and 0 <= i < vocab_size)
    return tuple(sorted(found))


def _dtype(stated: Any) -> str:
    if stated is None:
        return "auto"
    name = str(stated).removeprefix("torch.")
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    if name not in names:
        raise ConfigError(f"dtype {name!r} is not supported; supported are {', '.join(names)}")
    return names[name]
