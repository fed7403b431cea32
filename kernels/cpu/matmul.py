"""Quantised linears on the CPU: by the native library, or in plain PyTorch without it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.cpu import huge_pages, native
from penstock.kernels.cpu.arguments import LINEAR_CODES, LINEAR_INT8, PACK_CODES, PACK_INT8
from penstock.kernels.quant import (
    NF4_VALUES,
    Int8Rows,
    QuantizedWeight,
    WeightFormat,
    dequantize_weight,
    quantize_rows_fp8,
    quantize_rows_int8,
)

_EXACT = 1024  # products of int8 codes whose sum fp32 holds exactly: 1024 * 127 * 127 < 2 ** 24
_MAX_DEPTH = 133_000  # products of int8 codes whose sum int32 holds

_TABLES = {"int4": torch.arange(-8.0, 8.0), "nf4": torch.tensor(NF4_VALUES)}


@dataclass(frozen=True, slots=True, eq=False)
class NativeWeight:
    """A quantised weight [N, K] as the native library reads it; `bias` fp32 [N] or None.

    `scales` fp32 [N], or, of groups, [panels, G, panel] like `shifts`, which are 8 - zero.
    """

    format: WeightFormat
    codes: Tensor
    scales: Tensor
    shifts: Tensor | None
    bias: Tensor | None
    in_features: int
    out_features: int
    group: int


def pack_native(quantized: QuantizedWeight, bias: Tensor | None) -> NativeWeight | None:
    """None without the library, or if the int32 sum over all inputs could overflow."""
    lib = native.library() if quantized.codes.is_cpu else None
    if lib is None or (quantized.format == "int8" and quantized.in_features > _MAX_DEPTH):
        return None
    num_outputs, depth = quantized.out_features, quantized.in_features
    panel, threads = lib.pk_panel(), torch.get_num_threads()
    num_panels = -(-num_outputs // panel)
    codes = quantized.codes.contiguous()
    scales, shifts = quantized.scales.float().contiguous(), None
    group = quantized.group or depth
    if quantized.format == "int8":
        packed = huge_pages.empty((num_panels, -(-depth // 4), panel, 4), torch.uint8)
        lib.pk_pack_int8(PACK_INT8.pack(
            codes.data_ptr(), depth, packed.data_ptr(), num_outputs, depth, threads,
        ))  # fmt: skip
    else:
        nibbles = quantized.format != "fp8"
        padded_depth = -(-depth // group) * (-(-group // 8) * 8) if nibbles else depth
        shape = (num_panels, padded_depth, panel // (1 + nibbles))
        packed = huge_pages.empty(shape, torch.uint8)
        lib.pk_pack_codes(PACK_CODES.pack(
            nibbles, codes.data_ptr(), codes.stride(0), packed.data_ptr(), num_outputs, depth,
            group, threads,
        ))  # fmt: skip
        if nibbles:
            scales = _by_panel(scales, panel)
            zeros = quantized.zeros
            shifts = None if zeros is None else _by_panel(8.0 - zeros.float(), panel)
        else:  # a NaN code makes its whole output feature NaN
            scales = scales.masked_fill(codes.float().isnan().any(1), float("nan"))
    bias = None if bias is None else bias.float().contiguous()
    return NativeWeight(quantized.format, packed, scales, shifts, bias, depth, num_outputs, group)


def native_linear(x: Tensor | Int8Rows, weight: NativeWeight, out: Tensor | None) -> Tensor:
    """`matmul.linear` for a weight of `pack_native`; fp16 rows are computed in fp32."""
    if x.dtype not in native.DTYPES:
        if isinstance(x, Int8Rows):
            y = native_linear(Int8Rows(x.codes, x.scales), weight, None)
        else:
            y = native_linear(x.float(), weight, None)
        return y.to(x.dtype) if out is None else out.copy_(y)
    rows = x.codes if isinstance(x, Int8Rows) else x
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if out is None:
        out = torch.empty(rows.shape[0], weight.out_features, dtype=x.dtype)
    lib = native.library()
    assert lib is not None and out.stride(1) == 1 and out.dtype == x.dtype
    assert rows.shape[1] == weight.in_features and out.shape[0] == rows.shape[0]
    source = (native.DTYPES[x.dtype], rows.data_ptr(), rows.stride(0))
    bias, threads = 0 if weight.bias is None else weight.bias.data_ptr(), torch.get_num_threads()
    target = (out.data_ptr(), out.stride(0), *out.shape, weight.in_features)
    if weight.format == "int8":
        assert not isinstance(x, Int8Rows) or x.scales.stride(0) == 1
        lib.pk_linear_int8(LINEAR_INT8.pack(
            *source, x.scales.data_ptr() if isinstance(x, Int8Rows) else 0,
            weight.codes.data_ptr(), weight.scales.data_ptr(), bias, *target, threads,
        ))  # fmt: skip
    else:
        assert isinstance(x, Tensor), f"{weight.format} weights take plain activations"
        lib.pk_linear_codes(LINEAR_CODES.pack(
            *source, weight.codes.data_ptr(),
            0 if weight.format == "fp8" else _TABLES[weight.format].data_ptr(),
            weight.scales.data_ptr(), 0 if weight.shifts is None else weight.shifts.data_ptr(),
            bias, *target, weight.group, threads, weight.format == "int4",
        ))  # fmt: skip
    return out


def _by_panel(values: Tensor, panel: int) -> Tensor:
    """fp32 [N, G] -> [panels, G, panel], padded with zeros."""
    values = torch.nn.functional.pad(values, (0, 0, 0, -values.shape[0] % panel))
    return values.unflatten(0, (-1, panel)).transpose(1, 2).contiguous()


def plain_linear(x: Tensor | Int8Rows, quantized: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """`matmul.linear` in plain PyTorch, with the weight unpacked at every call."""
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
