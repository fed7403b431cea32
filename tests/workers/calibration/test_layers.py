"""The text's way through the layers: transformers' model sees the same inputs of linear layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.workers.calibration import layers
from penstock.workers.calibration.gptq import Inputs
from penstock.workers.calibration.layers import LayerCalibrator
from penstock.workers.calibration.scaling import fold
from penstock.workers.calibration.tensors import ReplacedWeights
from penstock.workers.calibration.windows import WindowRunner
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.build import build_decoder
from penstock.workers.weights.checkpoint import open_checkpoint
from penstock.workers.weights.sources import CheckpointWeights
from tests.workers.checkpoints import ALL, VOCAB_SIZE, make_checkpoint, random_model
from tests.workers.models.test_decoder import PagedDecoder, Tokens

LENGTH = 40


def opened(folder: Path) -> ReplacedWeights:
    tensors = open_checkpoint(folder)
    return ReplacedWeights(CheckpointWeights(folder, tensors, "fp32", "cpu", lambda _: None))


def config_of(folder: Path) -> ModelConfig:
    return dataclasses.replace(ModelConfig.from_pretrained(folder), dtype="fp32")


def texts(count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCAB_SIZE, (count, LENGTH), generator=generator)


class Watch:
    """Keeps the moments of each module's inputs, and rounds nothing, or each weight to `coarse`."""

    def __init__(self, tensors: ReplacedWeights, needs_exact: bool = False, coarse: float = 0.0):
        self.tensors = tensors
        self.needs_exact = needs_exact
        self.coarse = coarse
        self.found: dict[str, Inputs] = {}

    def needs_inputs(self, modules: Sequence[str]) -> bool:
        return True

    def round_all(
        self, modules: Sequence[str], inputs: Inputs | None, *, norm: str | None = None
    ) -> None:
        for module in modules:
            if inputs is not None:
                self.found[module] = inputs
            if self.coarse:
                weight = self.tensors.stored(f"{module}.weight")
                coarse = (weight / self.coarse).round() * self.coarse
                self.tensors.replaced[f"{module}.weight"] = coarse


def inputs_of_transformers(name: str, ids: Tensor) -> dict[str, Tensor]:
    """The inputs [T, K] of every linear layer that its model has as a module."""
    expected: dict[str, Tensor] = {}
    model = random_model(*ALL[name])
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in path:
            module.register_forward_pre_hook(
                lambda _, given, path=path: expected.__setitem__(path, given[0].flatten(0, -2))
            )
    with torch.inference_mode():
        model(ids, use_cache=False)
    return {path: x for path, x in expected.items() if path.split(".")[-1] != "gate"
            and not path.endswith("shared_expert_gate")}  # fmt: skip


def calibrated(name: str, ids: Tensor, watch: Watch) -> LayerCalibrator:
    """After all layers."""
    config = config_of(make_checkpoint(name))
    table = watch.tensors.stored("model.embed_tokens.weight")
    states = [table[row] for row in ids]
    calibrator = LayerCalibrator(config, watch, WindowRunner(config, LENGTH), states)
    for index in range(config.num_layers):
        calibrator.layer(index)
    return calibrator


@pytest.mark.parametrize(
    "name",
    ["llama", "llama-bias", "mistral-window", "qwen2", "qwen3", "mixtral", "qwen2_moe-normed",
     "glm4_moe", "qwen3_moe", "olmoe-clip"],
)  # fmt: skip
def test_inputs_are_those_of_transformers(name: str):
    """The layers behind experts show what these give."""
    ids, watch = texts(), Watch(opened(make_checkpoint(name)))
    compared = expected = inputs_of_transformers(name, ids)
    calibrator = calibrated(name, ids, watch)
    config = calibrator.config
    assert len(compared) >= 4 * config.num_layers
    for path in compared:
        found = watch.found[path]
        assert found.num_tokens == ids.numel(), path
        rows = expected[path]
        torch.testing.assert_close(found.moments, rows.T @ rows, rtol=1e-3, atol=1e-2)
    if any(config.moe_layers):
        total = sum(config.moe_layers) * config.num_experts
        assert calibrator.experts.total == total
        assert calibrator.experts.without_text == total  # none saw 128 tokens of 120


