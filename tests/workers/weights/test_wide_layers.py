"""int4 made at load: in some layers q, k, v and down are int8."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.kernels.matmul import linear
from penstock.kernels.types import PackedLinear
from penstock.workers.config import EngineConfig
from penstock.workers.engine.load import load_engine
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.layers import Attention, Mlp
from penstock.workers.models.loader import load_model
from penstock.workers.models.moe import MoeMlp
from penstock.workers.planning.hardware import device_named
from penstock.workers.planning.roofline import Roofline
from penstock.workers.quantization import is_wide
from tests.workers.checkpoints import make_checkpoint, random_model

DEEP = {
    "vocab_size": 192, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 9,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def wide(num_layers: int) -> list[int]:
    return [layer for layer in range(num_layers) if is_wide(layer, num_layers)]


def test_the_layers_are_those_of_llama_cpp() -> None:
    assert wide(30) == [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29]
    assert wide(32) == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert wide(3) == [2] and wide(1) == [0]


@pytest.mark.parametrize(
    ("options", "formats"),
    [
        ({}, {"int4", "int8"}),
        ({"int4_wide_layers": False}, {"int4"}),
        ({"int4_activations": "plain"}, {"int4"}),
    ],
)
def test_it_is_the_default_of_a_server(options: dict[str, Any], formats: set[str]) -> None:
    config = EngineConfig(
        model=str(make_checkpoint("llama")), weights="int4", num_blocks=8, device="cpu", **options
    )
    engine = load_engine(config)
    mlps = [layer.mlp for layer in engine.model.layers]
    assert {each.down.format for each in mlps if isinstance(each, Mlp)} == formats
    engine.close()


def linears(name: str, weights: str, is_mixed: bool = False) -> list[list[PackedLinear]]:
    """q, k, v; o; gate and up; down, of each layer."""
    folder = make_checkpoint(name)
    found = load_model(folder, weights=weights, int4_wide_layers=is_mixed, progress=False)
    each = []
    for layer in found.layers:
        assert isinstance(layer.mixer, Attention)
        mlp = layer.mlp.shared if isinstance(layer.mlp, MoeMlp) else layer.mlp
        assert isinstance(mlp, Mlp)
        each.append([layer.mixer.qkv, layer.mixer.o, mlp.gate_up, mlp.down])
    return each


@pytest.mark.parametrize("name", ["llama", "qwen2_moe"])
def test_their_weights_are_those_of_int8(name: str) -> None:
    mixed, int4 = linears(name, "int4", is_mixed=True), linears(name, "int4")
    int8 = linears(name, "int8")
    for layer, packed in enumerate(mixed):
        is_wide = layer in wide(len(mixed))
        expected = ["int8", "int4", "int4", "int8"] if is_wide else ["int4"] * 4
        assert [each.format for each in packed] == expected
        of_format = {"int4": int4[layer], "int8": int8[layer]}
        for place, each in enumerate(packed):
            other = of_format[each.format][place]
            x = torch.randn(3, each.in_features, generator=torch.Generator().manual_seed(place))
            assert torch.equal(linear(x, each), linear(x, other))


def test_routed_experts_stay_in_4_bits() -> None:
    folder = make_checkpoint("qwen2_moe")
    found = load_model(folder, weights="int4", int4_wide_layers=True, progress=False)
    for layer in found.layers:
        assert isinstance(layer.mlp, MoeMlp)
        assert {each.format for pair in layer.mlp.held for each in pair} == {"int4"}


@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe"])
def test_the_planner_counts_them(model_type: str, tmp_path) -> None:
    more = {} if model_type == "llama" else {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }  # fmt: skip
    random_model(model_type, {**DEEP, **more}).save_pretrained(tmp_path)
    plan = Roofline(ModelConfig.from_pretrained(tmp_path), device_named("cpu"), "int4", "fp32")
    found = load_model(
        tmp_path, weights="int4", dtype="bf16", int4_wide_layers=True, progress=False
    )
    assert found.weights.num_bytes == pytest.approx(plan.weight_bytes, rel=5e-3)
