"""Calibrated checkpoints: what is written is what was rounded, and served; what it refuses.

The stored words are decoded here by hand from the published layout, and transformers' model with
these weights and norms is the oracle of the served ids.
"""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.deployments.cli.quantize import stopped_by_sigterm
from penstock.kernels.matmul import linear
from penstock.kernels.quant import dequantize_weight, quantize_weight
from penstock.workers.calibration.checkpoint import (
    calibrate,
    calibrate_into,
    plan_calibrated,
    widened,
)
from penstock.workers.calibration.rounding import METHODS, Recipe
from penstock.workers.calibration.spool import Spool
from penstock.workers.calibration.text import windows_of
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.layers import Mlp
from penstock.workers.models.loader import load_model
from tests.workers.checkpoints import VOCAB_SIZE, make_checkpoint, random_prompt
from tests.workers.models.test_decoder import PagedDecoder, Tokens
from tests.workers.weights.test_quantized_checkpoints import oracle_ids

NUM_NEW = 16
LENGTH = 64


def windows(count: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, VOCAB_SIZE, (count, LENGTH), generator=generator).tolist()


def by_hand(parts: dict[str, Tensor]) -> Tensor:
    """The weight of one module: words of eight codes, zero points packed over rows."""
    num_rows, width = parts["weight_shape"].tolist()
    scales = parts["weight_scale"].float()
    group = width // scales.shape[1]

    def codes(words: Tensor, count: int) -> list[list[int]]:
        rows = []
        for row in words.tolist():
            row = [word & 0xFFFFFFFF for word in row]
            rows.append([(row[k // 8] >> (4 * (k % 8))) & 15 for k in range(count)])
        return rows

    weight = torch.tensor(codes(parts["weight_packed"], width), dtype=torch.float32)
    zeros = torch.full(scales.shape, 8.0)
    if "weight_zero_point" in parts:
        zeros = torch.tensor(codes(parts["weight_zero_point"].T, num_rows)).T.float()
    column = torch.arange(width) // group
    return (weight - zeros[:, column]) * scales[:, column]


def plain_weights(folder: Path) -> dict[str, Tensor]:
    """Every weight of a written checkpoint, decoded by hand."""
    stored, plain = load_file(folder / "model.safetensors"), {}
    for name, tensor in stored.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            parts = {
                n[len(module) + 1 :]: t for n, t in stored.items() if n.startswith(f"{module}.")
            }
            plain[f"{module}.weight"] = by_hand(parts)
        elif not kind.startswith("weight_"):
            plain[name] = tensor.float()
    plain.setdefault("lm_head.weight", plain["model.embed_tokens.weight"])
    return plain


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("llama", Recipe("awq-gptq")),
        ("llama-tied", Recipe("gptq", group=64, grid="symmetric")),
        ("llama-bias", Recipe("gptq", act_order=True)),
        ("llama", Recipe("awq", group=128)),
        ("llama", Recipe("nearest")),
        ("mixtral", Recipe("awq-gptq")),
    ],
)
def test_it_is_served_as_it_was_written(name: str, recipe: Recipe, tmp_path: Path):
    source, out = make_checkpoint(name), tmp_path / "out"
    plan = plan_calibrated(source, recipe)
    seen: list[int] = []
    experts = calibrate_into(plan, windows(), out, seen.append)
    assert sum(seen) == plan.num_weights > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    plain, prompt = plain_weights(out), random_prompt(11)
    model = load_model(out, progress=False)
    assert model.weights.format == "int4"
    assert PagedDecoder(model).greedy(prompt, NUM_NEW) == oracle_ids(name, plain, prompt)[:NUM_NEW]
    assert experts.total == (15 if name == "mixtral" else 0)
    # Of the 768 tokens, a fifth to an expert and two for each.
    assert experts.without_text == 0
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    weights = config["config_groups"]["group_0"]["weights"]
    assert config["format"] == "pack-quantized" and weights["symmetric"] == (
        recipe.grid == "symmetric"
    )
    stored = load_file(out / "model.safetensors")
    parts = {n: t for n, t in stored.items() if ".weight_" in n and "weight_shape" not in n}
    num_bits = 8 * sum(tensor.nbytes for tensor in parts.values())
    assert plan.bits_per_weight == pytest.approx(num_bits / plan.num_weights)


@pytest.mark.parametrize("recipe", [Recipe("awq-gptq"), Recipe("gptq", grid="symmetric")])
def test_what_is_read_is_what_was_rounded_to_the_last_bit(recipe: Recipe, tmp_path: Path):
    """The weights in memory that the text ran through, and those that the loader takes."""
    source, out = make_checkpoint("llama"), tmp_path / "out"
    plan = plan_calibrated(source, recipe)
    spool = Spool(tmp_path / "tensors")
    calibrate(plan, windows(), spool)
    calibrate_into(plan, windows(), out)
    plain, stored = plain_weights(out), load_file(out / "model.safetensors")
    for module in plan.specs:
        packed, scale, shape, *zero = spool.take(module)
        assert torch.equal(packed, stored[f"{module}.weight_packed"])
        assert torch.equal(scale, stored[f"{module}.weight_scale"])
        parts = {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}
        if zero:
            assert torch.equal(zero[0], stored[f"{module}.weight_zero_point"])
            parts["weight_zero_point"] = zero[0]
        assert torch.equal(by_hand(parts), plain[f"{module}.weight"])
    opened = load_model(out, weights="fp32", progress=False)
    down = opened.layers[0].mlp
    assert isinstance(down, Mlp)
    found = linear(torch.eye(down.down.in_features), down.down).T
    assert torch.equal(found, plain["model.layers.0.mlp.down_proj.weight"])


def test_calibrated_outputs_are_closer_than_rounded_ones(tmp_path: Path):
    """Of the whole model, on its own text: logits of GPTQ against those of the nearest codes."""
    source, text = make_checkpoint("llama"), windows(12)
    expected = load_model(source, progress=False)
    errors = {}
    for method in METHODS:
        out = tmp_path / method
        calibrate_into(plan_calibrated(source, Recipe(method)), text, out)
        model = load_model(out, weights="fp32", progress=False)
        errors[method] = sum(
            float((_logits(model, row) - _logits(expected, row)).square().mean())
            for row in text[:4]
        )
    assert errors["gptq"] < 0.92 * errors["nearest"]
    assert errors["awq-gptq"] < 0.92 * errors["nearest"]


def _logits(model: Decoder, ids: list[int]) -> Tensor:
    (logits,) = PagedDecoder(model).step((Tokens(list(ids)), len(ids)))
    return logits


def test_experts_that_saw_too_little_are_counted_and_rounded_plainly(tmp_path: Path):
    source, out = make_checkpoint("qwen2_moe"), tmp_path / "out"
    plan = plan_calibrated(source, Recipe("gptq"))
    experts = calibrate_into(plan, windows(4), out)  # 256 tokens, 2 of 5 experts each
    assert 0 < experts.without_text < experts.total == 15
    assert load_model(out, progress=False).weights.format == "int4"


def test_wide_layers_are_those_that_gain_most_within_the_bits(tmp_path: Path):
    source, out = make_checkpoint("llama"), tmp_path / "out"
    plan = plan_calibrated(source, Recipe("gptq"))
    assert plan.bits_per_weight < 4.65
    mixed = widened(plan, windows(), 5.5)
    assert mixed.wide and 4.65 < mixed.bits_per_weight <= 5.5
    calibrate_into(mixed, windows(), out)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    last = list(config["config_groups"].values())[-1]
    assert last["targets"] == sorted(mixed.wide) and last["weights"]["num_bits"] == 8
    model = load_model(out, progress=False)
    formats = {layer.mlp.down.format for layer in model.layers if isinstance(layer.mlp, Mlp)}
    formats |= {layer.attention.qkv.format for layer in model.layers}
    formats |= {layer.attention.o.format for layer in model.layers}
    assert formats | {"int8", "int4"} == {"int8", "int4"}
    assert {"int8", "int4"} <= set(model.weights.bytes_of)
    assert len(PagedDecoder(model).greedy(random_prompt(9), 4)) == 4
    stored, name = load_file(out / "model.safetensors"), sorted(mixed.wide)[0]
    weight = load_file(source / "model.safetensors")[f"{name}.weight"]
    eight = quantize_weight(weight, "int8")
    assert torch.equal(stored[f"{name}.weight"], eight.codes)
    assert torch.equal(dequantize_weight(eight), eight.codes * stored[f"{name}.weight_scale"])
    with pytest.raises(ConfigError, match=r"between 4\.\d+.*and 8"):
        widened(plan, windows(), 4.0)


def test_a_failure_leaves_nothing_behind(tmp_path: Path):
    source = tmp_path / "source"
    shutil.copytree(make_checkpoint("llama"), source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"up_proj.*NaN"):
        calibrate_into(plan_calibrated(source, Recipe()), windows(2), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_sigterm_leaves_nothing_behind(tmp_path: Path):
    plan = plan_calibrated(make_checkpoint("llama"), Recipe("nearest"))
    with pytest.raises(SystemExit) as ended, stopped_by_sigterm():
        calibrate_into(
            plan, windows(2), tmp_path / "out", lambda _: signal.raise_signal(signal.SIGTERM)
        )
    assert ended.value.code == 143 and not list(tmp_path.iterdir())


def test_ids_that_the_model_does_not_have_are_refused(tmp_path: Path):
    plan = plan_calibrated(make_checkpoint("llama"), Recipe())
    with pytest.raises(ConfigError, match=rf"token id {VOCAB_SIZE}"):
        calibrate_into(plan, [[1, VOCAB_SIZE, 3]], tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("granite", "scaled embeddings and scaled residuals"),
        ("smollm3", "layers without rotary embedding"),
        ("ministral3", "queries that grow"),
        ("phi3", "projections fused"),
        ("olmo2", "norms behind attention and MLP"),
        ("olmo3", "rotary embeddings that differ by layer"),
        ("gemma2", "norms stored with an offset and activation gelu_tanh"),
        ("glm4", "projections fused"),
    ],
)
def test_switches_that_the_calibrator_does_not_have_are_named(name: str, why: str):
    with pytest.raises(ConfigError, match=f"cannot be calibrated: it has .*{why}"):
        plan_calibrated(make_checkpoint(name), Recipe())


def test_windows_lie_evenly_and_do_not_overlap():
    ids = list(range(100, 1100))
    found = windows_of(ids, 400, 100, begin=[1])
    assert [len(each) for each in found] == [100] * 4 and all(each[0] == 1 for each in found)
    assert found[0][1] == 100 and found[-1][-1] == 1099
    flat = [each for window in found for each in window[1:]]
    assert len(set(flat)) == len(flat)
    short = windows_of(ids, 5000, 300)
    assert [len(each) for each in short] == [300] * 3
    assert windows_of(ids[:50], 400, 100) == [ids[:50]]


def test_a_bf16_model_has_bf16_scales(tmp_path: Path):
    source = tmp_path / "source"
    shutil.copytree(make_checkpoint("llama"), source)
    tensors = load_file(source / "model.safetensors")
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    plan = plan_calibrated(source, Recipe("awq-gptq"))
    assert {spec.scale_dtype for spec in plan.specs.values()} == {torch.bfloat16}
    calibrate_into(plan, windows(4), tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    norm = "model.layers.0.input_layernorm.weight"
    assert stored[norm].dtype == torch.bfloat16 and not torch.equal(stored[norm], tensors[norm])
    # Opened, it is the source within what 4 bits cost: no scale was folded on one side alone.
    found = load_model(tmp_path / "out", weights="fp32", progress=False)
    expected = load_model(source, weights="fp32", progress=False)
    ids = windows(1)[0]
    difference = (_logits(found, ids) - _logits(expected, ids)).square().mean()
    assert difference < 0.25 * _logits(expected, ids).square().mean()
