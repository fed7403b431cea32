"""The 4-bit grid of a group of weights in a file: its scale and zero point, fitted to the weights.

w = (code - zero) * scale with codes 0-15. What is fitted is what the file can hold, so that reading
back changes nothing: scales in its dtype and integer zero points, as compressed-tensors stores
them; or, in a grid of steps, 16 evenly spaced codes of an int8 row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock.kernels.int4_search import best_steps
from penstock.kernels.rowwise import hadamard

Grid = Literal["zero-points", "symmetric", "steps"]
GRIDS: tuple[Grid, ...] = ("zero-points", "symmetric", "steps")
LEVELS = 15
INT8_MAX = 127.0
MIN_SCALE = 1e-7  # as kernels.quant has it of int8 rows
MIDDLE = 8  # the code of 0 of a symmetric grid
# Ranges that are tried, in steps more or fewer than the 15 from the least weight to the greatest.
STEPS = (-1.0, -0.5, 0.0, 0.5, 1.0, 1.5)


@dataclass(frozen=True, slots=True)
class GridSpec:
    """What grids are like. `group`: inputs that share a scale. `kind`: in zero-points each group
    has its own code of 0, an integer; in symmetric it is 8; in steps a row has an fp32 scale, and a
    group 16 of int8's codes, step * code + offset. `scale_dtype`: of the stored scales of groups.
    `hadamard`: of steps, the weight is transformed before it is rounded (kernels/quant.py).
    """

    group: int = 32
    kind: Grid = "zero-points"
    scale_dtype: torch.dtype = torch.bfloat16
    hadamard: bool = False

    def num_groups(self, width: int) -> int:
        return -(-width // self.group)

    def bits(self, width: int) -> float:
        """Bits of a weight, its share of scales, zero points, steps and offsets included: stored,
        but for those of steps, which are the bits in memory."""
        if self.kind == "steps":
            return 4 + (16 * self.num_groups(width) + 32) / width
        extra = self.scale_dtype.itemsize * 8 + (4 if self.kind == "zero-points" else 0)
        return 4 + extra * self.num_groups(width) / width

    def in_units(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """`weight` [N, K] as it is fitted, and the units of its rows, fp32 [N]; None: as it is."""
        if self.kind != "steps":
            return weight, None
        weight = hadamard(weight) if self.hadamard else weight
        units = (weight.abs().amax(1) / INT8_MAX).clamp(min=MIN_SCALE)
        return weight / units[:, None], units


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A weight [N, K] as codes uint8 [N, K] of 0-15, scales [N, G] in the stored dtype, and zero
    points uint8 [N, G]; None: all are 8. In a grid of steps, as int8 [N, K] with scales fp32
    [N, 1]; zero points: None; `hadamard`: of the transformed weight."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int
    hadamard: bool = False

    def values(self) -> Tensor:
        """The weight that they stand for, fp32 [N, K], no longer transformed."""
        if self.codes.dtype == torch.int8:
            values = self.codes.float() * self.scales
            return hadamard(values) if self.hadamard else values
        scales = self.scales.float().repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]
        if self.zeros is None:
            return (self.codes.float() - MIDDLE) * scales
        zeros = self.zeros.float().repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]
        return (self.codes.float() - zeros) * scales

    def split(self, sizes: Sequence[int], names: Iterable[str]) -> dict[str, Codes]:
        """The rows of several weights, `sizes` of each, by name."""
        zeros = [None] * len(sizes) if self.zeros is None else self.zeros.split(list(sizes))
        each = zip(names, self.codes.split(list(sizes)), self.scales.split(list(sizes)), zeros)
        return {
            name: Codes(codes, scales, z, self.group, self.hadamard)
            for name, codes, scales, z in each
        }


def fit(values: Tensor, importance: Tensor, spec: GridSpec) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each column of `values` fp32 [n, R], one group each: both fp32 [R].

    They minimise the squared errors, weighted by `importance` [n], over a few ranges. In a grid of
    steps `values` are in units of int8 codes, and the zero point is no integer.
    """
    if spec.kind == "steps":
        step, offset = best_steps(values, importance)
        return step, -offset / step
    weighted = values * importance[:, None]
    best = torch.full_like(values[0], -1.0)
    scale, zero = torch.ones_like(best), torch.full_like(best, float(MIDDLE))
    for inverse, zeros in _candidates(values, spec):
        codes = (values * inverse).round_().add_(zeros).clamp_(0, LEVELS).sub_(zeros)
        both = (codes * weighted).sum(0)
        square = (importance @ (codes * codes)).clamp_(min=1e-30)
        fitted = _stored(both / square, spec)
        # What the squared error is below that of zeros; the rounded scale is not the best one.
        gain = fitted * (2 * both - fitted * square)
        better = gain > best
        best = torch.where(better, gain, best)
        scale, zero = torch.where(better, fitted, scale), torch.where(better, zeros, zero)
    return scale, zero


