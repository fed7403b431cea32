"""Families with routed experts: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, GLM-4.5, MiniMax M2,
gpt-oss, Granite 3."""

from __future__ import annotations

from typing import Any

from penstock.workers.families.family import Fields
from penstock.workers.families.plain import granite
from penstock.workers.families.reading import attention_biases, same_window, windows_by_layer
from penstock.workers.families.router_config import RouterConfig


def mixtral(hf: Any) -> Fields:
    """It has one inner size only, whatever else config.json holds."""
    return {
        **routed(hf, inner=hf.intermediate_size),
        "norm_topk_prob": True,
        "sliding_window": same_window(hf),
    }


def olmoe(hf: Any) -> Fields:
    """Its inner size is as Mixtral's; it never slides, whatever else config.json holds."""
    return {
        **routed(hf, inner=hf.intermediate_size),
        **attention_biases(hf),
        "qk_norm": "full",
        "clip_qkv": hf.clip_qkv,
    }


def qwen2_moe(hf: Any) -> Fields:
    return {
        **routed(hf, inner=hf.moe_intermediate_size),
        "sliding_window": windows_by_layer(hf),
        "qkv_bias": bool(getattr(hf, "qkv_bias", True)),
        "shared_expert_intermediate_size": hf.shared_expert_intermediate_size,
    }


def qwen3_moe(hf: Any) -> Fields:
    return {
        **routed(hf, inner=hf.moe_intermediate_size),
        **attention_biases(hf),
        "sliding_window": same_window(hf),
        "qk_norm": "head",
    }


def glm4_moe(hf: Any) -> Fields:
    """GLM-4.5 and 4.6. Only q, k and v may have biases, whatever `attention_bias` says of o."""
    num_layers, num_dense = hf.num_hidden_layers, hf.first_k_dense_replace
    return {
        "num_experts": hf.n_routed_experts,
        "num_experts_per_token": hf.num_experts_per_tok,
        "moe_intermediate_size": hf.moe_intermediate_size,
        "norm_topk_prob": bool(hf.norm_topk_prob),
        "moe_layers": tuple(layer >= num_dense for layer in range(num_layers)),
        "qkv_bias": bool(hf.attention_bias),
        "qk_norm": "head" if hf.use_qk_norm else "none",
        "shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts,
        "shared_expert_gate": False,
        "router": RouterConfig(
            scoring="sigmoid",
            has_choice_bias=True,
            num_groups=hf.n_group,
            num_kept_groups=hf.topk_group,
            eps=1e-20,
            scale=float(hf.routed_scaling_factor),
            in_fp32=True,
        ),
    }


def minimax_m2(hf: Any) -> Fields:
    return {
        **routed(hf, inner=hf.intermediate_size),
        "norm_topk_prob": True,
        "qk_norm": "full",
        "router": RouterConfig(scoring="sigmoid", has_choice_bias=True),
    }


def granite_moe(hf: Any) -> Fields:
    """Granite 3's experts; all else as in its dense models."""
    return {
        **granite(hf),
        "mlp_bias": False,
        "num_experts": hf.num_local_experts,
        "num_experts_per_token": hf.num_experts_per_tok,
        "moe_intermediate_size": hf.intermediate_size,
        "norm_topk_prob": True,
        "moe_layers": (True,) * hf.num_hidden_layers,
    }


def gpt_oss(hf: Any) -> Fields:
    return {
        **routed(hf, inner=hf.intermediate_size),
        **attention_biases(hf),
        "norm_topk_prob": True,
        "sliding_window": windows_by_layer(hf),
        "router": RouterConfig(has_bias=True),
        "expert_bias": True,
        "attention_sinks": True,
        "swiglu_clamp": (float(hf.swiglu_alpha), float(hf.swiglu_limit)),
    }


def routed(hf: Any, inner: int) -> Fields:
    """The experts' fields, by the names that most configurations have."""
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
