"""Families with routed experts: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE."""

from __future__ import annotations

from typing import Any

from penstock.workers.families.family import Fields
from penstock.workers.families.reading import attention_biases, same_window, windows_by_layer


def mixtral(hf: Any) -> Fields:
    """It has one inner size only, whatever else config.json holds."""
    return {
        **_routed(hf, inner=hf.intermediate_size),
        "norm_topk_prob": True,
        "sliding_window": same_window(hf),
    }


def olmoe(hf: Any) -> Fields:
    """Its inner size is as Mixtral's; it never slides, whatever else config.json holds."""
    return {
        **_routed(hf, inner=hf.intermediate_size),
        **attention_biases(hf),
        "qk_norm": "full",
        "clip_qkv": hf.clip_qkv,
    }


def qwen2_moe(hf: Any) -> Fields:
    return {
        **_routed(hf, inner=hf.moe_intermediate_size),
        "sliding_window": windows_by_layer(hf),
        "qkv_bias": bool(getattr(hf, "qkv_bias", True)),
        "shared_expert_intermediate_size": hf.shared_expert_intermediate_size,
    }


def qwen3_moe(hf: Any) -> Fields:
    return {
        **_routed(hf, inner=hf.moe_intermediate_size),
        **attention_biases(hf),
        "sliding_window": same_window(hf),
        "qk_norm": "head",
    }


def _routed(hf: Any, inner: int) -> Fields:
    return {
        "num_experts": hf.num_experts,
        "num_experts_per_token": hf.num_experts_per_tok,
        "moe_intermediate_size": inner,
        "norm_topk_prob": bool(getattr(hf, "norm_topk_prob", False)),
        "moe_layers": _moe_layers(hf),
    }


def _moe_layers(hf: Any) -> tuple[bool, ...]:
    step = getattr(hf, "decoder_sparse_step", 1)
    dense = getattr(hf, "mlp_only_layers", None) or ()
    return tuple(
        layer not in dense and hf.num_experts > 0 and (layer + 1) % step == 0
        for layer in range(hf.num_hidden_layers)
    )
