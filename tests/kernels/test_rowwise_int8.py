"""Norm, product and quantisation in one pass: the codes of the passes one after the other, with a
scale for each row or group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels import rowwise
from penstock.kernels.quant import Int8Rows, hadamard_transform, quantize_rows_int8

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (3, 63), (9, 500), (70, 896)]
GROUPS = [None, 32, 64, 128]


@pytest.fixture(params=[False, True], ids=["as they are", "transformed"])
def hadamard(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def assert_rows(actual: Int8Rows, unfused: Tensor, group: int | None, hadamard: bool) -> None:
    codes, scales = quantize_rows_int8(unfused, group, hadamard=hadamard)
    assert (actual.group, actual.hadamard) == (group, hadamard)
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
@pytest.mark.parametrize("group", GROUPS)
def test_quantize(cpu_path, dtype, shape, group, hadamard):
    x = trapped(torch.randn(shape).to(dtype))
    rows = rowwise.quantize_int8(x, group=group, hadamard=hadamard)
    assert_rows(rows, x, group, hadamard)
    if hadamard:
        assert torch.equal(rowwise.hadamard(x).nan_to_num(7), hadamard_transform(x).nan_to_num(7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", GROUPS)
def test_rms_norm(cpu_path, dtype, shape, group, hadamard):
    x, weight = trapped(torch.randn(shape).to(dtype)), torch.randn(shape[1]).to(dtype)
    normed = rowwise.rms_norm(x, weight, 1e-6)
    rows = rowwise.rms_norm_int8(x, weight, 1e-6, group=group, hadamard=hadamard)
    assert_rows(rows, normed, group, hadamard)
    stream = torch.randn(shape).to(dtype)
    y, h = rowwise.rms_norm(x, weight, 1e-6, residual=stream)
    inside = Int8Rows.inside(x, group, hadamard=hadamard)
    rows = rowwise.rms_norm_int8(x, weight, 1e-6, residual=stream, total=stream, out=inside)
    assert_rows(rows, y, group, hadamard)
    assert torch.equal(stream.nan_to_num(), h.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", GROUPS)
def test_act_mul(cpu_path, dtype, shape, group, hadamard):
    half = shape[1]
    gate_up = trapped(torch.randn(shape[0], 2 * half).to(dtype))
    product = rowwise.act_mul(gate_up)
    rows = rowwise.act_mul_int8(gate_up, group=group, hadamard=hadamard)
    assert_rows(rows, product, group, hadamard)
    up = gate_up[:, half:].clone()
    inside = Int8Rows.inside(gate_up[:, :half], group, hadamard=hadamard)
    in_place = rowwise.act_mul_int8(gate_up, out=inside)
    assert_rows(in_place, product, group, hadamard)
    assert in_place.codes.data_ptr() == gate_up.data_ptr()
    assert torch.equal(gate_up[:, half:].nan_to_num(), up.nan_to_num())


def test_no_rows(cpu_path):
    assert rowwise.rms_norm_int8(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
    assert rowwise.act_mul_int8(torch.empty(0, 8)).shape == (0, 4)


def test_scales_lie_in_given_memory(cpu_path):
    """As the workspace has it: more elements than these rows need, which stay as they are."""
    x, memory = torch.randn(3, 200), torch.full((3, 9), 7.0)
    rows = rowwise.quantize_int8(x.clone(), out=Int8Rows.inside(x.clone(), 64, memory))
    assert rows.scales.data_ptr() == memory.data_ptr() and rows.scales.shape == (3, 4)
    assert torch.equal(rows.scales, quantize_rows_int8(x, 64)[1])
    assert (memory.view(-1)[12:] == 7.0).all()
