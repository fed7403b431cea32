"""Scales of a linear layer's input channels that lower its rounding error: AWQ (Lin et al. 2023).

Input k is divided by s_k where it is made, and column k of the weight multiplied by it: the layer's
output stays, while the inputs that matter most get a larger share of their group's codes. s is a
power of the input's root mean square; which power, is tried out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.workers.weights.grids import GridSpec, plain, round_to

POWERS = tuple(step / 10 for step in range(1, 10))
LARGEST = 64.0  # of a scale and of its inverse


def scales_of(rms: Tensor, power: float) -> Tensor:
    """`rms` [K] to `power`, their geometric mean 1; 1 where an input is always 0."""
    logs = rms.clamp(min=1e-30).log()
    alive = rms > 0
    centre = logs[alive].mean() if bool(alive.any()) else torch.zeros(())
    scales = ((logs - centre) * power).exp().clamp(1 / LARGEST, LARGEST)
    return torch.where(alive, scales, 1.0)


def choose_scales(weight: Tensor, rms: Tensor, importance: Tensor, spec: GridSpec) -> Tensor | None:
    """The scales [K] with the least error of `weight` fp32 [N, K]; None where none is below that
    of no scales.

    `rms` [K]: of the inputs. `importance` [K]: what a squared error of a column costs, before
    scales.
    """
    best, found = rounding_error(weight, torch.ones_like(rms), importance, spec), None
    for power in POWERS:
        scales = scales_of(rms, power)
        error = rounding_error(weight, scales, importance, spec)
        if error < best:
            best, found = error, scales
    return found


def fold(norm: Tensor, scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`norm` [K] divided by `scales`, in the `dtype` that is stored; and the scales fp32 [K] by
    which that divides it, to the last bit: those to multiply the columns with."""
    divided = (norm / scales).to(dtype)
    usable = (divided != 0) & divided.isfinite()
    divided = torch.where(usable, divided, norm.to(dtype))
    return divided, torch.where(usable, norm / divided.float(), 1.0)


def rounding_error(weight: Tensor, scales: Tensor, importance: Tensor, spec: GridSpec) -> float:
    """The sum of squared errors of `weight` rounded with channel `scales`, each column's times its
    `importance`."""
    total = 0.0
    for start in range(0, weight.shape[1], spec.group):
        part = slice(start, start + spec.group)
        values = (weight[:, part] * scales[part]).T.contiguous()
        scale, zero = plain(values, spec)
        error = round_to(values, scale, zero).sub_(zero).mul_(scale).sub_(values)
        total += float((importance[part] / scales[part].square()) @ error.square_().sum(1))
    return total