def plain(values: Tensor, spec: GridSpec) -> tuple[Tensor, Tensor]:
    """The same from the least and the greatest value of each group alone, in any units."""
    if spec.kind == "steps":
        low, high = values.amin(0), values.amax(0)
        scale = ((high - low) / LEVELS).clamp(min=MIN_SCALE)
        return scale, -low / scale
    inverse, zeros = next(_candidates(values, spec, (0.0,)))
    return _stored(1 / inverse, spec), zeros


def round_to(values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Codes of `values` [..., R], as floats 0-15."""
    return (values / scale).add_(zero).round_().clamp_(0, LEVELS)


def round_weight(weight: Tensor, importance: Tensor | None, spec: GridSpec) -> Codes:
    """`weight` fp32 [N, K], each rounded to the nearest code of its group's fitted grid.

    `importance` [K]: of each input; None: all alike."""
    num_rows, width = weight.shape
    if importance is None:
        importance = torch.ones(width)
    weight, units = spec.in_units(weight)
    scales, zeros, codes = [], [], []
    for start in range(0, width, spec.group):
        part = weight[:, start : start + spec.group].T.contiguous()
        scale, zero = fit(part, importance[start : start + spec.group], spec)
        scales.append(scale)
        zeros.append(zero)
        codes.append(round_to(part, scale, zero))
    return packed(torch.cat(codes), torch.stack(scales), torch.stack(zeros), spec, units)


def packed(
    codes: Tensor, scales: Tensor, zeros: Tensor, spec: GridSpec, units: Tensor | None
) -> Codes:
    """From codes [K, N], scales and zero points [G, N], all floats; `units`: of the weight."""
    if units is not None:
        steps = scales.repeat_interleave(spec.group, 0)[: len(codes)]
        offsets = (-zeros * scales).repeat_interleave(spec.group, 0)[: len(codes)]
        whole = (codes * steps + offsets).round_().to(torch.int8)
        return Codes(whole.T.contiguous(), units[:, None], None, spec.group, spec.hadamard)
    return Codes(
        codes.T.to(torch.uint8).contiguous(),
        scales.T.to(spec.scale_dtype).contiguous(),
        zeros.T.to(torch.uint8).contiguous() if spec.kind == "zero-points" else None,
        spec.group,
    )


def _candidates(
    values: Tensor, spec: GridSpec, steps: tuple[float, ...] = STEPS
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inverse scales and zero points [R] to try."""
    low, high = values.amin(0).clamp_(max=0), values.amax(0).clamp_(min=0)
    flat = high == low
    if spec.kind == "symmetric":
        # The scale has the sign with which the largest weight becomes the code -8.
        extreme = torch.where(high > -low, high, low).masked_fill_(flat, 1.0)
        middle = torch.full_like(low, float(MIDDLE))
        for step in steps:
            yield -(MIDDLE + step / 2) / extreme, middle
        return
    width = (high - low).masked_fill_(flat, 1.0)
    for step in steps:
        inverse = (LEVELS + step) / width
        zero = (-low * inverse).round_()
        for shift in (0.0, -1.0, 1.0) if len(steps) > 1 else (0.0,):
            yield inverse, (zero + shift).clamp_(0, LEVELS)


def _stored(scale: Tensor, spec: GridSpec) -> Tensor:
    """The scale as the file has it; never 0."""
    info = torch.finfo(spec.scale_dtype)
    sign = torch.where(scale < 0, -1.0, 1.0)
    return (sign * scale.abs().clamp(info.tiny, info.max)).to(spec.scale_dtype).float()
