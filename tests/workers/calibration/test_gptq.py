"""GPTQ against a dense implementation of its definition, and against plain rounding.

The oracle rounds one column, then solves the least-squares problem of all columns that are left
anew, in fp64: no factor, no blocks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels.quant import hadamard_transform
from penstock.workers.calibration.gptq import (
    compensate,
    compensate_in_order,
    corrected,
    inverse_factor,
    moments,
)
from penstock.workers.weights.grids import GridSpec, fit, round_weight

GRIDS = [
    GridSpec(32, "zero-points", torch.float16),
    GridSpec(64, "symmetric", torch.bfloat16),
    GridSpec(128, "zero-points", torch.bfloat16),
    GridSpec(16, "steps"),
    GridSpec(16, "steps", hadamard=True),
]


def layer(width: int = 192, num_rows: int = 24, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight [N, K] and correlated inputs [T, K], some larger than others."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_rows, width, generator=generator) * 0.05
    mixing = torch.randn(width, width, generator=generator) / width**0.5
    x = torch.randn(512, width, generator=generator) @ (mixing + 0.3 * torch.eye(width))
    return weight, x * torch.logspace(-1, 1, width)[torch.randperm(width, generator=generator)]


def damped(x: Tensor, damping: float = 0.01) -> Tensor:
    h = x.double().T @ x.double()
    return h + damping * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)


def dense(weight: Tensor, h: Tensor, spec: GridSpec, order: list[int] | None = None) -> Tensor:
    """The rounded weight: after each column, the best values of those that are left.

    Grids: as the code under test fits them, to the weights when a group begins, or, where an order
    is given, to the weights as they were.
    """
    weight, units = spec.in_units(weight)
    left = weight.double().clone()
    done = torch.zeros_like(left)
    width = weight.shape[1]
    static = order is not None
    order = order if order is not None else list(range(width))
    inverse = torch.linalg.inv(h[order][:, order])
    factor = torch.linalg.cholesky(inverse, upper=True).diagonal()
    importance = torch.empty(width)
    importance[torch.tensor(order)] = factor.float().pow(-2)
    grids = {}
    remaining = list(order)
    for k in order:
        group = k // spec.group
        columns = slice(group * spec.group, (group + 1) * spec.group)
        if group not in grids:
            source = weight if static else left.float()
            grids[group] = fit(source[:, columns].T.contiguous(), importance[columns], spec)
        scale, zero = grids[group]
        codes = (left[:, k].float() / scale + zero).round().clamp(0, 15)
        done[:, k] = (codes - zero).double() * scale.double()
        error = left[:, k] - done[:, k]
        remaining.remove(k)
        if remaining:  # minimise |error of column k + changes of the rest| under H
            rest = torch.tensor(remaining)
            change = torch.linalg.solve(h[rest][:, rest], h[rest, k])
            left[:, rest] += error[:, None] * change
    found = done.float() if units is None else done.float() * units[:, None]
    return hadamard_transform(found) if spec.hadamard else found


def output_error(weight: Tensor, rounded: Tensor, x: Tensor) -> float:
    return float(((weight - rounded) @ x.T).square().sum() / (weight @ x.T).square().sum())


@pytest.mark.parametrize("spec", GRIDS)
def test_it_is_the_dense_definition(spec: GridSpec):
    """Up to a rare weight between two codes, where fp32 and fp64 may part."""
    weight, x = layer()
    seen = hadamard_transform(x) if spec.hadamard else x
    found = compensate(weight, inverse_factor(moments([(seen,)]).moments), spec).values()
    expected = dense(weight, damped(seen), spec)
    same = torch.isclose(found, expected, atol=1e-6).float().mean()
    assert same > 0.98
    assert output_error(weight, found, x) == pytest.approx(
        output_error(weight, expected, x), rel=0.02
    )


def test_order_of_activations_is_the_dense_definition_in_that_order():
    weight, x = layer(seed=1)
    spec = GRIDS[2]
    order = x.square().sum(0).argsort(descending=True).tolist()
    found = compensate_in_order(weight, moments([(x,)]).moments, spec).values()
    expected = dense(weight, damped(x), spec, order)
    assert torch.isclose(found, expected, atol=1e-6).float().mean() > 0.98


@pytest.mark.parametrize("spec", GRIDS)
@pytest.mark.parametrize("width", [96, 112, 192, 320])
def test_outputs_are_closer_than_by_plain_rounding(spec: GridSpec, width: int):
    """On the text and on more of its kind; 112: no group divides it, so a row is one."""
    if width % spec.group:
        spec = replace(spec, group=32 if width % 32 == 0 else width)
    weight, x = layer(width, seed=2)
    text, other = x[:400], x[400:]
    plain = round_weight(weight, None, spec).values()
    found = moments([(text[:100],), (text[100:],)])
    assert found.num_tokens == 400
    if spec.hadamard:
        found = found.transformed()
        turned = hadamard_transform(text)
        torch.testing.assert_close(found.moments, turned.T @ turned, rtol=1e-3, atol=1e-2)
    for rounded in (
        compensate(weight, inverse_factor(found.moments), spec),
        compensate_in_order(weight, found.moments, spec),
    ):
        values = rounded.values()
        assert output_error(weight, values, text) < 0.6 * output_error(weight, plain, text)
        assert output_error(weight, values, other) < output_error(weight, plain, other)


def test_inputs_that_were_never_there_are_rounded_plainly():
    """Channels that are always 0, and no input at all: no division by zero."""
    weight, x = layer(64)
    x[:, 32:] = 0
    spec = GridSpec(32, "zero-points", torch.float16)
    found = compensate(weight, inverse_factor(moments([(x,)]).moments), spec).values()
    plain = round_weight(weight, None, spec).values()
    assert torch.equal(found[:, 32:], plain[:, 32:])
    nothing = compensate(weight, inverse_factor(torch.zeros(64, 64)), spec).values()
    assert torch.equal(nothing, plain)


def test_the_factor_is_that_of_the_inverse():
    _, x = layer(48)
    h = moments([(x,)]).moments
    factor = inverse_factor(h, 0.05)
    assert torch.equal(factor, factor.triu())
    expected = torch.linalg.inv(damped(x, 0.05))
    torch.testing.assert_close(factor.T @ factor, expected, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("damping", [0.01, 0.3])
@pytest.mark.parametrize("num_tokens", [512, 40])
def test_the_corrected_weight_solves_least_squares(num_tokens: int, damping: float):
    """|W E' - Q X'|^2 + extra |Q - W|^2 is least; 40 tokens say nothing of most directions."""
    weight, exact = layer(96, seed=3)
    exact = exact[:num_tokens]
    generator = torch.Generator().manual_seed(7)
    x = exact + 0.2 * exact.std(0) * torch.randn(exact.shape, generator=generator)
    found = corrected(weight, moments([(x[:30], exact[:30]), (x[30:], exact[30:])]), damping)
    extra = float(damping * x.square().sum(0).mean())
    left = torch.cat([x.double(), extra**0.5 * torch.eye(96, dtype=torch.float64)])
    right = torch.cat([exact @ weight.T, extra**0.5 * weight.T]).double()
    expected = torch.linalg.lstsq(left, right).solution.T.float()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    if damping == 0.01:
        assert output_error_of(exact, x, weight, found) < output_error_of(exact, x, weight, weight)


def output_error_of(exact: Tensor, x: Tensor, weight: Tensor, rounded: Tensor) -> float:
    return float((exact @ weight.T - x @ rounded.T).square().sum())


def test_equal_inputs_correct_nothing():
    weight, x = layer(64, seed=4)
    assert corrected(weight, moments([(x,)])) is weight  # nothing is known of the exact ones
    torch.testing.assert_close(corrected(weight, moments([(x, x)])), weight)
    zeros = torch.zeros(3, 64)
    torch.testing.assert_close(corrected(weight, moments([(zeros, zeros)])), weight)


def test_a_correction_is_the_same_behind_channel_scales():
    """Inputs that the norm divides by scales, and columns multiplied with them: up to the damping,
    which is a share of the mean."""
    weight, exact = layer(48, seed=5)
    generator = torch.Generator().manual_seed(8)
    x = exact + 0.1 * exact.std(0) * torch.randn(exact.shape, generator=generator)
    scales = torch.exp(torch.randn(48, generator=generator))
    plain = corrected(weight, moments([(x, exact)]), 1e-9)
    found = corrected(weight * scales, moments([(x, exact)]).scaled(scales), 1e-9)
    torch.testing.assert_close(found / scales, plain, rtol=1e-2, atol=1e-3)
