"""Reader of peft's folders: what is refused, by the name of the field and with the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.workers.adapters.packed import adapter_bytes, pack_adapter
from penstock.workers.adapters.peft import read_adapter
from penstock.workers.adapters.table import AdapterTable
from penstock.workers.config import EngineConfig
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.model_config import ModelConfig
from penstock.workers.option_groups.adapter_names import parse_modules
from tests.workers.adapters.peft_files import write_adapter
from tests.workers.checkpoints import make_checkpoint

WEIGHTS = "adapter_model.safetensors"


def config_of(name: str = "llama") -> ModelConfig:
    return ModelConfig.from_pretrained(make_checkpoint(name))


def packed(folder: Path, name: str = "llama") -> Any:
    return pack_adapter("a", read_adapter(folder), config_of(name), torch.device("cpu"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_dora": True}, "use_dora true is not supported: merge"),
        ({"bias": "lora_only"}, 'bias "lora_only" is not supported: merge'),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not served; LORA is"),
        ({"r": 0}, "r must be a positive number; got 0"),
        ({"lora_alpha": "8"}, "lora_alpha must be a positive number"),
        ({"rank_pattern": [4]}, "rank_pattern must be an object"),
        ({"rank_pattern": {"(": 4}}, "no regular expression"),
        ({"r": 5}, "are not of rank 5"),
    ],
)
def test_what_is_not_served_is_refused_by_its_field(tmp_path, fields, words):
    folder = write_adapter(tmp_path, make_checkpoint(), **fields)
    with pytest.raises(LoadError) as refused:
        read_adapter(folder)
    assert words in str(refused.value)


def renamed(folder: Path, **names: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    for before, after in names.items():
        tensors = {name.replace(before, after): each for name, each in tensors.items()}
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("lora_B", "lora_embedding_B", "is no lora_A or lora_B of a linear layer"),
        ("lora_A.weight", "lora_magnitude_vector", "is no lora_A or lora_B"),
        ("layers.2", "layers.7", "model.layers.7.mlp.down_proj is no linear layer"),
        ("mlp.up_proj", "mlp.experts.0.up_proj", "without routed experts"),
        ("model.layers.0.self_attn.q_proj", "lm_head", "lm_head is no linear layer"),
    ],
)
def test_tensors_that_belong_to_no_linear_are_refused(tmp_path, before, after, words):
    folder = write_adapter(tmp_path, make_checkpoint())
    renamed(folder, **{before: after})
    with pytest.raises(LoadError) as refused:
        packed(folder)
    assert words in str(refused.value)


def test_an_adapter_of_another_model_is_refused(tmp_path):
    folder = write_adapter(tmp_path, make_checkpoint("mistral"))
    with pytest.raises(LoadError, match=r"outputs there: the adapter was trained for"):
        packed(folder)


def test_experts_are_refused(tmp_path):
    folder = write_adapter(tmp_path, make_checkpoint("qwen3_moe"), targets=("q_proj", "up_proj"))
    renamed(folder, **{"mlp.gate": "mlp.experts.0.gate_proj"})
    tensors = load_file(folder / WEIGHTS)
    for which, shape in (("A", (4, 64)), ("B", (40, 4))):
        name = f"base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_{which}.weight"
        tensors[name] = torch.zeros(shape)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(LoadError, match=r"experts\.0\.up_proj is no linear layer"):
        packed(folder, "qwen3_moe")


def test_folders_without_an_adapter_say_what_is_missing(tmp_path):
    with pytest.raises(LoadError, match=r"it has no adapter_config\.json, which peft writes"):
        read_adapter(tmp_path)
    write_adapter(tmp_path, make_checkpoint())
    (tmp_path / WEIGHTS).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(LoadError, match="pickled weights are never opened"):
        read_adapter(tmp_path)


def test_half_a_pair_is_refused(tmp_path):
    folder = write_adapter(tmp_path, make_checkpoint())
    tensors = load_file(folder / WEIGHTS)
    del tensors["base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"]
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(LoadError, match=r"layers\.1\.self_attn\.k_proj has no lora_B"):
        read_adapter(folder)


def test_the_digest_is_that_of_values_and_configuration(tmp_path):
    base = make_checkpoint()
    first = read_adapter(write_adapter(tmp_path / "a", base)).digest
    assert read_adapter(write_adapter(tmp_path / "b", base)).digest == first
    others = [
        read_adapter(write_adapter(tmp_path / "c", base, seed=1)).digest,
        read_adapter(write_adapter(tmp_path / "d", base, lora_alpha=7)).digest,
    ]
    assert len({first, *others}) == 3


def test_an_adapter_of_all_linears_takes_the_bytes_that_are_kept_for_it(tmp_path):
    adapter = packed(write_adapter(tmp_path, make_checkpoint(), rank=6))
    assert adapter.num_bytes == adapter_bytes(config_of(), 6)
    assert adapter.rank == 6


def test_a_table_has_its_limits(tmp_path):
    base = make_checkpoint()
    small = str(write_adapter(tmp_path / "small", base, rank=2, targets=("q_proj",)))
    large = str(write_adapter(tmp_path / "large", base, rank=5, targets=("q_proj",)))
    table = AdapterTable(config_of(), torch.device("cpu"), most=2, max_rank=4)
    with pytest.raises(LoadError, match="rank 5, and max_lora_rank is 4: raise it"):
        table.load("large", large)
    table.load("a", small)
    before = table.find("a")
    table.load("b", small)
    with pytest.raises(LoadError, match=r"max_loras: 2 adapters are loaded \(a, b\)"):
        table.load("c", small)
    table.load("a", small)  # in place of the one that is there
    assert table.names == ["a", "b"] and table.find("a") is not before
    assert table.unload("a") and table.find("a") is None
    table.load("c", small)
    assert table.num_bytes <= table.reserved_bytes


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (("a=/x", "b=/y=z"), {"a": "/x", "b": "/y=z"}),
        (('{"name": "a", "path": "/x", "base_model_name": "m"}',), {"a": "/x"}),
    ],
)
def test_names_and_folders_in_vllms_two_forms(texts, found):
    assert parse_modules(texts) == found


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (("/x",), "must be NAME=FOLDER"),
        (("a b=/x",), "must be NAME=FOLDER"),
        (("a=/x", "a=/y"), "'a' is there twice"),
        (('{"name": "a"}',), "must be NAME=FOLDER"),
        (('{"name": "a", "rank": 3}',), "rank is unknown"),
        (("{",), "is not JSON"),
    ],
)
def test_other_forms_are_refused(texts, words):
    with pytest.raises(ConfigError) as refused:
        parse_modules(texts)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora_modules": "a=/x"}, "lora_modules needs enable_lora"),
        ({"lora_runtime_updates": True}, "lora_runtime_updates needs enable_lora"),
        ({"enable_lora": True, "lora_modules": ("a=/x", "b=/y"), "max_loras": 1}, "raise max_lor"),
    ],
)
def test_settings_that_do_not_go_together(settings, words):
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**settings)
    assert words in str(refused.value)


def test_a_configuration_that_is_no_object_is_refused(tmp_path):
    folder = write_adapter(tmp_path, make_checkpoint())
    (folder / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(LoadError):
        read_adapter(folder)
