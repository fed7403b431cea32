"""Configs that are read without transformers: the oracle is what its own classes make of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.workers import model_config
from penstock.workers.errors import ConfigError
from penstock.workers.families.table import FAMILIES
from penstock.workers.model_config import ModelConfig
from penstock.workers.stated_config import stated_in_full
from penstock.workers.weights.hub import resolve_model
from tests.workers.checkpoints import make_checkpoint

BUILTIN = {
    name: json.loads((Path(resolve_model(name)) / "config.json").read_text())
    for name in ("builtin", "builtin-moe")
}
MISTRAL = {
    **{key: value for key, value in BUILTIN["builtin"].items() if "bias" not in key},
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 13,
}
_PLAIN = {key: value for key, value in BUILTIN["builtin"].items() if "bias" not in key}
QWEN2 = {  # as Qwen publishes them, in the older form
    **{key: value for key, value in _PLAIN.items() if key not in ("rope_parameters", "head_dim")},
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1000000.0,
    "sliding_window": 32, "use_sliding_window": False, "max_window_layers": 2,
}  # fmt: skip
QWEN3 = {
    **QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
    "head_dim": 24, "rope_scaling": None, "sliding_window": None,
}  # fmt: skip
LLAMA3 = {
    **{key: value for key, value in BUILTIN["builtin"].items() if key != "rope_parameters"},
    "max_position_embeddings": 131072, "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
}  # fmt: skip
BASES = [*BUILTIN.values(), MISTRAL, QWEN2, QWEN3, LLAMA3]
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 3, 4, 64, 512, 0.5, 1e-6, "", "4", "silu", "gelu", "float16"),
    *(10**6, -0.5, 5.0, "float", "half", "double", "auto", "torch.float16", "swish"),
    *("no_such_thing", [], [3], [3, 7], [True], ["x"], {}, {"rope_type": "default"}),
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "default", "rope_theta": "500"},
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    {"type": "linear", "factor": 2.0},
    LLAMA3["rope_scaling"],
    {**LLAMA3["rope_scaling"], "factor": 0.5},
    {**LLAMA3["rope_scaling"], "factor": 8},
    {**LLAMA3["rope_scaling"], "low_freq_factor": 4.0},
    {**LLAMA3["rope_scaling"], "original_max_position_embeddings": 131072},
    {**LLAMA3["rope_scaling"], "rope_theta": 500000.0},
    ["full_attention"] * 2,
    ["full_attention"] * BUILTIN["builtin"]["num_hidden_layers"],
    ["sliding_attention"] * BUILTIN["builtin"]["num_hidden_layers"],
]
NAMES = [
    *sorted({name for base in BASES for name in base if name not in ("architectures",)}),
    *("rope_theta", "rope_scaling", "torch_dtype", "layer_types", "partial_rotary_factor"),
    *("num_experts", "qkv_bias", "clip_qkv", "norm_topk_prob", "mlp_only_layers"),
    *("use_sliding_window", "max_window_layers", "use_mrope"),
]
CHANGES = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(ODD), max_size=3)
DROPPED = st.lists(st.sampled_from(NAMES), max_size=2)


def read(folder: Path) -> ModelConfig | type[ConfigError]:
    try:
        return ModelConfig.from_pretrained(folder)
    except ConfigError:
        return ConfigError


def by_transformers(folder: Path) -> ModelConfig | type[ConfigError]:
    with mock.patch.object(model_config, "stated_in_full", return_value=None):
        return read(folder)


@given(st.sampled_from(BASES), CHANGES, DROPPED)
@example(BUILTIN["builtin"], {"partial_rotary_factor": ""}, [])
def test_any_change_is_read_as_by_transformers_or_refused_by_both(
    tmp_path_factory: Any, base: Any, changes: Any, dropped: Any
) -> None:
    folder = tmp_path_factory.getbasetemp()
    stated = {key: value for key, value in {**base, **changes}.items() if key not in dropped}
    (folder / "config.json").write_text(json.dumps(stated))
    assert read(folder) == by_transformers(folder), stated


@pytest.mark.parametrize("name", [each.model_type for each in FAMILIES.values()])
def test_checkpoints_that_transformers_has_saved(name: str) -> None:
    folder = Path(make_checkpoint(name))
    assert read(folder) == by_transformers(folder) != ConfigError
    stated = json.loads((folder / "config.json").read_text())
    in_full = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
    assert (stated_in_full(stated) is not None) == (name in in_full)


def test_the_older_form_of_the_hub(tmp_path: Path) -> None:
    stated = {**BUILTIN["builtin"], "rope_theta": 500000.0, "rope_scaling": None}
    del stated["rope_parameters"], stated["head_dim"]
    stated["torch_dtype"] = stated.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert stated_in_full(stated) is not None
    config = read(tmp_path)
    assert config == by_transformers(tmp_path)
    assert isinstance(config, ModelConfig) and config.ropes[0].theta == 500000.0


@pytest.mark.parametrize("stated", [QWEN2, QWEN3, LLAMA3], ids=["qwen2", "qwen3", "llama3"])
def test_published_forms_need_no_transformers(tmp_path: Path, stated: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert stated_in_full(stated) is not None
    config = read(tmp_path)
    assert config == by_transformers(tmp_path)
    assert isinstance(config, ModelConfig)
    assert config.sliding_window == (None,) * config.num_layers
    if stated is LLAMA3:
        assert (config.ropes[0].type, config.ropes[0].factor) == ("llama3", 8.0)


@pytest.mark.parametrize("name", BUILTIN)
def test_the_built_in_models_need_no_transformers(name: str) -> None:
    script = f"""
import sys
from penstock.workers.models.loader import load_model
from penstock.workers.weights.hub import resolve_model
load_model(resolve_model({name!r}), weights="fp32", progress=False)
print("transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
