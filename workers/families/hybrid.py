"""Families in which most layers have linear attention (gated DeltaNet), and every fourth or so full
attention: Qwen3-Next and Qwen3.5.
"""

from __future__ import annotations

from typing import Any

from penstock.workers.errors import ConfigError
from penstock.workers.families.family import Fields
from penstock.workers.families.linear_attention import LinearAttentionConfig
from penstock.workers.families.mixtures import routed
from penstock.workers.families.reading import FULL, attention_biases

LINEAR = "linear_attention"  # of layer_types, beside FULL


def qwen3_next(hf: Any) -> Fields:
    return {**_with_experts(hf), "norm_topk_prob": bool(hf.norm_topk_prob)}


def qwen3_5(hf: Any) -> Fields:
    """Dense. Of text, the three positions of its rotary embedding are equal: it is a plain one."""
    kinds = list(hf.layer_types)
    unknown = set(kinds) - {FULL, LINEAR}
    if unknown or len(kinds) != hf.num_hidden_layers:
        raise ConfigError(f"layer_types must name {FULL} or {LINEAR} for each layer; got {kinds}")
    if FULL not in kinds:
        raise ConfigError("at least one layer must have full attention")
    return {
        **attention_biases(hf),
        "qk_norm": "head",
        "norm_offset": 1.0,
        "attention_gate": True,
        "linear_layers": tuple(kind == LINEAR for kind in kinds),
        "linear_attention": LinearAttentionConfig(
            num_key_heads=hf.linear_num_key_heads,
            num_value_heads=hf.linear_num_value_heads,
            key_dim=hf.linear_key_head_dim,
            value_dim=hf.linear_value_head_dim,
            taps=hf.linear_conv_kernel_dim,
        ),
    }


def qwen3_5_moe(hf: Any) -> Fields:
    """Its experts' weights always sum to one."""
    return {**_with_experts(hf), "norm_topk_prob": True}


def _with_experts(hf: Any) -> Fields:
    return {
        **qwen3_5(hf),
        **routed(hf, inner=hf.moe_intermediate_size),
        "shared_expert_intermediate_size": hf.shared_expert_intermediate_size,
    }
