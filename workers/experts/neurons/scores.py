"""Scores an expert's neurons for a token, from a low-bit copy of its gate and up matrices.

y = sum_j a_j * Wd[:, j] with a_j = silu(Wg[j].x) * (Wu[j].x): a neuron whose a_j is small can be
left out. Its score is |silu(Wg[j].x)| (gate), |Wu[j].x| (up; FloE, arXiv 2505.05950) or |a_j|
(product). Computing it takes one or two thirds of the expert; so a copy of these matrices in int8
or int4 (int2 in FloE) stays on the device, for all experts. It gives scores only, never a result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.delta import gate_mul_
from penstock.kernels.matmul import linear, pack_linear
from penstock.kernels.neurons import dequantize_neurons
from penstock.kernels.quant import WeightFormat, quantize_weight
from penstock.kernels.types import PackedLinear
from penstock.workers.experts.expert_file import RowSource
from penstock.workers.experts.slots import Key
from penstock.workers.weights.sources import DTYPES

FORMATS: tuple[WeightFormat, ...] = ("int8", "int4")


class NeuronScores:
    """Scores of the neurons of all experts of a file, `kind` of them, from copies in `format`."""

    def __init__(self, source: RowSource, kind: str, format: WeightFormat, device: torch.device):
        """Reads every expert of `source`, whose rows or copies are neurons, once. Raises
        CorruptedExpert."""
        facts = source.manifest
        assert facts.copies or not facts.is_packed
        self.kind, self.format, self.inner = kind, format, facts.inner
        hidden, dtype = facts.hidden, DTYPES[facts.dtype]
        self._copies: dict[Key, PackedLinear] = {}
        for layer, expert in facts.experts():
            if facts.is_packed:
                copy = torch.tensor(source.rows(layer, facts.num_experts + expert))
                rows = dequantize_neurons(copy, hidden, facts.copies)
            else:
                rows = torch.tensor(source.rows(layer, expert)).view(dtype)
            gate, up, _ = rows.split(hidden, 1)
            parts = {"gate": gate, "up": up, "product": torch.cat([gate, up])}
            weight = parts[kind].float().to(device)
            self._copies[layer, expert] = pack_linear(quantize_weight(weight, format))

    @property
    def num_bytes(self) -> int:
        """Device memory of the copies."""
        return sum(copy.num_bytes for copy in self._copies.values())

    def has(self, layer: int, expert: int) -> bool:
        """False: in a group, it is another rank's."""
        return (layer, expert) in self._copies

    def of(self, layer: int, expert: int, x: Tensor) -> Tensor:
        """Normed states [n, hidden] -> fp32 [n, inner], none negative.

        On the native path, a row's scores have the same bits whatever other rows are in `x`.
        """
        found = linear(x, self._copies[layer, expert]).float()
        if self.kind == "up":
            return found.abs_()
        gate = silu_(found[:, : self.inner])
        return gate.abs() if self.kind == "gate" else gate.mul_(found[:, self.inner :]).abs_()

    def all_of(self, layer: int, expert: int, x: Tensor) -> dict[str, Tensor]:
        """Scores of every kind, for calibration; needs copies of the kind `product`."""
        assert self.kind == "product"
        return all_scores(linear(x, self._copies[layer, expert]).float())


def all_scores(gate_up: Tensor) -> dict[str, Tensor]:
    """Each kind of score, [n, inner], from the outputs of gate and up, [n, 2 * inner]."""
    gate, up = gate_up.chunk(2, dim=1)
    gate = silu_(gate.clone())
    return {"gate": gate.abs(), "up": up.abs(), "product": (gate * up).abs()}


def silu_(gate: Tensor) -> Tensor:
    """x * sigmoid(x) of `gate` [n, D], in place. PyTorch's has other bits for another n."""
    return gate_mul_(gate, gate)


@dataclass(frozen=True, slots=True, eq=False)
class NeuronSelector:
    """Scores, and the threshold for each expert."""

    scores: NeuronScores
    thresholds: Mapping[Key, float]

    def has(self, layer: int, expert: int) -> bool:
        return self.scores.has(layer, expert)

    def active(self, layer: int, expert: int, x: Tensor) -> Tensor:
        """The selected neurons of an expert for normed states [n, hidden]: bool [n, inner]."""
        return self.scores.of(layer, expert, x) >= self.thresholds[layer, expert]
