"""Quantised linears: every format and path against the reference, over ragged sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels import quant
from penstock.kernels.matmul import linear, pack_linear

FP32, BF16 = torch.float32, torch.bfloat16
FORMATS = quant.WEIGHT_FORMATS


def case(
    format: quant.WeightFormat, num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> tuple[Tensor, quant.QuantizedWeight, Tensor]:
    """Rows [M, K] that do not follow each other in memory, a weight [N, K] and a bias [N]."""
    wide = torch.full((num_rows, num_inputs + 3), float("nan"), dtype=dtype)
    wide[:, :num_inputs] = torch.randn(num_rows, num_inputs)
    weight = torch.randn(num_outputs, num_inputs) / num_inputs**0.5
    return (
        wide[:, :num_inputs],
        quant.quantize_weight(weight, format),
        torch.randn(num_outputs).to(dtype),
    )


def assert_linear(actual: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if actual.dtype == FP32 else 1.6e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(1, 1), (7, 31), (33, 129), (40, 300), (65, 64), (96, 1030)]
)
def test_linear(cpu_path, format, dtype, num_outputs, num_inputs):
    for num_rows in (1, 3, 17, 64):
        x, quantized, bias = case(format, num_rows, num_outputs, num_inputs, dtype)
        packed = pack_linear(quantized, bias)
        assert packed.format == format and packed.num_bytes == quantized.num_bytes
        assert (packed.in_features, packed.out_features) == (num_inputs, num_outputs)
        truth = quant.linear_reference(x, quantized, bias)
        assert_linear(linear(x, packed), truth)
        out = torch.full((num_rows, num_outputs), float("nan"), dtype=dtype)
        assert linear(x, packed, out=out) is out
        assert_linear(out, truth)