@pytest.mark.parametrize("name", ["llama", "llama-bias", "qwen3", "qwen2_moe-normed", "mixtral"])
def test_the_unrounded_model_runs_beside_the_rounded_one(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    """However coarse the weights become, the exact inputs stay transformers'; `cross` is their
    product with those that the rounded layers give."""
    monkeypatch.setattr(layers, "MIN_EXPERT_TOKENS", 1)
    ids, expected = texts(), inputs_of_transformers(name, texts())
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    keep = Inputs.with_rows

    def with_rows(self: Inputs, x: Tensor, exact: Tensor | None = None) -> Inputs:
        assert exact is not None and x.shape == exact.shape
        seen.append((x.clone(), exact.clone()))
        return keep(self, x, exact)

    class Pairs(Watch):
        def round_all(
            self, modules: Sequence[str], inputs: Inputs | None, *, norm: str | None = None
        ) -> None:
            super().round_all(modules, inputs, norm=norm)
            if inputs is not None:
                x, exact = (torch.cat(each) for each in zip(*seen, strict=True))
                pairs.update(dict.fromkeys(modules, (x, exact)))
                assert inputs.cross is not None
                torch.testing.assert_close(inputs.cross, exact.T @ x, rtol=1e-3, atol=1e-2)
            seen.clear()

    seen: list[tuple[Tensor, Tensor]] = []
    monkeypatch.setattr(Inputs, "with_rows", with_rows)
    calibrated(name, ids, Pairs(opened(make_checkpoint(name)), needs_exact=True, coarse=0.04))
    last = [path for path in expected if path in pairs and ".experts." not in path]
    assert len(last) >= 4
    for path in last:
        x, exact = pairs[path]
        torch.testing.assert_close(exact, expected[path], rtol=1e-3, atol=1e-3)
        if not path.startswith("model.layers.0.self_attn") or path.endswith("o_proj"):
            assert float((x - exact).abs().max()) > 1e-2  # the rounded model's are others


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_folded_scales_leave_the_logits(name: str, dtype: torch.dtype):
    """Also where the stored norm is bf16: what rounding it changes, the columns take up."""
    folder = make_checkpoint(name)
    config, plain, scaled = config_of(folder), opened(folder), opened(folder)
    generator = torch.Generator().manual_seed(6)
    layer = {"input_layernorm": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
             "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"]}  # fmt: skip
    for i in range(config.num_layers):
        for norm, modules in layer.items():
            key = f"model.layers.{i}.{norm}.weight"
            before = plain.stored(key).to(dtype).float()
            plain.replaced[key] = before
            scales = torch.exp(torch.randn(config.hidden_size, generator=generator))
            after, exact = fold(before, scales, dtype)
            assert after.dtype == dtype
            scaled.replaced[key] = after.float()
            for module in modules:
                weight = f"model.layers.{i}.{module}.weight"
                scaled.replaced[weight] = plain.stored(weight) * exact
    prompt = texts(1)[0].tolist()
    logits = [
        PagedDecoder(build_decoder(config, source)).step((Tokens(prompt), LENGTH))[0]
        for source in (plain, scaled)
    ]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-3)
    assert not torch.equal(logits[0], logits[1])


def test_a_norm_that_is_zero_somewhere_is_left_there():
    norm = torch.tensor([0.0, 1.0, 1e-6, 2.0])
    divided, exact = fold(norm, torch.tensor([2.0, 2.0, 1e9, 4.0]), torch.float16)
    assert divided.tolist() == [0.0, 0.5, norm.half()[2].item(), 0.5]
    assert exact.tolist() == [1.0, 2.0, 1.0, 4.0]
