"""Rounding that makes up for its own errors: GPTQ (Frantar et al. 2023).

The inputs of a linear layer over some text have the second moments H = X'X. The columns of its
weight are rounded one after another; the error of each is made up for by the columns that follow,
as far as H says that they carry the same information.

X comes from layers that are rounded already, and the output wanted is that of the exact inputs E.
Least squares split: |WE' - QX'|^2 = |(W* - Q) X'|^2 + what no Q changes, with W* = W E'X H^-1. So
W* is rounded in place of W ("asymmetric calibration" in GPTAQ, Li et al. 2025).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.rowwise import hadamard
from penstock.workers.errors import InvariantError
from penstock.workers.weights.grids import Codes, GridSpec, fit, packed, round_to

BLOCK = 128  # columns between two updates of all the columns after them
DAMPING = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What is known of a linear layer's K inputs: `moments` [K, K], the sum of x x' over
    `num_tokens` tokens, fp32 or fp64. `cross` [K, K]: the sum of e x', where e is the unrounded
    model's input for the same token; None: it is not known."""

    moments: Tensor
    num_tokens: int
    cross: Tensor | None = None

    @classmethod
    def of(cls, width: int) -> Inputs:
        """Of none yet."""
        return cls(torch.zeros(width, width), 0)

    def with_rows(self, x: Tensor, exact: Tensor | None = None) -> Inputs:
        """And the rows of `x` fp32 [T, K], with the unrounded model's for all rows or none; the
        matrices are the same, and change."""
        cross = self.cross
        if exact is not None:
            cross = torch.zeros_like(self.moments) if cross is None else cross
            cross.addmm_(exact.T, x)
        return Inputs(self.moments.addmm_(x.T, x), self.num_tokens + len(x), cross)

    def scaled(self, scales: Tensor) -> Inputs:
        """Of inputs that are divided by `scales` [K]."""
        cross = None if self.cross is None else self.cross / scales[:, None] / scales
        return Inputs(self.moments / scales[:, None] / scales, self.num_tokens, cross)

    def transformed(self) -> Inputs:
        """Of the inputs' Hadamard transforms."""
        cross = None if self.cross is None else _both_sides(self.cross)
        return Inputs(_both_sides(self.moments), self.num_tokens, cross)


def _both_sides(matrix: Tensor) -> Tensor:
    return hadamard(hadamard(matrix).T.contiguous()).T.contiguous()


def moments(rows: Iterable[Sequence[Tensor]]) -> Inputs:
    """Of all the `rows`, [T, K] each, at least one; of each the unrounded model's may follow."""
    inputs = None
    for x in rows:
        inputs = (inputs or Inputs.of(x[0].shape[1])).with_rows(*x)
    assert inputs is not None
    return inputs


def corrected(weight: Tensor, inputs: Inputs, damping: float = DAMPING) -> Tensor:
    """`weight` fp32 [N, K] changed so that it makes of the inputs, as nearly as it can, what it
    made of the unrounded model's.

    Directions in which the text has no inputs stay as they are, by the damping.
    """
    if inputs.cross is None:
        return weight
    h = inputs.moments.to(torch.float64, copy=True)
    cross = inputs.cross.to(torch.float64, copy=True)
    extra = _extra(h, damping)
    h.diagonal().add_(extra)
    cross.diagonal().add_(extra)
    factor = torch.linalg.cholesky(h)
    return torch.cholesky_solve(cross.T @ weight.double().T, factor).T.float()


def inverse_factor(moments: Tensor, damping: float = DAMPING) -> Tensor:
    """Upper triangular U with U'U = (H + damping * mean(diag H) * I)^-1, fp64 [K, K].

    An input that was always 0 depends on no other and no other on it.
    """
    damped = moments.to(torch.float64, copy=True)
    damped.diagonal().add_(_extra(damped, damping))
    # H = R R' with R upper triangular is the Cholesky factor of H turned by 180 degrees.
    lower = torch.linalg.cholesky(damped.flip(0, 1))
    identity = torch.eye(len(damped), dtype=torch.float64)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    return inverse.flip(0, 1)


def _extra(moments: Tensor, damping: float) -> float:
    """What is added to each of the `moments`' diagonal; 1 where the inputs were always 0."""
    return float(damping * moments.diagonal().mean()) or 1.0


def compensate(weight: Tensor, factor: Tensor, spec: GridSpec) -> Codes:
    """`weight` fp32 [N, K] rounded column by column; `factor`: of `inverse_factor`, of transformed
    inputs where `spec` has the weight transformed.

    A group's grid is fitted when its first column is reached, to the weights as they are then.
    """
    weight, units = spec.in_units(weight)
    columns = weight.T.contiguous()
    width = len(columns)
    if width > BLOCK and BLOCK % spec.group:
        raise InvariantError(f"groups of {spec.group} cross the blocks of {BLOCK} columns")
    factor = factor.float()
    diagonal = factor.diagonal()
    importance = diagonal.square().reciprocal()
    codes, scales, zeros = torch.empty_like(columns), [], []
    for start in range(0, width, BLOCK):
        end = min(start + BLOCK, width)
        errors = torch.empty(end - start, columns.shape[1])
        for k in range(start, end):
            if k % spec.group == 0:
                group = slice(k, k + spec.group)
                scale, zero = fit(columns[group], importance[group], spec)
                scales.append(scale)
                zeros.append(zero)
            column = columns[k]
            codes[k] = round_to(column, scale, zero)
            errors[k - start] = (column - (codes[k] - zero) * scale) / diagonal[k]
            columns[k + 1 : end].addr_(factor[k, k + 1 : end], errors[k - start], alpha=-1)
        columns[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return packed(codes, torch.stack(scales), torch.stack(zeros), spec, units)


def compensate_in_order(
    weight: Tensor, moments: Tensor, spec: GridSpec, damping: float = DAMPING
) -> Codes:
    """The same with the columns of the largest inputs first ("activation order"); `moments`: of
    transformed inputs, likewise.

    Groups stay those of neighbouring inputs, their grids fitted to the weights as they were given,
    so that the stored form is the same.
    """
    order = moments.diagonal().argsort(descending=True, stable=True)
    factor = inverse_factor(moments[order][:, order], damping).float()
    weight, units = spec.in_units(weight)
    columns = weight.T.contiguous()
    importance = torch.empty(len(order))
    importance[order] = factor.diagonal().square().reciprocal()
    grids = [
        fit(columns[start : start + spec.group], importance[start : start + spec.group], spec)
        for start in range(0, len(columns), spec.group)
    ]
    left, codes = columns[order], torch.empty_like(columns)
    for start in range(0, len(order), BLOCK):
        end = min(start + BLOCK, len(order))
        errors = torch.empty(end - start, columns.shape[1])
        for k in range(start, end):
            place = int(order[k])
            scale, zero = grids[place // spec.group]
            codes[place] = round_to(left[k], scale, zero)
            errors[k - start] = (left[k] - (codes[place] - zero) * scale) / factor[k, k]
            left[k + 1 : end].addr_(factor[k, k + 1 : end], errors[k - start], alpha=-1)
        left[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    scales, zeros = zip(*grids)
    return packed(codes, torch.stack(scales), torch.stack(zeros), spec, units)
