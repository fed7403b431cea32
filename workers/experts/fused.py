"""An expert of a checkpoint that has all experts of a layer in one tensor, as transformers keeps
them, or as gpt-oss is published: gate and up then take turns, and plain matrices are transposed.

Imported by models/build.py and packed.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from penstock.kernels.quant import QuantizedWeight
from penstock.workers.families.table import FAMILIES
from penstock.workers.model_config import ModelConfig
from penstock.workers.weights.sources import WeightSource

Weight = Tensor | QuantizedWeight


def fused_expert(
    source: WeightSource, config: ModelConfig, block: str, expert: int
) -> tuple[Weight, Weight]:
    """gate_up [2 * inner, hidden], gate first, and down [hidden, inner] of one expert of a layer,
    whose routed block has the name `block`."""
    names, count = FAMILIES[config.architecture].names, config.num_experts
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    gate_up, down = (
        source.take_expert(f"{block}.{part}", expert, count, shape, transposed=names.transposed)
        for part, shape in zip(names.fused_experts, ((2 * inner, hidden), (hidden, inner)))
    )
    return (_parted(gate_up) if names.interleaved else gate_up), down


def expert_biases(
    source: WeightSource, config: ModelConfig, block: str
) -> tuple[Tensor, Tensor] | None:
    """[experts, 2 * inner], gate first, and [experts, hidden]; None where they have none."""
    if not config.expert_bias:
        return None
    names, count = FAMILIES[config.architecture].names, config.num_experts
    both, down_name = names.fused_experts
    gate_up = source.take(f"{block}.{both}_bias", count, 2 * config.moe_intermediate_size)
    down = source.take(f"{block}.{down_name}_bias", count, config.hidden_size)
    if names.interleaved:
        gate_up = torch.cat((gate_up[:, 0::2], gate_up[:, 1::2]), 1)
    return gate_up, down


def _parted(weight: Weight) -> Weight:
    """Rows of gate and up in turns -> those of gate, then those of up."""
    if isinstance(weight, Tensor):
        return torch.cat((weight[0::2], weight[1::2]))
    codes, scales = (torch.cat((each[0::2], each[1::2])) for each in (weight.codes, weight.scales))
    return replace(weight, codes=codes, scales=scales)
