"""int8 codes that are 4-bit codes in steps: found again, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from penstock.kernels.int4_search import TOP_STEP
from penstock.kernels.quant import QuantizedWeight, dequantize_weight, int8_codes
from penstock.workers.calibration.checkpoint import calibrate_into, plan_calibrated, widened
from penstock.workers.calibration.rounding import Recipe
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.layers import Mlp
from penstock.workers.models.loader import load_model
from penstock.workers.quantization import STEPS_KEY, read_scheme
from penstock.workers.weights.steps import in_steps
from tests.workers.calibration.test_checkpoint import windows
from tests.workers.checkpoints import make_checkpoint, random_prompt
from tests.workers.models.test_decoder import PagedDecoder, Tokens

RECIPE = Recipe("gptq", group=16, grid="steps")


def int8(codes: torch.Tensor) -> QuantizedWeight:
    scales = torch.linspace(0.5, 2.0, len(codes))
    return QuantizedWeight("int8", codes.to(torch.int8), scales, codes.shape[1], 64)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_weight_in_steps_comes_back(data: st.DataObject):
    """Whatever the steps and the codes that occur; the last group may be short."""
    group = data.draw(st.sampled_from([16, 32, 64]))
    num_rows, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 150))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    shape = num_rows, -(-width // group)
    steps = torch.randint(1, TOP_STEP + 1, shape, generator=generator)
    offsets = (torch.rand(shape, generator=generator) * (256 - 15 * steps)).long() - 128
    levels = torch.randint(1, 17, shape, generator=generator)[..., None]  # that may occur
    nibbles = torch.rand(*shape, group, generator=generator).mul(levels).long()
    codes = (nibbles * steps[..., None] + offsets[..., None]).flatten(1)[:, :width]
    found = in_steps(int8(codes), group)
    assert found.format == "int4" and found.group == group and found.row_group == 64
    assert found.steps is not None and int(found.steps.max()) <= TOP_STEP
    assert torch.equal(int8_codes(found), codes.to(torch.int8))
    assert torch.equal(dequantize_weight(found), dequantize_weight(int8(codes)))


def test_codes_that_are_not_in_steps():
    codes = torch.zeros(3, 64)
    codes[1, 32:49] = torch.arange(17) - 8  # 17 of them
    with pytest.raises(LoadError, match="row 1, inputs 32 to 63, are not 16 evenly spaced ones"):
        in_steps(int8(codes), 32)
    codes = torch.zeros(2, 16)
    codes[0, :3] = torch.tensor([0, 2, 101])
    with pytest.raises(LoadError, match="row 0, inputs 0 to 15"):
        in_steps(int8(codes), 16)


@pytest.mark.parametrize("name", ["llama", "llama-bias", "qwen3_moe"])
def test_other_engines_read_int8_with_the_same_answers(name: str, tmp_path: Path):
    """Without our key in config.json it is an int8 checkpoint, whose logits have the same bits."""
    out, as_int8 = tmp_path / "steps", tmp_path / "int8"
    calibrate_into(plan_calibrated(make_checkpoint(name), RECIPE), windows(), out)
    shutil.copytree(out, as_int8)
    config = json.loads((out / "config.json").read_text())
    assert config.pop(STEPS_KEY) == {"group_size": 16, "int8_modules": []}
    (as_int8 / "config.json").write_text(json.dumps(config))
    prompt, logits = random_prompt(11), []
    for folder, format in ((out, "int4"), (as_int8, "int8")):
        model = load_model(folder, progress=False)
        assert model.weights.format == format
        logits.append(PagedDecoder(model).step((Tokens(list(prompt)), len(prompt)))[0])
    assert torch.equal(logits[0], logits[1])


def test_wide_layers_stay_int8(tmp_path: Path):
    source, out = make_checkpoint("llama"), tmp_path / "out"
    plan = plan_calibrated(source, RECIPE)
    assert 5.0 < plan.bits_per_weight < 5.6
    mixed = widened(plan, windows(), 6.5)
    assert mixed.wide and plan.bits_per_weight < mixed.bits_per_weight <= 6.5
    calibrate_into(mixed, windows(), out)
    config = json.loads((out / "config.json").read_text())
    assert config[STEPS_KEY]["int8_modules"] == sorted(mixed.wide)
    model = load_model(out, progress=False)
    for index, layer in enumerate(model.layers):
        assert isinstance(layer.mlp, Mlp)
        linears = {
            "mlp.down_proj": layer.mlp.down,
            "self_attn.o_proj": layer.attention.o,
            "self_attn.q_proj": layer.attention.qkv,
        }
        for module, linear in linears.items():
            is_wide = f"model.layers.{index}.{module}" in mixed.wide
            assert linear.format == ("int8" if is_wide else "int4")
    assert len(PagedDecoder(model).greedy(random_prompt(9), 4)) == 4


def test_a_damaged_file_names_the_weight(tmp_path: Path):
    out = tmp_path / "out"
    calibrate_into(plan_calibrated(make_checkpoint("llama"), RECIPE), windows(), out)
    file = out / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][5, :16] = torch.tensor([0, 1, *[127] * 14])
    save_file(tensors, file)
    with pytest.raises(LoadError, match=r"layers\.1\.mlp\.down_proj.*row 5, inputs 0 to 15"):
        load_model(out, progress=False)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ({"group_size": 24}, r"group_size is 24, none of \(16, 32, 64, 128\)"),
        ({}, "unusable"),
        (["x"], "unusable"),
    ],
)
def test_a_config_that_cannot_be(tmp_path: Path, key: object, why: str):
    out = tmp_path / "out"
    calibrate_into(plan_calibrated(make_checkpoint("llama"), RECIPE), windows(), out)
    config = json.loads((out / "config.json").read_text())
    assert read_scheme(config) == ModelConfig.from_pretrained(out).stored_scheme
    with pytest.raises(ConfigError, match=why):
        read_scheme(config | {STEPS_KEY: key})
    packed = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    with pytest.raises(ConfigError, match="is of int8 weights"):
        read_scheme({"quantization_config": packed, STEPS_KEY: {"group_size": 16}})
