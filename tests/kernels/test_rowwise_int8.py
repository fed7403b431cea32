"""Norm, product and quantisation in one pass: the codes of the passes one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels import rowwise
from penstock.kernels.quant import Int8Rows, quantize_rows_int8

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (3, 63), (9, 500), (70, 896)]


def assert_rows(actual: Int8Rows, unfused: Tensor) -> None:
    codes, scales = quantize_rows_int8(unfused)
    assert actual.dtype == unfused.dtype
    assert torch.equal(actual.codes, codes)
    assert torch.equal(actual.scales.nan_to_num(-1.0), scales.nan_to_num(-1.0))


def trapped(x: Tensor) -> Tensor:
    """Rows of zeros, tiny, huge, and not finite among those of `x`, after each of them a NaN."""
    wide = torch.full((x.shape[0], x.shape[1] + 3), float("nan"), dtype=x.dtype)
    rows = wide[:, : x.shape[1]].copy_(x)
    if len(x) > 6:
        rows[1], rows[4, 0], rows[5, -1] = 0, float("inf"), float("nan")
        rows[2] *= 1e-6
        rows[3, 0] = 3e4
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize(cpu_path, dtype, shape):
    x = trapped(torch.randn(shape).to(dtype))
    assert_rows(rowwise.quantize_int8(x), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(cpu_path, dtype, shape):
    x, weight = trapped(torch.randn(shape).to(dtype)), torch.randn(shape[1]).to(dtype)
    assert_rows(rowwise.rms_norm_int8(x, weight, 1e-6), rowwise.rms_norm(x, weight, 1e-6))
    stream = torch.randn(shape).to(dtype)
    y, h = rowwise.rms_norm(x, weight, 1e-6, residual=stream)
    rows = rowwise.rms_norm_int8(
        x, weight, 1e-6, residual=stream, total=stream, out=Int8Rows.inside(x)
    )
    assert_rows(rows, y)
    assert torch.equal(stream.nan_to_num(), h.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_silu_mul(cpu_path, dtype, shape):
    half = shape[1]
    gate_up = trapped(torch.randn(shape[0], 2 * half).to(dtype))
    product = rowwise.silu_mul(gate_up)
    assert_rows(rowwise.silu_mul_int8(gate_up), product)
    up = gate_up[:, half:].clone()
    in_place = rowwise.silu_mul_int8(gate_up, out=Int8Rows.inside(gate_up[:, :half]))
    assert_rows(in_place, product)
    assert in_place.codes.data_ptr() == gate_up.data_ptr()
    assert torch.equal(gate_up[:, half:].nan_to_num(), up.nan_to_num())


def test_no_rows(cpu_path):
    assert rowwise.rms_norm_int8(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
    assert rowwise.silu_mul_int8(torch.empty(0, 8)).shape == (0, 4)
