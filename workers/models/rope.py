"""Rotary position embedding: cos and sin of any positions, computed from a RopeConfig.

There is no precomputed table, so no position is too large.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.workers.rope_config import QueryScaling, RopeConfig


class Rope:
    """cos and sin for one forward pass, shared by all of its layers."""

    def __init__(self, config: RopeConfig, trained_context: int, device: torch.device):
        self.attention_factor = config.attention_factor
        self.trained_context = trained_context
        self._frequencies = inverse_frequencies(config).to(device=device, dtype=torch.float64)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`positions` int64 [T] -> cos, sin fp32 [T, rotary_dim/2].

        Angles are fp64 products. Within the trained context they are then rounded to fp32, because
        that is the angle which transformers computes and the model was trained with: greedy ids
        stay equal. Beyond it they keep fp64: an fp32 angle is off by 0.03 rad at a million.
        """
        half = self._frequencies.shape[0]
        cos, sin = torch.empty(2, len(positions), half, device=positions.device)
        angles, turned = torch.empty(2, *cos.shape, dtype=torch.float64, device=cos.device)
        self.write_tables(positions, cos, sin, angles, turned)
        return cos, sin

    def write_tables(
        self, positions: Tensor, cos: Tensor, sin: Tensor, angles: Tensor, turned: Tensor
    ) -> None:
        """As `tables`, into `cos` and `sin`; `angles` and `turned`, fp64, are scratch."""
        torch.mul(positions[:, None].double(), self._frequencies, out=angles)
        turned.copy_(cos.copy_(angles))  # rounded to fp32
        is_trained = positions[:, None] < self.trained_context
        torch.where(is_trained, turned, angles, out=angles)
        for table, function in ((cos, torch.cos), (sin, torch.sin)):
            table.copy_(function(angles, out=turned))
            if self.attention_factor != 1.0:
                table.mul_(self.attention_factor)


def write_query_scales(scaling: QueryScaling, positions: Tensor, out: Tensor) -> None:
    """The factor of each row's queries at `positions` int64 [T], into `out` fp32 [T, 1].

    In fp64 and rounded: the bits of a row do not depend on its place in the batch.
    """
    periods = torch.div(positions, scaling.period, rounding_mode="floor")
    out.copy_(1 + scaling.beta * torch.log(1 + periods.double())[:, None])


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """Radians per position of each rotated pair, fp32 [rotary_dim/2].

    Bit for bit those of transformers: fp32, in its order of operations.
    """
    steps = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    powers = config.theta**steps
    if config.type == "linear":
        return 1.0 / powers / config.factor
    if config.type == "llama3":
        return _llama3(config, 1.0 / powers)
    if config.type == "yarn":
        return _yarn(config, powers)
    if config.type == "factors":
        return 1.0 / powers / torch.tensor(config.factors)
    if config.type == "longrope":
        return 1.0 / (torch.tensor(config.factors) * powers)
    assert config.type == "default"
    return 1.0 / powers


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, a ramp in between."""
    turns = config.original_max_position_embeddings / (2 * math.pi / frequencies)
    ramp = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = ramp.clamp(0, 1)
    return (1 - kept) * frequencies / config.factor + kept * frequencies


def _yarn(config: RopeConfig, powers: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071): like llama3, but the ramp is linear in the dimension's index."""
    dim, original = config.rotary_dim, config.original_max_position_embeddings

    def dimension_with(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension_with(config.beta_fast), dimension_with(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001  # a ramp without width is a step
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return 1.0 / (config.factor * powers) * (1 - kept) + 1.0 / powers * kept
