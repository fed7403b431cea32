"""Calibrates a decoder layer by layer: the text runs through each layer once, part by part.

The linear layers of one part are rounded as soon as their inputs over the whole text are known, and
what the rounded ones make of them is the next part's input, so that later layers make up for
earlier ones. Memory: one layer in fp32, the moments of one part, and the text's states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.matmul import linear, pack_linear
from penstock.kernels.rowwise import rms_norm, silu_mul
from penstock.kernels.types import PackedLinear
from penstock.workers.calibration.gptq import Inputs, moments
from penstock.workers.calibration.tensors import ReplacedWeights
from penstock.workers.calibration.windows import WindowRunner
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.loader import build_attention, build_mlp
from penstock.workers.models.moe import MoeMlp

# An expert that fewer tokens of the text went through is rounded without them.
MIN_EXPERT_TOKENS = 128


@dataclass(slots=True)
class ExpertCounts:
    """Experts so far, and those among them that too few tokens went through."""

    total: int = 0
    without_text: int = 0
    least: int = MIN_EXPERT_TOKENS


class Rounds(Protocol):
    """What is done with the linear layers of one input: Rounder, or a measurement."""

    tensors: ReplacedWeights

    def needs_inputs(self, modules: Sequence[str]) -> bool: ...

    def round_all(
        self, modules: Sequence[str], inputs: Inputs | None, *, norm: str | None = None
    ) -> None: ...


class LayerCalibrator:
    """Rounds one layer after another, for the states of the text in between."""

    def __init__(self, config: ModelConfig, rounder: Rounds, runner: WindowRunner):
        self.config = config
        self.rounder = rounder
        self.tensors = rounder.tensors
        self.runner = runner
        self.experts = ExpertCounts()

    @torch.inference_mode()
    def layer(self, index: int, states: Sequence[Tensor]) -> None:
        """Round layer `index`. `states`: the residual stream before it, [T, hidden] fp32 of each
        window; afterwards, the one behind it."""
        name = f"model.layers.{index}"
        self._attention(index, f"{name}.self_attn", f"{name}.input_layernorm.weight", states)
        norm = f"{name}.post_attention_layernorm.weight"
        if self.config.moe_layers[index]:
            self._experts(index, f"{name}.mlp", norm, states)
        else:
            modules = [f"{name}.mlp.{part}_proj" for part in ("gate", "up", "down")]
            self._mlp(modules, lambda i: self._normed(states[i], norm), len(states), norm)(states)
        self.tensors.replaced.clear()

    @torch.inference_mode()
    def head(self, states: Sequence[Tensor]) -> None:
        """Round the LM head, if it is to be."""
        inputs = None
        if self.rounder.needs_inputs(["lm_head"]):
            norm = "model.norm.weight"
            inputs = moments(self._normed(state, norm) for state in states)
        self.rounder.round_all(["lm_head"], inputs)
        self.tensors.replaced.clear()

    def _normed(self, state: Tensor, norm: str) -> Tensor:
        return rms_norm(state, self.tensors.stored(norm), self.config.rms_norm_eps)

    def _attention(self, index: int, name: str, norm: str, states: Sequence[Tensor]) -> None:
        qkv, o = [f"{name}.{part}_proj" for part in "qkv"], f"{name}.o_proj"
        self._round(qkv, lambda i: self._normed(states[i], norm), len(states), norm)
        attention = build_attention(self.config, self.tensors, index)
        attended = [self.runner.attend(attention, self._normed(state, norm)) for state in states]
        self._round([o], attended.__getitem__, len(states))
        projection = self._packed([o])
        for state, x in zip(states, attended, strict=True):
            state += linear(x, projection)

    def _mlp(
        self, modules: Sequence[str], x: Callable[[int], Tensor], count: int, norm: str | None
    ) -> Callable[[Sequence[Tensor]], None]:
        """Round gate, up and down for the inputs x(0), x(1), ... x(count - 1); returned is what
        adds the output of each to a tensor."""
        gate_up, down = list(modules[:2]), modules[2]
        self._round(gate_up, x, count, norm)
        packed = self._packed(gate_up)
        inner = [silu_mul(linear(x(i), packed)) for i in range(count)]
        self._round([down], inner.__getitem__, count)

        def add_to(states: Sequence[Tensor]) -> None:
            projection = self._packed([down])
            for state, each in zip(states, inner, strict=True):
                state += linear(each, projection)

        return add_to

    def _experts(self, index: int, name: str, norm: str, states: Sequence[Tensor]) -> None:
        """The norm makes the router's inputs too, which stays as it is: no channel scales."""
        if f"model.layers.{index}.block_sparse_moe.gate.weight" in self.tensors:
            name = f"model.layers.{index}.block_sparse_moe"
        x = [self._normed(state, norm) for state in states]
        mlp = build_mlp(self.config, self.tensors, index)
        assert isinstance(mlp, MoeMlp)
        ids = [mlp.choose(each)[1] for each in x]
        has_shared = mlp.shared is not None
        del mlp
        parts = ("w1", "w3", "w2")
        if f"{name}.experts.0.w1.weight" not in self.tensors:
            parts = ("gate_proj", "up_proj", "down_proj")
        for expert in range(self.config.num_experts):
            rows = torch.cat([y[(i == expert).any(1)] for y, i in zip(x, ids, strict=True)])
            modules = [f"{name}.experts.{expert}.{part}" for part in parts]
            self.experts.total += 1
            if len(rows) < MIN_EXPERT_TOKENS:
                self.experts.without_text += 1
                self.rounder.round_all(modules[:2], None)
                self.rounder.round_all(modules[2:], None)
            else:
                self._mlp(modules, [rows].__getitem__, 1, None)
        if has_shared:
            shared = [f"{name}.shared_expert.{part}_proj" for part in ("gate", "up", "down")]
            self._mlp(shared, x.__getitem__, len(x), None)
        mlp = build_mlp(self.config, self.tensors, index)
        assert isinstance(mlp, MoeMlp)
        for state, each in zip(states, x, strict=True):
            state += self.runner.routed(mlp, each)

    def _round(
        self,
        modules: Sequence[str],
        x: Callable[[int], Tensor],
        count: int,
        norm: str | None = None,
    ) -> None:
        inputs = None
        if self.rounder.needs_inputs(modules):
            inputs = moments(x(i) for i in range(count))
        self.rounder.round_all(modules, inputs, norm=norm)

    def _packed(self, modules: Sequence[str]) -> PackedLinear:
        """As the loader fuses them, with the biases that the checkpoint has."""
        weights = [self.tensors.stored(f"{module}.weight") for module in modules]
        names = [f"{module}.bias" for module in modules if f"{module}.bias" in self.tensors]
        bias = torch.cat([self.tensors.stored(each) for each in names]) if names else None
        return pack_linear(torch.cat(weights), bias)
