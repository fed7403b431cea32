"""Shapes of published models by name, from their config.json files: for planning without a
checkpoint."""

from __future__ import annotations

import difflib

from penstock.workers.errors import ConfigError
from penstock.workers.families.table import FAMILIES
from penstock.workers.model_config import ModelConfig
from penstock.workers.rope_config import RopeConfig


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
) -> ModelConfig:
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
        ropes=(RopeConfig(theta, head_dim),),
        sliding_window=(None,) * layers,
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm="head" if architecture.startswith("Qwen3") else "none",
        num_experts=experts[0],
        num_experts_per_token=experts[1],
        moe_intermediate_size=inner if experts[0] else 0,
        norm_topk_prob=experts[0] > 0,
        moe_layers=(experts[0] > 0,) * layers,
        dtype="bf16",
    )


_LLAMA, _QWEN, _MIXTRAL = "LlamaForCausalLM", "Qwen2ForCausalLM", "MixtralForCausalLM"
_MISTRAL = "MistralForCausalLM"
_QWEN3, _QWEN3_MOE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
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
}


def shape_named(name: str) -> ModelConfig:
    """The shape of that name. Raises ConfigError, with the nearest name, if it is unknown."""
    for known, config in SHAPES.items():
        if known.lower() == name.lower():
            return config
    near = difflib.get_close_matches(name, SHAPES, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"unknown model shape {name!r}{hint} (known: {', '.join(SHAPES)})")
