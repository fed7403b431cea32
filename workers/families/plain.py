"""Dense pre-norm families: they differ from Llama in biases, windows, norms of q and k, layers
without rotary embedding, and scales of the stream or of queries.
"""

from __future__ import annotations

from typing import Any

from penstock.workers.errors import ConfigError
from penstock.workers.families.family import Fields
from penstock.workers.families.reading import (
    attention_biases,
    same_window,
    window_of,
    windows_by_layer,
)
from penstock.workers.rope_config import QueryScaling


def llama(hf: Any) -> Fields:
    """It never slides, whatever else config.json holds."""
    return {**attention_biases(hf), "mlp_bias": bool(getattr(hf, "mlp_bias", False))}


def mistral(hf: Any) -> Fields:
    """Without biases."""
    return {"sliding_window": windows_by_layer(hf)}


def ministral3(hf: Any) -> Fields:
    given = hf.rope_parameters
    beta, period = given.get("llama_4_scaling_beta"), given.get("original_max_position_embeddings")
    if beta is None:
        return mistral(hf)
    if period is None or period < 1:
        raise ConfigError(
            "llama_4_scaling_beta needs original_max_position_embeddings, a positive number; got "
            f"{period}"
        )
    return {**mistral(hf), "query_scaling": QueryScaling(float(beta), int(period))}


def qwen2(hf: Any) -> Fields:
    """Biases of q, k and v alone."""
    return {"sliding_window": windows_by_layer(hf), "qkv_bias": True}


def qwen3(hf: Any) -> Fields:
    return {"sliding_window": windows_by_layer(hf), **attention_biases(hf), "qk_norm": "head"}


def seed_oss(hf: Any) -> Fields:
    return {
        "qkv_bias": bool(hf.attention_bias),
        "o_bias": bool(hf.attention_out_bias),
        "mlp_bias": bool(hf.mlp_bias),
    }


def smollm3(hf: Any) -> Fields:
    """`no_rope_layers` has a 1 for each layer with rotary embedding; those without may slide."""
    windows = windows_by_layer(hf) if hf.use_sliding_window and window_of(hf) else None
    return {
        **llama(hf),
        **({} if windows is None else {"sliding_window": windows}),
        "layer_ropes": tuple(
            0 if has_rope else None for has_rope in hf.no_rope_layers[: hf.num_hidden_layers]
        ),
    }


def granite(hf: Any) -> Fields:
    return {
        **llama(hf),
        "embedding_scale": float(hf.embedding_multiplier),
        "residual_scale": float(hf.residual_multiplier),
        "attention_scale": float(hf.attention_multiplier),
        "logits_divisor": float(hf.logits_scaling),
    }


def phi3(hf: Any) -> Fields:
    """Without biases; LongRoPE is read as every rotary embedding is."""
    return {"sliding_window": same_window(hf)}
