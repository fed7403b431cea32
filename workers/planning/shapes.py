"""Shapes of published models by name, from their config.json files: for planning without a
checkpoint."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

from penstock.workers.errors import ConfigError
from penstock.workers.families.linear_attention import LinearAttentionConfig
from penstock.workers.families.router_config import RouterConfig
from penstock.workers.families.table import FAMILIES
from penstock.workers.model_config import ModelConfig
from penstock.workers.rope_config import RopeConfig


def _hybrid(num_layers: int) -> dict[str, Any]:
    """Gated DeltaNet in three layers of four, as Qwen3-Next has it."""
    return {
        "attention_gate": True, "norm_offset": 1.0,
        "linear_layers": tuple((i + 1) % 4 > 0 for i in range(num_layers)),
        "linear_attention": LinearAttentionConfig(16, 32, 128, 128, 4),
    }  # fmt: skip


def _shape(
    architecture: str,
    vocab: int,
    hidden: int,
    layers: int,
    heads: tuple[int, int],  # of queries; of keys and values
    inner: int,
    *,
    context: int,
    head_dim: int = 128,
    theta: float = 1e6,
    tied: bool = False,
    experts: tuple[int, int] = (0, 0),  # in all; per token
    rotary_dim: int | None = None,  # None: the whole head
    **more: Any,  # further fields
) -> ModelConfig:
    known: dict[str, Any] = {
        "qkv_bias": architecture == "Qwen2ForCausalLM",
        "qk_norm": "head" if architecture.startswith("Qwen3") else "none",
        "moe_layers": (experts[0] > 0,) * layers,
        "moe_intermediate_size": inner if experts[0] else 0,
    }
    return ModelConfig(
        architecture=architecture,
        model_type=FAMILIES[architecture].model_type,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        intermediate_size=inner,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        max_position_embeddings=context,
        ropes=(RopeConfig(theta, rotary_dim or head_dim),),
        sliding_window=(None,) * layers,
        num_experts=experts[0],
        num_experts_per_token=experts[1],
        norm_topk_prob=experts[0] > 0,
        dtype="bf16",
        **{**known, **more},
    )


_LLAMA, _QWEN, _MIXTRAL = "LlamaForCausalLM", "Qwen2ForCausalLM", "MixtralForCausalLM"
_MISTRAL = "MistralForCausalLM"
_SIGMOID = RouterConfig(scoring="sigmoid", has_choice_bias=True)
_QWEN3, _QWEN3_MOE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
_GPT_OSS = "GptOssForCausalLM"
_GPT_OSS_SWITCHES: dict[str, Any] = {
    "qkv_bias": True, "o_bias": True, "expert_bias": True, "attention_sinks": True,
    "router": RouterConfig(has_bias=True), "swiglu_clamp": (1.702, 7.0),
}  # fmt: skip
SHAPES = {
    "Llama-2-7B": _shape(_LLAMA, 32000, 4096, 32, (32, 32), 11008, context=4096, theta=1e4),
    "Llama-2-70B": _shape(_LLAMA, 32000, 8192, 80, (64, 8), 28672, context=4096, theta=1e4),
    "Llama-3-8B": _shape(_LLAMA, 128256, 4096, 32, (32, 8), 14336, context=8192, theta=5e5),
    "Llama-3.1-8B": _shape(_LLAMA, 128256, 4096, 32, (32, 8), 14336, context=131072, theta=5e5),
    "Llama-3.1-70B": _shape(_LLAMA, 128256, 8192, 80, (64, 8), 28672, context=131072, theta=5e5),
    "Llama-3.2-1B": _shape(
        _LLAMA, 128256, 2048, 16, (32, 8), 8192, context=131072, head_dim=64, theta=5e5, tied=True
    ),
    "Llama-3.2-3B": _shape(
        _LLAMA, 128256, 3072, 28, (24, 8), 8192, context=131072, theta=5e5, tied=True
    ),
    "SmolLM2-135M": _shape(
        _LLAMA, 49152, 576, 30, (9, 3), 1536, context=8192, head_dim=64, theta=1e5, tied=True
    ),
    "SmolLM2-1.7B": _shape(
        _LLAMA, 49152, 2048, 24, (32, 32), 8192, context=8192, head_dim=64, theta=1.3e5, tied=True
    ),
    "Mistral-7B": _shape(_MISTRAL, 32768, 4096, 32, (32, 8), 14336, context=32768),  # v0.3
    "Qwen2.5-0.5B": _shape(
        _QWEN, 151936, 896, 24, (14, 2), 4864, context=32768, head_dim=64, tied=True
    ),
    "Qwen2.5-7B": _shape(_QWEN, 152064, 3584, 28, (28, 4), 18944, context=32768),
    "Mixtral-8x7B": _shape(
        _MIXTRAL, 32000, 4096, 32, (32, 8), 14336, context=32768, experts=(8, 2)
    ),
    "Qwen3-0.6B": _shape(_QWEN3, 151936, 1024, 28, (16, 8), 3072, context=40960, tied=True),
    "Qwen3-4B": _shape(_QWEN3, 151936, 2560, 36, (32, 8), 9728, context=40960, tied=True),
    "Qwen3-8B": _shape(_QWEN3, 151936, 4096, 36, (32, 8), 12288, context=40960),
    "Qwen3-14B": _shape(_QWEN3, 151936, 5120, 40, (40, 8), 17408, context=40960),
    "Qwen3-32B": _shape(_QWEN3, 151936, 5120, 64, (64, 8), 25600, context=40960),
    "Qwen3-30B-A3B": _shape(
        _QWEN3_MOE, 151936, 2048, 48, (32, 4), 768, context=40960, experts=(128, 8)
    ),
    "Granite-3.1-1B-A400M": _shape(
        "GraniteMoeForCausalLM", 49155, 1024, 24, (16, 8), 512, context=131072, head_dim=64,
        theta=5e6, tied=True, experts=(32, 8),
    ),
    "gpt-oss-20b": _shape(
        _GPT_OSS, 201088, 2880, 24, (64, 8), 2880, context=131072, head_dim=64, theta=1.5e5,
        experts=(32, 4), **_GPT_OSS_SWITCHES,
    ),
    "gpt-oss-120b": _shape(
        _GPT_OSS, 201088, 2880, 36, (64, 8), 2880, context=131072, head_dim=64, theta=1.5e5,
        experts=(128, 4), **_GPT_OSS_SWITCHES,
    ),
    "GLM-4.5-Air": _shape(
        "Glm4MoeForCausalLM", 151552, 4096, 46, (96, 8), 10944, context=131072, rotary_dim=64,
        experts=(128, 8), moe_intermediate_size=1408, moe_layers=(False,) + (True,) * 45,
        qkv_bias=True, shared_expert_intermediate_size=1408, shared_expert_gate=False,
        router=replace(_SIGMOID, in_fp32=True),
    ),
    "Qwen3-Next-80B-A3B": _shape(
        "Qwen3NextForCausalLM", 151936, 2048, 48, (16, 2), 512, context=262144, theta=1e7,
        head_dim=256, rotary_dim=64, experts=(512, 10), shared_expert_intermediate_size=512,
        **_hybrid(48),
    ),
    "MiniMax-M2": _shape(
        "MiniMaxM2ForCausalLM", 200064, 3072, 62, (48, 8), 1536, context=196608, theta=5e6,
        rotary_dim=64, experts=(256, 8), qk_norm="full", router=_SIGMOID,
    ),
}  # fmt: skip


def shape_named(name: str) -> ModelConfig:
    """The shape of that name. Raises ConfigError, with the nearest name, if it is unknown."""
    for known, config in SHAPES.items():
        if known.lower() == name.lower():
            return config
    near = difflib.get_close_matches(name, SHAPES, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"unknown model shape {name!r}{hint} (known: {', '.join(SHAPES)})")
