"""The text's way through one layer, stage by stage: with the weights as they were, or as rounded.

A stage is what lies between two sets of linear layers of one input: norm; attention; the MLP's
activation. What a stage gives, the next linear layers are rounded for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.matmul import linear, pack_linear
from penstock.kernels.rowwise import act_mul, rms_norm
from penstock.kernels.types import PackedLinear
from penstock.workers.calibration.tensors import ReplacedWeights
from penstock.workers.calibration.windows import WindowRunner
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.build import build_attention, build_mlp
from penstock.workers.models.moe import MoeMlp

Rows = Callable[[int], Tensor]  # the inputs [T, K] of linear layers, by the number of their window


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream of every window, `states` [T, hidden] fp32, and the weights that it goes
    through. The states change in place."""

    config: ModelConfig
    tensors: ReplacedWeights
    runner: WindowRunner
    states: Sequence[Tensor]

    def normed(self, norm: str) -> Rows:
        """Computed anew at each call: with the norm as it is then."""
        eps = self.config.rms_norm_eps
        return lambda i: rms_norm(self.states[i], self.tensors.stored(norm), eps)

    def attended(self, index: int, x: Rows) -> list[Tensor]:
        """What the output projection of layer `index` is given, for normed states `x`."""
        attention = build_attention(self.config, self.tensors, index)
        return [self.runner.attend(attention, x(i)) for i in range(len(self.states))]

    def inner(self, modules: Sequence[str], x: Rows, count: int) -> list[Tensor]:
        """What the down projection is given, for the inputs x(0) ... x(count - 1) of the gate and
        up projections `modules`."""
        packed = self._packed(modules)
        return [act_mul(linear(x(i), packed)) for i in range(count)]

    def add(self, module: str, x: Sequence[Tensor]) -> None:
        """Add what the linear layer `module` makes of `x` to the states."""
        projection = self._packed([module])
        for state, each in zip(self.states, x, strict=True):
            state += linear(each, projection)

    def moe(self, index: int) -> MoeMlp:
        mlp = build_mlp(self.config, self.tensors, index)
        assert isinstance(mlp, MoeMlp)
        return mlp

    def add_routed(self, index: int, x: Sequence[Tensor]) -> None:
        """Add what the experts of layer `index` make of the normed states `x`."""
        mlp = self.moe(index)
        for state, each in zip(self.states, x, strict=True):
            state += self.runner.routed(mlp, each)

    def _packed(self, modules: Sequence[str]) -> PackedLinear:
        """As the loader fuses them, with the biases that the checkpoint has."""
        weights = [self.tensors.stored(f"{module}.weight") for module in modules]
        names = [f"{module}.bias" for module in modules if f"{module}.bias" in self.tensors]
        bias = torch.cat([self.tensors.stored(each) for each in names]) if names else None
        return pack_linear(torch.cat(weights), bias)
