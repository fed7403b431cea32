"""Quantised linears on the CPU.

Knows formats and rows; nothing of layers, nor of which path is chosen (`matmul.py`). The native
library does the work where it could be compiled, else plain PyTorch.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels import native
from penstock.kernels.quant import (
    Int8Rows,
    QuantizedWeight,
    WeightFormat,
    dequantize_weight,
    quantize_rows_fp8,
    quantize_rows_int8,
)

_EXACT = 1024  # products of int8 codes whose sum fp32 holds exactly: 1024 * 127 * 127 < 2 ** 24
_MAX_DEPTH = 133_000  # products of int8 codes whose sum int32 holds

_PACK_INT8 = struct.Struct("6q")
_LINEAR_INT8 = struct.Struct("13q")


@dataclass(frozen=True, slots=True, eq=False)
class NativeWeight:
    """A quantised weight [N, K] as the native library reads it; `bias` fp32 [N] or None."""

    format: WeightFormat
    codes: Tensor
    scales: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int


def pack_native(quantized: QuantizedWeight, bias: Tensor | None) -> NativeWeight | None:
    """None where the library is not available or does not know the format."""
    lib = native.library() if quantized.codes.is_cpu else None
    if lib is None or quantized.format != "int8" or quantized.in_features > _MAX_DEPTH:
        return None
    num_outputs, depth = quantized.codes.shape
    panel, quads = lib.ps_panel(), -(-depth // 4)
    packed = torch.empty(-(-num_outputs // panel), quads, panel, 4, dtype=torch.uint8)
    codes = quantized.codes.contiguous()
    lib.ps_pack_int8(_PACK_INT8.pack(
        codes.data_ptr(), depth, packed.data_ptr(), num_outputs, depth, torch.get_num_threads(),
    ))  # fmt: skip
    scales = quantized.scales.float().contiguous()
    bias = None if bias is None else bias.float().contiguous()
    return NativeWeight("int8", packed, scales, bias, depth, num_outputs)


def native_linear(x: Tensor | Int8Rows, weight: NativeWeight, out: Tensor | None) -> Tensor:
    """What `matmul.linear` promises, for fp32 and bf16."""
    rows = x.codes if isinstance(x, Int8Rows) else x
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    scales = x.scales.contiguous() if isinstance(x, Int8Rows) else None
    if out is None:
        out = torch.empty(rows.shape[0], weight.out_features, dtype=x.dtype)
    lib = native.library()
    assert lib is not None and out.stride(1) == 1 and out.dtype == x.dtype
    assert rows.shape[1] == weight.in_features and out.shape[0] == rows.shape[0]
    lib.ps_linear_int8(_LINEAR_INT8.pack(
        native.DTYPES[x.dtype], rows.data_ptr(), rows.stride(0),
        0 if scales is None else scales.data_ptr(), weight.codes.data_ptr(),
        weight.scales.data_ptr(), 0 if weight.bias is None else weight.bias.data_ptr(),
        out.data_ptr(), out.stride(0), rows.shape[0], weight.out_features, weight.in_features,
        torch.get_num_threads(),
    ))  # fmt: skip
    return out


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
