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
BASES = [*BUILTIN.values(), MISTRAL]
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 3, 4, 64, 512, 0.5, 1e-6, "", "4", "silu", "gelu", "float16"),
    *(10**6, -0.5, 5.0, "float", "half", "double", "auto", "torch.float16", "swish"),
    *("no_such_thing", [], [3], [3, 7], [True], ["x"], {}, {"rope_type": "default"}),
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "default", "rope_theta": "500"},
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    {"type": "linear", "factor": 2.0},
]
NAMES = [
    *sorted({name for base in BASES for name in base if name not in ("architectures",)}),
    *("rope_theta", "rope_scaling", "torch_dtype", "layer_types", "partial_rotary_factor"),
    *("num_experts", "qkv_bias", "clip_qkv", "norm_topk_prob", "mlp_only_layers"),
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
    assert (stated_in_full(stated) is not None) == (name in ("llama", "mistral", "mixtral"))


def test_the_older_form_of_the_hub(tmp_path: Path) -> None:
    stated = {**BUILTIN["builtin"], "rope_theta": 500000.0, "rope_scaling": None}
    del stated["rope_parameters"], stated["head_dim"]
    stated["torch_dtype"] = stated.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert stated_in_full(stated) is not None
    config = read(tmp_path)
    assert config == by_transformers(tmp_path)
    assert isinstance(config, ModelConfig) and config.ropes[0].theta == 500000.0


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
