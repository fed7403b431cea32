"""Checkpoints whose weights are Hadamard transforms (`penstock quantize --hadamard`), heads in int8
beside int4 layers, and transforms that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.deployments.cli.main import main
from penstock.kernels.matmul import linear
from penstock.kernels.quant import hadamard_transform
from penstock.workers.errors import ConfigError
from penstock.workers.models.layers import Mlp
from penstock.workers.models.loader import load_model
from penstock.workers.quantization import Int4Options, read_scheme
from penstock.workers.weights.int4_layout import STEP_GROUP
from penstock.workers.weights.quantize import plan_quantize, write_quantized
from tests.workers.checkpoints import ALL, make_checkpoint, random_model, random_prompt
from tests.workers.weights.test_quantize import greedy, turned


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 64 and 128 inputs, and of 100 in the second layer's MLP."""
    folder = tmp_path_factory.mktemp("transformed") / "source"
    random_model("llama", {**ALL["llama"][1], "intermediate_size": 128}).save_pretrained(folder)
    return folder


def written(source: Path, out: Path, format: Any, **options: Any) -> Path:
    plan = plan_quantize(
        source, format, **{"quantize_o": True, "quantize_lm_head": False, **options}
    )
    write_quantized(plan, out, lambda _: None)
    return out


def stated(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "config.json").read_text())
    assert isinstance(found, dict)
    return found


def assert_rounded(found: torch.Tensor, truth: torch.Tensor) -> None:
    """To the nearest of 255 codes of each row."""
    assert ((found - truth).abs() <= truth.abs().amax(1, keepdim=True) / 253).all()


def test_int8_is_the_model_quantised_at_load(source: Path, tmp_path: Path):
    out = written(source, tmp_path / "out", "int8", hadamard=True)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors, plain = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    decoded = tensors[name].float() * tensors[f"{name}_scale"]
    assert_rounded(decoded, turned(plain[name]))
    prompt = random_prompt(19)
    at_load = greedy(load_model(source, weights="int8", progress=False), [prompt])
    model = load_model(out, progress=False)
    assert greedy(model, [prompt]) == at_load
    assert model.layers[0].attention.row_form == (64, True)
    plainly = load_model(written(source, tmp_path / "plain", "int8"), progress=False)
    assert plainly.layers[0].attention.row_form == (64, False)
    opened = load_model(out, weights="fp32", progress=False).layers[1].mlp
    assert isinstance(opened, Mlp) and opened.down.format == "fp32"
    x = torch.eye(128)
    torch.testing.assert_close(linear(x, opened.down).T, plain[name], atol=6e-3, rtol=0)


