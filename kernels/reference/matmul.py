"""Linears by PyTorch: plain weights on a GPU, and a CPU without the native library.

On a CPU, plain weights take oneDNN's own layout where it has one for the dtype. The parameters mean
what they mean in `kernels/matmul.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.quant import (
    Int8Rows,
    QuantizedWeight,
    dequantize_weight,
    int8_codes,
    quantize_rows_fp8,
    quantize_rows_int8,
    unpack_nibbles,
)
from penstock.kernels.types import PackedLinear

_EXACT = 1024  # products of int8 codes whose sum fp32 holds exactly: 1024 * 127 * 127 < 2 ** 24


def pack_linear(weight: Tensor | QuantizedWeight, bias: Tensor | None) -> PackedLinear:
    if isinstance(weight, QuantizedWeight):
        return PackedLinear(
            weight, bias, weight.in_features, weight.out_features, weight.num_bytes, weight.format,
            "plain", weight.row_group, weight.takes_int8, weight.hadamard,
        )  # fmt: skip
    if not onednn_packs(weight):
        return PackedLinear.of_floats(weight, weight, bias, "plain")
    # 16 is only a hint for the layout, which serves every batch size.
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
    return PackedLinear.of_floats(reordered, weight, bias, "onednn")


def packed_linear(x: Tensor | Int8Rows, packed: PackedLinear, out: Tensor | None) -> Tensor:
    if isinstance(packed.payload, QuantizedWeight):
        y = _quantised_linear(x, packed.payload, packed.bias)
        return y if out is None else out.copy_(y)
    assert isinstance(x, Tensor), f"{packed.format} weights take plain activations"
    if packed.layout == "onednn" and x.shape[0]:
        y = torch.ops.mkldnn._linear_pointwise(x, packed.payload, packed.bias, "none", [], "")
    elif packed.layout == "onednn":
        y = x.new_empty(0, packed.out_features)
    elif out is None:
        y = F.linear(x, packed.payload, packed.bias)
    elif packed.bias is None:
        return torch.mm(x, packed.payload.T, out=out)
    else:
        return torch.addmm(packed.bias, x, packed.payload.T, out=out)
    return y if out is None else out.copy_(y)


def onednn_packs(weight: Tensor) -> bool:
    """Whether oneDNN has a layout of its own for `weight`, on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _quantised_linear(
    x: Tensor | Int8Rows, quantized: QuantizedWeight, bias: Tensor | None
) -> Tensor:
    """With the weight unpacked at every call."""
    if quantized.takes_int8:
        group = quantized.row_group
        rows = x
        if isinstance(rows, Tensor):
            made = quantize_rows_int8(rows, group, hadamard=quantized.hadamard)
            rows = Int8Rows(*made, group, rows.dtype, quantized.hadamard)
        assert rows.hadamard == quantized.hadamard
        if quantized.format == "int8":
            y = _int8_sums(rows, quantized.codes, quantized.scales)
        elif quantized.steps is not None:
            y = _int8_sums(rows, int8_codes(quantized), quantized.scales)
        else:
            y = _int4_sums(rows, quantized)
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


def _int8_sums(rows: Int8Rows, codes: Tensor, scales: Tensor) -> Tensor:
    step = rows.group or max(1, rows.shape[1])
    y = torch.zeros(rows.shape[0], codes.shape[0], device=codes.device)
    for g, (some, others) in enumerate(
        zip(rows.codes.split(step, dim=1), codes.split(step, dim=1), strict=True)
    ):
        y += _exact_product(some, others).float() * rows.scales[:, g, None]
    return y * scales


def _int4_sums(rows: Int8Rows, weight: QuantizedWeight) -> Tensor:
    assert rows.group is not None and weight.group is not None
    codes = unpack_nibbles(weight.codes)[:, : weight.in_features].to(torch.int8)
    y = torch.zeros(rows.shape[0], weight.out_features, device=codes.device)
    for g, (some, others) in enumerate(
        zip(rows.codes.split(rows.group, dim=1), codes.split(rows.group, dim=1), strict=True)
    ):
        of_weight = g * rows.group // weight.group
        part = _exact_product(some, others).float()
        sums = some.sum(1, dtype=torch.int32).float()[:, None]
        zeros = 8.0 if weight.zeros is None else weight.zeros[:, of_weight].float()
        scales = rows.scales[:, g, None] * weight.scales[:, of_weight]
        y += (part - zeros * sums) * scales
    return y


def _exact_product(rows: Tensor, codes: Tensor) -> Tensor:
    """int8 [M, K] times int8 [N, K] -> the sums, int32 [M, N]."""
    total = torch.zeros(rows.shape[0], codes.shape[0], dtype=torch.int32, device=rows.device)
    for some, others in zip(rows.split(_EXACT, dim=1), codes.split(_EXACT, dim=1)):
        total += (some.float() @ others.float().T).to(torch.int32)
    return total
