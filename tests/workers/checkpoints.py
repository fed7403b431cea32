"""Tiny random checkpoints of every family, and what transformers' own models make of them.

Each is made once a test run. Weights are far larger than a real initialisation, so that greedy ids
vary, and norms and biases are random too, so that one that is left out shows.
"""

from __future__ import annotations

import atexit
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB_SIZE = 199

_DENSE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WIDE = {**_DENSE, "hidden_size": 96, "head_dim": 24}
_MOE = {**_DENSE, "num_experts_per_tok": 2, "num_experts": 5, "moe_intermediate_size": 40}
_MANY = {"num_experts_per_tok": 8, "moe_intermediate_size": 32}
_GLM = {
    **_DENSE, "num_experts_per_tok": 2, "n_routed_experts": 5, "moe_intermediate_size": 40,
    "head_dim": 24, "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.7, "n_shared_experts": 1,
}  # fmt: skip
_MINIMAX = {
    **_DENSE, "num_experts_per_tok": 2, "num_local_experts": 5, "intermediate_size": 40,
    "head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
_GPT_OSS = {
    **_DENSE, "num_experts_per_tok": 2, "num_local_experts": 5, "intermediate_size": 40,
    "head_dim": 24, "sliding_window": 13, "swiglu_limit": 1.5,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1.5e4, "factor": 8.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 32,
    },
}  # fmt: skip
_HYBRID = {
    **_DENSE, "head_dim": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 20, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_HYBRID_MOE = {
    **_HYBRID, "num_experts_per_tok": 2, "num_experts": 5, "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}  # fmt: skip
_QWEN2_MOE = {**_MOE, "shared_expert_intermediate_size": 56}
_SLIDING = {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

_ALTERNATING = ["full_attention", "sliding_attention", "full_attention"]
_MIXED = {"sliding_window": 13, "layer_types": _ALTERNATING}
_SMALL_YARN = {**_YARN, "original_max_position_embeddings": 16}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 9.0],
    "original_max_position_embeddings": 512,
    "partial_rotary_factor": 0.5,
}
_NESTED = {
    "full_attention": {**_YARN, "truncate": False},
    "sliding_attention": {"rope_type": "default", "rope_theta": 7000.0},
}
_GEMMA = {**_DENSE, "head_dim": 24, "sliding_window": 13, "query_pre_attn_scalar": 30}
_PHI3 = {**_DENSE, "hidden_size": 96}
_MINISTRAL3 = {**_WIDE, "rope_parameters": {**_SMALL_YARN, "llama_4_scaling_beta": 0.1}}

# name -> (transformers' model type, its configuration)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _DENSE),
    "mistral": ("mistral", {**_WIDE, "sliding_window": None}),
    "qwen2": ("qwen2", _DENSE),
    "qwen3": ("qwen3", {**_DENSE, "head_dim": 24}),
    "ministral": ("ministral", {**_WIDE, **_MIXED}),
    "ministral3": ("ministral3", _MINISTRAL3),
    "granite": (
        "granite",
        {
            **_DENSE,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.5,
        },
    ),
    "smollm3": ("smollm3", {**_DENSE, "no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "seed_oss": ("seed_oss", {**_WIDE, "attention_bias": True}),
    "phi3": ("phi3", _PHI3),
    "olmo2": ("olmo2", _DENSE),
    "olmo3": ("olmo3", {**_DENSE, **_MIXED, "rope_parameters": _NESTED}),
    "glm4": ("glm4", {**_DENSE, "head_dim": 24, "attention_bias": True}),
    "gemma2": (
        "gemma2",
        {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3_text": ("gemma3_text", {**_GEMMA, "sliding_window_pattern": 2}),
    "mixtral": ("mixtral", {**_DENSE, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2_moe": ("qwen2_moe", _QWEN2_MOE),
    "qwen3_moe": ("qwen3_moe", {**_MOE, "head_dim": 24, "norm_topk_prob": True}),
    "olmoe": ("olmoe", _MOE),
    "glm4_moe": ("glm4_moe", _GLM),
    "minimax_m2": ("minimax_m2", _MINIMAX),
    "granitemoe": (
        "granitemoe",
        {
            **_DENSE,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "embedding_multiplier": 0.3,
            "residual_multiplier": 1.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 1.7,
        },
    ),
    "gpt_oss": ("gpt_oss", {**_GPT_OSS, "layer_types": ["full_attention"] * 3}),
    "qwen3_next": ("qwen3_next", _HYBRID_MOE),
    "qwen3_5_text": ("qwen3_5_text", _HYBRID),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", _HYBRID_MOE),
}
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # with linear attention
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("llama", {**_DENSE, "tie_word_embeddings": True}),
    "llama-bias": ("llama", {**_WIDE, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": (
        "llama",
        {**_DENSE, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 3.0}},
    ),
    "llama-llama3": ("llama", {**_DENSE, "rope_parameters": _LLAMA3}),
    "llama-yarn": ("llama", {**_WIDE, "rope_parameters": _YARN}),
    "llama-yarn-mscale": (
        "llama",
        {
            **_DENSE,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False},
        },
    ),
    "qwen2-yarn-attention-factor": (
        "qwen2",
        {**_DENSE, "rope_parameters": {**_YARN, "attention_factor": 1.3, "beta_fast": 16}},
    ),
    "mistral-window": ("mistral", {**_WIDE, "sliding_window": 13}),
    "mistral-layer-types": (  # transformers gives these to its Ministral class
        "ministral",
        {**_WIDE, **_MIXED},
    ),
    "smollm3-window-bias": (
        "smollm3",
        {
            **_DENSE,
            "no_rope_layers": [1, 0, 0],
            "use_sliding_window": True,
            "sliding_window": 13,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "seed_oss-out-bias": (
        "seed_oss",
        {**_DENSE, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    ),
    "phi3-longrope": ("phi3", {**_PHI3, "rope_parameters": _LONGROPE}),
    "gemma3_text-capped": ("gemma3_text", {**_GEMMA, "final_logit_softcapping": 5.0}),
    # As llama.cpp's constants have them: scores by the head's width, one layer of six, one of four.
    "gemma2-gguf": (
        "gemma2",
        {**_GEMMA, "query_pre_attn_scalar": 24, "intermediate_size": 96},
    ),
    "gemma3-gguf": (
        "gemma3_text",
        {
            **_GEMMA,
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 6,
            "sliding_window_pattern": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "smollm3-gguf": ("smollm3", {**_DENSE, "num_hidden_layers": 4}),
    "mixtral-window": ("mixtral", {**_DENSE, "num_local_experts": 3, "sliding_window": 13}),
    "qwen2-window": ("qwen2", {**_DENSE, **_SLIDING}),
    "qwen3-window-bias": ("qwen3", {**_DENSE, **_SLIDING, "attention_bias": True}),
    "qwen2_moe-window": ("qwen2_moe", {**_QWEN2_MOE, **_SLIDING, "max_window_layers": 3}),
    "qwen2_moe-normed": (
        "qwen2_moe",
        {**_QWEN2_MOE, "norm_topk_prob": True, "mlp_only_layers": [1], "qkv_bias": False},
    ),
    "qwen3_moe-sparse-step": (
        "qwen3_moe",
        {**_MOE, **_SLIDING, "decoder_sparse_step": 2, "attention_bias": True},
    ),
    # As many experts, and as many of a token, as in the published models.
    "olmoe-64": ("olmoe", {**_MOE, **_MANY, "num_experts": 64}),
    "qwen3_moe-128": (
        "qwen3_moe",
        {**_MOE, **_MANY, "num_experts": 128, "head_dim": 24, "norm_topk_prob": True},
    ),
    # Heads for four ranks.
    "llama-4-kv": ("llama", {**_DENSE, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "olmoe-4-kv": ("olmoe", {**_MOE, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "gpt_oss-window": ("gpt_oss", _GPT_OSS),  # sliding, full, sliding
    "glm4_moe-groups": (
        "glm4_moe",
        {
            **_GLM,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "use_qk_norm": False,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
    ),
    # One key head for all value heads, a layer that is dense, and layers by an interval.
    "qwen3_next-dense": (
        "qwen3_next",
        {
            **_HYBRID_MOE,
            "num_hidden_layers": 4,
            "layer_types": None,
            "full_attention_interval": 2,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "olmoe-clip": ("olmoe", {**_MOE, "clip_qkv": 0.8, "norm_topk_prob": True}),
}
ALL = {**FAMILIES, **VARIANTS}


@functools.cache
def make_checkpoint(name: str = "llama") -> Path:
    """The folder of the checkpoint `name` (a key of ALL), fp32, without a tokenizer."""
    model_type, settings = ALL[name]
    model = random_model(model_type, settings)
    folder = _root() / name
    model.save_pretrained(folder)
    if name == "mistral-layer-types":
        config = folder / "config.json"
        text = config.read_text().replace("MinistralFor", "MistralFor")
        config.write_text(text.replace('"ministral"', '"mistral"'))
    return folder


def random_model(model_type: str, settings: dict[str, Any], seed: int = 0) -> Any:
    """transformers' own model of this configuration with random weights, in fp32."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    return randomised(model, seed)


def randomised(model: Any, seed: int = 0) -> Any:
    """`model` with random weights."""
    generator = torch.Generator().manual_seed(seed)
    # Gemma scales its embeddings, and its head is the same table: larger ones would repeat a token.
    embedding = 0.04 if "gemma" in model.config.model_type else 1.0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "sinks" in name:
                weight.normal_(0.0, 2.0, generator=generator)
            elif "norm" in name:
                weight.normal_(1.0, 0.2, generator=generator)
            else:
                weight.normal_(0.0, embedding if "embed" in name else 0.2, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # learned, though not by gradients
                buffer.normal_(0.0, 0.5, generator=generator)
    return model.eval()


@functools.cache
def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a checkpoint, as anyone would load it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.inference_mode()
def reference_logits(
    folder: Path, token_ids: Sequence[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """transformers' logits at every position of one sequence, without a cache: fp32 [T, vocab]."""
    model = reference_model(folder, dtype)
    return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()


def reference_greedy(folder: Path, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The ids with which transformers' `generate` goes on, end-of-sequence tokens ignored."""
    return list(_reference_greedy(folder, tuple(prompt_ids), num_tokens))


@functools.cache
@torch.inference_mode()
def _reference_greedy(folder: Path, prompt_ids: tuple[int, ...], num_tokens: int) -> list[int]:
    output = reference_model(folder).generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
    )
    return output[0, len(prompt_ids) :].tolist()


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids below VOCAB_SIZE."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


@functools.cache
def _root() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="penstock-checkpoints-")
    atexit.register(folder.cleanup)
    return Path(folder.name)
