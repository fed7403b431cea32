"""Experts in MXFP4, as gpt-oss is published: read and held exactly.

The packer follows the Open Compute Project's format, value by value; the oracle is transformers'
own model over the decoded weights, in fp32.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.kernels.quant import dequantize_weight
from penstock.workers.errors import LoadError
from penstock.workers.experts.build import ExpertSettings
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.loader import load_model
from penstock.workers.models.moe import MoeMlp
from penstock.workers.planning.hardware import DEVICES
from penstock.workers.planning.kept import stored_cost
from penstock.workers.planning.roofline import Roofline
from penstock.workers.weights.stored import mxfp4_weight
from tests.workers.checkpoints import ALL, random_model, random_prompt
from tests.workers.models.test_decoder import PagedDecoder

NUM_NEW = 24
SETTINGS = {**ALL["gpt_oss-window"][1], "intermediate_size": 96, "hidden_size": 64}
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


def value_of(code: int) -> float:
    """E2M1: the sign, two bits of exponent with bias 1, one of mantissa; subnormals of 0.5."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


VALUES = torch.tensor([value_of(code) for code in range(16)])


def as_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[E, N, K] -> blocks [E, N, K / 32, 16], scales [E, N, K / 32], and what they mean."""
    groups = weight.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
    scales = 2.0**exponents
    codes = (groups / scales[..., None])[..., None].sub(VALUES).abs().argmin(-1)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    means = (VALUES[codes] * scales[..., None]).flatten(-2)
    return blocks, (exponents + 127).to(torch.uint8), means


@pytest.fixture(scope="module")
def folder_and_model(tmp_path_factory) -> tuple[Path, Any]:
    """A checkpoint with experts in MXFP4, and transformers' model with what they mean."""
    folder = tmp_path_factory.mktemp("mxfp4")
    model = random_model("gpt_oss", SETTINGS)
    model.save_pretrained(folder)
    tensors, plain = load_file(folder / "model.safetensors"), {}
    for name in list(tensors):
        if name.endswith(("gate_up_proj", "down_proj")):
            weight = tensors.pop(name)  # [E, in, out]
            blocks, scales, means = as_mxfp4(weight.transpose(1, 2))
            tensors |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales}
            plain[name] = means.transpose(1, 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": CONFIG}))
    model.load_state_dict({**model.state_dict(), **plain})
    return folder, model


@torch.inference_mode()
def ids_of(model: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(NUM_NEW):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_ids_are_those_of_the_values_that_are_stored(folder_and_model):
    folder, model = folder_and_model
    prompt = random_prompt(21)
    expected = ids_of(model, prompt)
    decoder = load_model(folder, progress=False)
    assert decoder.weights.format == "mxfp4"
    mlp = decoder.layers[0].mlp
    assert isinstance(mlp, MoeMlp) and isinstance(mlp.experts, list)
    assert {each.format for pair in mlp.experts for each in pair} == {"mxfp4"}
    assert decoder.layers[0].attention.qkv.format == mlp.router.format == "fp32"
    assert PagedDecoder(decoder).greedy(prompt, NUM_NEW) == expected
    assert len(set(expected)) > 5
    opened = load_model(folder, weights="fp32", progress=False)
    assert opened.weights.format == "fp32"
    assert PagedDecoder(opened).greedy(prompt, NUM_NEW) == expected


def test_experts_that_a_cache_moves(folder_and_model, tmp_path):
    """Three of fifteen at a time, with their biases."""
    folder, model = folder_and_model
    settings = ExpertSettings(num_slots=3, folder=str(tmp_path))
    decoder = load_model(folder, progress=False, experts=settings)
    try:
        prompt = random_prompt(21)
        assert PagedDecoder(decoder).greedy(prompt, NUM_NEW) == ids_of(model, prompt)
        assert decoder.routed is not None and decoder.routed.stats().num_misses > 3
    finally:
        decoder.close()


def test_memory_is_as_planned(folder_and_model):
    folder, _ = folder_and_model
    model = replace(ModelConfig.from_pretrained(folder), dtype="fp32")
    held = load_model(folder, progress=False).weights.num_bytes
    bound = Roofline(model, DEVICES["cpu"], "auto", stored=stored_cost(model))
    assert bound.weight_bytes == pytest.approx(held, rel=1e-6)


def test_every_code_and_every_scale():
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    for scale in (0, 1, 126, 127, 128, 250):
        weight = mxfp4_weight(codes, torch.full((1, 16), scale, dtype=torch.uint8))
        low, high = VALUES[torch.arange(256) % 16], VALUES[torch.arange(256) // 16]
        want = torch.stack((low, high), 1).double().flatten() * 2.0 ** (scale - 127)
        assert torch.equal(dequantize_weight(weight)[0].double(), want)
    weight = mxfp4_weight(codes, torch.full((1, 16), 255, dtype=torch.uint8))
    assert dequantize_weight(weight).isnan().all()


def test_damage_names_the_tensor(folder_and_model, tmp_path):
    folder, _ = folder_and_model
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][:, :, 1:].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(LoadError, match="down_proj_scales"):
        load_model(tmp_path, progress=False)
