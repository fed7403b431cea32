"""What a checkpoint's config.json may say, and what is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from penstock.workers.errors import ConfigError
from penstock.workers.families.table import FAMILIES
from penstock.workers.model_config import ModelConfig
from tests.workers.checkpoints import make_checkpoint

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def config_of(folder: Path, **changes) -> ModelConfig:
    """The ModelConfig of LLAMA with `changes`; a value of None drops the key."""
    stated = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(stated))
    return ModelConfig.from_pretrained(folder)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_is_recognised_by_its_config_alone(architecture: str):
    name = FAMILIES[architecture].model_type
    config = ModelConfig.from_pretrained(make_checkpoint(name))
    assert (config.architecture, config.model_type) == (architecture, name)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 4, 2)
    moe = "moe" in name or name in ("mixtral", "minimax_m2", "gpt_oss", "qwen3_next")
    assert config.moe_layers == (moe,) * 3
    assert config.num_experts == (5 if moe else 0)
    assert config.num_experts_per_token == (2 if moe else 0)
    slides = {"ministral": 1, "olmo3": 1, "gemma2": 2, "gemma3_text": 2}
    assert sum(window is not None for window in config.sliding_window) == slides.get(name, 0)
    assert config.dtype == "fp32"
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("mistral-window", (13, 13, 13)),
        ("mistral-layer-types", (None, 13, None)),
        ("mixtral-window", (13, 13, 13)),
        ("qwen2-window", (None, 13, 13)),
        ("qwen3-window-bias", (None, 13, 13)),
        ("qwen2_moe-window", (13, None, 13)),
        ("qwen3_moe-sparse-step", (13, 13, 13)),
    ],
)
def test_the_window_of_each_layer(name: str, windows: tuple[int | None, ...]):
    assert ModelConfig.from_pretrained(make_checkpoint(name)).sliding_window == windows


def test_an_unsupported_architecture_is_refused_by_name_with_the_supported_ones(tmp_path: Path):
    changes = {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}
    with pytest.raises(ConfigError, match="'GPTNeoXForCausalLM' is not supported") as raised:
        config_of(tmp_path, **changes)
    for architecture in FAMILIES:
        assert architecture in str(raised.value)
    with pytest.raises(
        ConfigError, match="LlamaForSequenceClassification with 2 labels is not supported"
    ):
        config_of(tmp_path, architectures=["LlamaForSequenceClassification"])
    with pytest.raises(ConfigError, match="LlamaForCausalLM but model_type 'mistral'"):
        config_of(tmp_path, model_type="mistral")
    with pytest.raises(ConfigError, match="'rwkv9' is not supported"):
        config_of(tmp_path, architectures=None, model_type="rwkv9")
    assert config_of(tmp_path, architectures=None).architecture == "LlamaForCausalLM"


def test_code_that_a_checkpoint_brings_along_is_never_run(tmp_path: Path):
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: ...\n")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Config"}
    assert config_of(tmp_path, auto_map=auto_map).architecture == "LlamaForCausalLM"
    with pytest.raises(ConfigError, match="'EvilForCausalLM' is not supported"):
        config_of(tmp_path, auto_map=auto_map, architectures=["EvilForCausalLM"], model_type="evil")
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["dynamic", "proportional", "mystery"])
def test_rope_scaling_that_is_not_supported_is_refused_by_name(tmp_path: Path, kind: str):
    scaling = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 64}
    with pytest.raises(ConfigError, match=f"{kind}"):
        config_of(tmp_path, rope_scaling=scaling)


def test_longrope_has_the_factors_of_the_longest_context_that_is_served(tmp_path: Path):
    short, long = [float(i + 1) for i in range(8)], [float(2 * i + 1) for i in range(8)]
    scaling: dict[str, Any] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    scaling["original_max_position_embeddings"] = 64
    config = config_of(tmp_path, rope_scaling=scaling)
    (rope,) = config.ropes
    assert rope.attention_factor == pytest.approx((1 + math.log(8) / math.log(64)) ** 0.5)
    for served, factors in ((None, long), (65, long), (64, short), (1, short)):
        assert config.for_length(served).ropes[0].factors == tuple(factors), served
    with pytest.raises(ConfigError, match="8 positive long_factor"):
        config_of(tmp_path, rope_scaling={**scaling, "long_factor": [0.0, *long[1:]]})


def test_rope_settings_of_older_configs(tmp_path: Path):
    config = config_of(tmp_path, rope_theta=1234.0, rope_scaling={"type": "linear", "factor": 2.0})
    (rope,) = config.ropes
    assert (rope.type, rope.theta, rope.factor) == ("linear", 1234.0, 2.0)
    assert rope.rotary_dim == 16
    partial = config_of(tmp_path, partial_rotary_factor=0.25)
    assert partial.ropes[0].rotary_dim == 4
    assert partial.ropes[0].theta == 10000.0


def test_yarn_takes_its_factor_from_the_contexts_where_it_is_null(tmp_path: Path):
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}
    assert config_of(tmp_path, rope_scaling=scaling).ropes[0].factor == 8.0


def test_eos_ids_are_those_of_both_files(tmp_path: Path):
    assert config_of(tmp_path, eos_token_id=[7, 3, 10**6]).eos_token_ids == (3, 7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert config_of(tmp_path, eos_token_id=3).eos_token_ids == (3, 5, 7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert config_of(tmp_path, eos_token_id=3).eos_token_ids == (3,)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        config_of(tmp_path)


def test_dtype_under_both_of_its_names(tmp_path: Path):
    assert config_of(tmp_path, dtype="bfloat16").dtype == "bf16"
    assert config_of(tmp_path, torch_dtype="float16").dtype == "fp16"
    assert config_of(tmp_path).dtype == "auto"
    with pytest.raises(ConfigError, match="'float64' is not supported"):
        config_of(tmp_path, dtype="float64")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 3}, r"num_heads \(4\) is not a multiple"),
        ({"head_dim": 15}, "15"),
        ({"partial_rotary_factor": 2.0}, "rotary dimension"),
        ({"num_hidden_layers": 0}, "num_layers must be positive"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"dtype": "no_such_thing"}, "no_such_thing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "positive factors"),
        ({"quantization_config": {"quant_method": "hqq"}}, "'hqq' is not supported.*gptq"),
    ],
)
def test_unusable_settings_are_config_errors(tmp_path: Path, changes: dict, why: str):
    with pytest.raises(ConfigError, match=why):
        config_of(tmp_path, **changes)


def test_files_that_are_no_config(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        ModelConfig.from_pretrained(tmp_path)
    for text in ("", "{", "[1]", "[" * 10**5, "\ud800".encode("utf-8", "surrogatepass")):
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / "config.json").write_bytes(data)
        with pytest.raises(ConfigError, match=r"config\.json"):
            ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(" " * (17 * 2**20) + json.dumps(LLAMA))
    with pytest.raises(ConfigError, match="larger than"):
        ModelConfig.from_pretrained(tmp_path)
