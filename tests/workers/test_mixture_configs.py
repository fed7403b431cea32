"""Mixtures of experts by their publishers' config.json: what is left out there, and old names.

The files were written from the families' public descriptions; sizes are those of the shapes that
the planner knows, whose numbers of parameters are the published ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.workers.errors import ConfigError
from penstock.workers.model_config import ModelConfig
from penstock.workers.planning.parameters import count_parameters
from penstock.workers.planning.shapes import SHAPES

GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True,
    "attention_dropout": 0.0, "pad_token_id": 151329, "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "partial_rotary_factor": 0.5,
    "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408, "norm_topk_prob": True, "num_attention_heads": 96, "n_group": 1,
    "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
    "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_hidden_layers": 46,
    "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
MINIMAX: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536, "rotary_dim": 64,
    "max_position_embeddings": 196608, "num_attention_heads": 48, "num_experts_per_tok": 8,
    "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
    "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06,
    "rope_theta": 5000000, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
    "attention_dropout": 0.0, "eos_token_id": 200002, "head_dim": 64, "hidden_act": "silu",
    "experts_per_token": 4, "hidden_size": 2880, "initial_context_length": 4096,
    "intermediate_size": 2880, "max_position_embeddings": 131072, "num_attention_heads": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_theta": 150000, "sliding_window": 128,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
        "original_max_position_embeddings": 4096, "truncate": False,
    },
    "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
            "lm_head",
        ],
    },
}  # fmt: skip


def read(folder: Path, stated: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(stated))
    return ModelConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    ("stated", "shape"),
    [(GLM, "GLM-4.5-Air"), (MINIMAX, "MiniMax-M2"), (GPT_OSS, "gpt-oss-20b")],
)
def test_shapes_are_those_of_the_planner(tmp_path: Path, stated: dict[str, Any], shape: str):
    config, known = read(tmp_path, stated), SHAPES[shape]
    assert count_parameters(config) == count_parameters(known)
    for name in ("head_dim", "num_experts_per_token", "moe_layers", "qk_norm", "expert_bias",
                 "attention_sinks", "swiglu_clamp", "shared_expert_gate"):  # fmt: skip
        assert getattr(config, name) == getattr(known, name), name
    assert config.rotary_dim == known.rotary_dim
    assert config.router.scoring == known.router.scoring
    assert config.router.in_fp32 == known.router.in_fp32


def test_gpt_oss(tmp_path: Path):
    config = read(tmp_path, GPT_OSS)
    (rope,) = config.ropes
    assert (rope.type, rope.factor, rope.truncate) == ("yarn", 32.0, False)
    assert rope.attention_factor == pytest.approx(1.34657, abs=1e-5)
    assert config.sliding_window == (128, None) * 12
    assert config.swiglu_clamp == (1.702, 7.0)
    scheme = config.stored_scheme
    assert scheme is not None and scheme.formats == ("mxfp4",)
    assert scheme.ignores("model.layers.7.self_attn.q_proj")
    assert not scheme.ignores("model.layers.7.mlp.experts")


def test_minimax_m2(tmp_path: Path):
    config = read(tmp_path, MINIMAX)
    scheme = config.stored_scheme
    assert scheme is not None and (scheme.groups, scheme.block_rows) == ((128,), 128)
    assert scheme.ignores("model.layers.3.block_sparse_moe.gate")
    assert not scheme.ignores("model.layers.3.block_sparse_moe.experts.5.w1")
    assert not scheme.ignores("model.layers.3.self_attn.q_proj")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"n_group": 3}, r"n_group \(3\) must divide"),
        ({"n_group": 4, "topk_group": 5}, "topk_group"),
        ({"n_group": 128, "topk_group": 64}, "two at least"),
        ({"n_group": 32, "topk_group": 1}, "more than the 4 experts"),
    ],
)
def test_groups_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], why: str):
    with pytest.raises(ConfigError, match=why):
        read(tmp_path, {**GLM, **changes})
