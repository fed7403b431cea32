"""Families that norm what attention and MLP add to the residual stream: OLMo 2 and 3, GLM-4, Gemma
2 and 3.
"""

from __future__ import annotations

from typing import Any

from penstock.workers.errors import ConfigError
from penstock.workers.families.family import Fields
from penstock.workers.families.reading import attention_biases, ropes_by_layer, windows_by_layer


def olmo2(hf: Any) -> Fields:
    return {**attention_biases(hf), "norm_place": "post", "qk_norm": "full"}


def olmo3(hf: Any) -> Fields:
    return {**olmo2(hf), **ropes_by_layer(hf), "sliding_window": windows_by_layer(hf)}


def glm4(hf: Any) -> Fields:
    """Biases of q, k and v alone."""
    return {"norm_place": "sandwich", "qkv_bias": bool(hf.attention_bias)}


def gemma2(hf: Any) -> Fields:
    return {**_gemma(hf), "attention_softcap": float(hf.attn_logit_softcapping or 0.0)}


def gemma3(hf: Any) -> Fields:
    """Its model knows no soft cap of attention, whatever else config.json holds."""
    return {**_gemma(hf), **ropes_by_layer(hf), "qk_norm": "head"}


def _gemma(hf: Any) -> Fields:
    """Norms are stored as their weights' distance from 1 in safetensors."""
    if hf.use_bidirectional_attention:
        raise ConfigError(
            "use_bidirectional_attention is not supported: attention is causal; supported are "
            "Gemma models that generate"
        )
    return {
        **attention_biases(hf),
        "sliding_window": windows_by_layer(hf),
        "norm_place": "sandwich",
        "norm_offset": 1.0,
        "embedding_scale": float(hf.hidden_size) ** 0.5,
        "attention_scale": float(hf.query_pre_attn_scalar) ** -0.5,
        "logits_softcap": float(hf.final_logit_softcapping or 0.0),
    }