def test_widths_that_no_block_divides_stay_as_they_are(tmp_path: Path):
    out = written(make_checkpoint("llama"), tmp_path / "out", "int8", hadamard=True)
    transform = stated(out)["quantization_config"]["transform_config"]["config_groups"]["input"]
    assert (transform["type"], transform["head_dim"]) == ("hadamard", 64)
    (online, offline) = transform["apply"]
    assert (online["location"], offline["location"]) == ("input", "weight_input")
    assert online["ignore"] == ["lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in range(3))]
    steps = written(
        make_checkpoint("llama"), tmp_path / "steps", "int4", grid="steps", group=16, hadamard=True
    )
    for folder in (out, steps):
        mlp = load_model(folder, progress=False).layers[0].mlp
        assert isinstance(mlp, Mlp) and mlp.gate_up.hadamard and not mlp.down.hadamard


@pytest.mark.parametrize("calibrated", [False, True])
def test_steps_stand_for_the_weight(source: Path, tmp_path: Path, calibrated: bool):
    """Rounded codes are near the transform of the weight, and those of a text have less error for
    its inputs; read with int8 activations, and refused with plain ones."""
    out = tmp_path / "out"
    options = ["--to", "int4", "--grid", "steps", "--hadamard"]
    if calibrated:
        options += ["--calibrate", "self", "--calibration-tokens", "2048"]
    assert main(["quantize", str(source), str(out), *options, "--no-progress"]) == 0
    model, opened = (load_model(out, weights=w, progress=False) for w in ("auto", "fp32"))
    assert {model.layers[0].attention.qkv.format, model.weights.format} == {"int4"}
    assert model.layers[0].attention.row_form == (64, True)
    plain = load_file(source / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
    found = linear(torch.eye(64), opened.layers[0].attention.o).T
    error = (found - plain).square().mean() / plain.square().mean()
    assert error < (0.02 if calibrated else 0.006)
    x = torch.randn(5, 64)
    made = linear(x, model.layers[0].attention.o)
    torch.testing.assert_close(made, x @ found.T, atol=0.02 * float(made.abs().max()), rtol=0)
    with pytest.raises(ConfigError, match="transformed for activations in int8"):
        load_model(out, int4=Int4Options(STEP_GROUP, "plain"), progress=False)


@pytest.mark.parametrize(("grid", "group"), [("zero-points", 32), ("steps", 16)])
@pytest.mark.parametrize("calibrated", [False, True])
def test_a_head_is_int8_beside_int4_layers(tmp_path: Path, grid: str, group: int, calibrated: bool):
    out = tmp_path / "out"
    options = ["--to", "int4", "--grid", grid, "--quantize-lm-head", "--no-progress"]
    if calibrated:
        options += ["--calibrate", "self", "--calibration-tokens", "1024"]
    source = make_checkpoint("llama")
    assert main(["quantize", str(source), str(out), *options]) == 0
    model = load_model(out, progress=False)
    assert model.lm_head.format == "int8" and model.layers[0].attention.qkv.format == "int4"
    tensors, plain = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    head = tensors["lm_head.weight"].float() * tensors["lm_head.weight_scale"]
    assert_rounded(head, plain["lm_head.weight"])


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
@pytest.mark.parametrize("format", ["int8", "int4", "nf4"])
def test_a_plain_head_of_a_quantised_checkpoint_is_quantised_on_request(
    tmp_path: Path, name: str, format: str
):
    out = written(make_checkpoint(name), tmp_path / "out", format)
    kept = load_model(out, progress=False)
    asked = load_model(out, quantize_lm_head=True, progress=False)
    assert (kept.lm_head.format, asked.lm_head.format) == (
        "fp32",
        "nf4" if format == "nf4" else "int8",
    )
    assert asked.layers[0].attention.qkv.format == kept.layers[0].attention.qkv.format == format
    opened = load_model(out, weights="fp32", quantize_lm_head=True, progress=False)
    assert opened.lm_head.format == "fp32"


INT8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int", "dynamic": True},
        }
    },
}


def transform(location: str = "input", **changes: Any) -> dict[str, Any]:
    part = {"targets": ["Linear"], "location": location, "ignore": ["lm_head"]}
    scheme = {"type": "hadamard", "head_dim": 64, "randomize": False, "apply": [part], **changes}
    return {"config_groups": {"R": scheme}}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"transform_config": transform("output")}, "'R' of output is not supported"),
        ({"transform_config": transform("k_cache")}, "'R' of k_cache is not supported"),
        ({"transform_config": transform(head_dim=128)}, "blocks other than 64"),
        ({"transform_config": transform(head_dim=None)}, "blocks other than 64"),
        ({"transform_config": transform(randomize=True)}, "random or not of Hadamard"),
        ({"transform_config": transform(type="random-matrix")}, "random or not of Hadamard"),
        ({"transforms_config": {"transform_groups": {"u": {}}}}, "an early form"),
    ],
)
def test_other_transforms_are_refused_by_name(config: dict[str, Any], why: str):
    with pytest.raises(ConfigError, match=why):
        read_scheme({"quantization_config": INT8 | config})


def test_transforms_of_weights_alone_are_in_them_already():
    scheme = read_scheme(
        {"quantization_config": INT8 | {"transform_config": transform("weight_output")}}
    )
    assert scheme is not None and not scheme.is_transformed("model.layers.0.mlp.up_proj")
    scheme = read_scheme({"quantization_config": INT8 | {"transform_config": transform()}})
    assert scheme is not None and scheme.is_transformed("model.layers.0.mlp.up_proj")
    assert not scheme.is_transformed("lm_head")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--to", "nf4"], "--hadamard is for --to int8"),
        (["--to", "int4"], "and for --to int4 with --grid steps"),
        (
            ["--to", "int4", "--grid", "steps", "--calibrate", "self", "--method", "awq"],
            "--hadamard does not go with channel scales: --method awq",
        ),
    ],
)
def test_refusals_of_the_command_name_the_flag(tmp_path: Path, capsys, options, why):
    given = [str(make_checkpoint("llama")), str(tmp_path / "out"), *options, "--hadamard"]
    assert main(["quantize", *given]) == 2
    assert why in capsys.readouterr().err


def test_the_transform_is_the_kernels():
    x = torch.randn(3, 200)
    assert torch.equal(turned(x), hadamard_transform(x))
