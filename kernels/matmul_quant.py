"""Quantised linears on the CPU.

Knows formats and rows; nothing of layers, nor of which path is chosen (`matmul.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.quant import (
    Int8Rows,
    QuantizedWeight,
    dequantize_weight,
    quantize_rows_fp8,
    quantize_rows_int8,
)

_EXACT = 1024  # products of int8 codes whose sum fp32 holds exactly: 1024 * 127 * 127 < 2 ** 24


def plain_linear(x: Tensor | Int8Rows, quantized: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """What `matmul.linear` promises, in plain PyTorch, with the weight unpacked at every call."""
    if quantized.format == "int8":
        rows = x if isinstance(x, Int8Rows) else Int8Rows(*quantize_rows_int8(x), x.dtype)
        y = _exact_product(rows.codes, quantized.codes).float()
        y *= rows.scales[:, None] * quantized.scales
    else:
        assert isinstance(x, Tensor), f"{quantized.format} weights take plain activations"
        if quantized.format == "fp8":
            codes, scales = quantize_rows_fp8(x)
            y = codes.float() @ quantized.codes.float().T
            y *= scales[:, None] * quantized.scales
        else:
            y = x.float() @ dequantize_weight(quantized).T
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype)


def _exact_product(rows: Tensor, codes: Tensor) -> Tensor:
    """int8 [M, K] times int8 [N, K] -> the sums, int32 [M, N]."""
    total = torch.zeros(rows.shape[0], codes.shape[0], dtype=torch.int32, device=rows.device)
    for some, others in zip(rows.split(_EXACT, dim=1), codes.split(_EXACT, dim=1)):
        total += (some.float() @ others.float().T).to(torch.int32)
    return total
