"""Linears on the CPU by the native library: packs weights, and the arguments of its functions.

The parameters mean what they mean in `kernels/matmul.py`, which chooses this backend only if
`suits` is true.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.cpu import huge_pages, matmul_int4, native
from penstock.kernels.cpu.arguments import (
    LINEAR,
    LINEAR_CODES,
    LINEAR_INT8,
    PACK,
    PACK_CODES,
    PACK_INT8,
)
from penstock.kernels.quant import TABLES, CodeFormat, Int8Rows, QuantizedWeight
from penstock.kernels.types import PackedLinear

_MAX_DEPTH = 133_000  # products of int8 codes whose sum int32 holds, in one group

_TABLES: dict[CodeFormat, Tensor] = {
    "int4": torch.arange(-8.0, 8.0), **{name: torch.tensor(each) for name, each in TABLES.items()},
}  # fmt: skip
# Codes that lie in one word of a panel.
_RUNS: dict[CodeFormat, int] = {
    "int4": 8, "nf4": 8, "mxfp4": 8, "int8g": 4, "fp8": 1, "fp8g": 1,
}  # fmt: skip
_BITS: dict[CodeFormat, int] = {"int4": 4, "int8g": 8, "fp8g": -8}  # E4M3_GROUPS of csrc
_E4M3 = 256.0  # the library reads E4M3 codes as so much less


@dataclass(frozen=True, slots=True, eq=False)
class NativeWeight:
    """A quantised weight [N, K] as the native library reads it; `bias` fp32 [N] or None.

    `scales` fp32 [N], or, of groups, [panels, G, panel] like `shifts`, which are 8 - zero of int4,
    - zero of int8g. `group` of int8 is of the activations, as is `hadamard`. `order` int32 [K]: the
    input of each column of codes; None: its own.
    """

    format: CodeFormat
    codes: Tensor
    scales: Tensor
    shifts: Tensor | None
    bias: Tensor | None
    in_features: int
    out_features: int
    group: int
    hadamard: bool = False
    order: Tensor | None = None


def suits(weight: Tensor | QuantizedWeight) -> bool:
    """Whether the library is available for the dtype of `weight`; int8 sums must fit into int32."""
    if isinstance(weight, Tensor):
        return native.usable(weight) is not None
    fits = weight.format != "int8" or (weight.group or weight.in_features) <= _MAX_DEPTH
    return fits and weight.codes.is_cpu and native.bound.library is not None


def pack_linear(weight: Tensor | QuantizedWeight, bias: Tensor | None) -> PackedLinear:
    if isinstance(weight, QuantizedWeight):
        payload: NativeWeight | matmul_int4.NativeInt4
        if weight.format == "int4" and weight.takes_int8:
            payload = matmul_int4.pack(weight, bias)
        else:
            payload = _pack_codes(weight, bias)
        return PackedLinear(
            payload, bias, weight.in_features, weight.out_features, weight.num_bytes,
            weight.format, "native", weight.row_group, weight.takes_int8, weight.hadamard,
        )  # fmt: skip
    num_outputs, num_inputs = weight.shape
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    packed = huge_pages.empty(packed_shape(num_outputs, num_inputs, weight.dtype), weight.dtype)
    native.bound.library.pk_pack(PACK.pack(
        native.DTYPES[weight.dtype], weight.data_ptr(), weight.stride(0), packed.data_ptr(),
        num_outputs, num_inputs, torch.get_num_threads(),
    ))  # fmt: skip
    bias = None if bias is None else bias.contiguous()
    return PackedLinear.of_floats(packed, weight, bias, "native")


def packed_linear(x: Tensor | Int8Rows, packed: PackedLinear, out: Tensor | None) -> Tensor:
    if isinstance(packed.payload, NativeWeight | matmul_int4.NativeInt4):
        return _quantised_linear(x, packed.payload, out)
    assert isinstance(x, Tensor), f"{packed.format} weights take plain activations"
    assert x.dtype == packed.payload.dtype and x.shape[1] == packed.in_features
    num_rows, depth = x.shape[0], packed.payload.shape[1]
    if depth != x.shape[1]:
        x = F.pad(x, (0, 1))  # bf16 is read in pairs
    elif x.stride(1) != 1:
        x = x.contiguous()
    if out is None:
        out = x.new_empty(num_rows, packed.out_features)
    assert out.stride(1) == 1 and out.dtype == x.dtype
    bias = packed.bias
    native.bound.library.pk_linear(LINEAR.pack(
        native.DTYPES[x.dtype], x.data_ptr(), x.stride(0), packed.payload.data_ptr(),
        0 if bias is None else bias.data_ptr(), out.data_ptr(), out.stride(0), num_rows,
        packed.out_features, packed.in_features, torch.get_num_threads(),
    ))  # fmt: skip
    return out


def packed_shape(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Panels, input features (bf16 is read in pairs), output features of a panel."""
    panel = native.bound.library.pk_panel()
    depth = num_inputs + num_inputs % 2 if dtype == torch.bfloat16 else num_inputs
    return -(-num_outputs // panel), depth, panel


def _pack_codes(quantized: QuantizedWeight, bias: Tensor | None) -> NativeWeight:
    lib = native.bound.library
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
        run = _RUNS[quantized.format]
        padded_depth = -(-depth // group) * (-(-group // run) * run)
        shape = (num_panels, padded_depth, panel // (2 if run == 8 else 1))
        packed = huge_pages.empty(shape, torch.uint8)
        lib.pk_pack_codes(PACK_CODES.pack(
            run, codes.data_ptr(), codes.stride(0), packed.data_ptr(), num_outputs, depth,
            group, threads,
        ))  # fmt: skip
        if quantized.format == "fp8g":
            by_group = _groups_with(codes.float().isnan(), group)
            scales = _by_panel(scales.masked_fill(by_group, float("nan")) * _E4M3, panel)
        elif quantized.format != "fp8":
            scales = _by_panel(scales, panel)
            zeros, zero = quantized.zeros, 8.0 if quantized.format == "int4" else 0.0
            shifts = None if zeros is None else _by_panel(zero - zeros.float(), panel)
        else:  # a NaN code makes its whole output feature NaN
            scales = scales.masked_fill(codes.float().isnan().any(1), float("nan"))
    bias = None if bias is None else bias.float().contiguous()
    return NativeWeight(
        quantized.format, packed, scales, shifts, bias, depth, num_outputs, group,
        quantized.hadamard, quantized.order,
    )  # fmt: skip


def _quantised_linear(
    x: Tensor | Int8Rows, weight: NativeWeight | matmul_int4.NativeInt4, out: Tensor | None
) -> Tensor:
    """fp16 rows are computed in fp32."""
    if x.dtype not in native.DTYPES:
        if isinstance(x, Int8Rows):
            y = _quantised_linear(replace(x, dtype=torch.float32), weight, None)
        else:
            y = _quantised_linear(x.float(), weight, None)
        return y.to(x.dtype) if out is None else out.copy_(y)
    rows = x.codes if isinstance(x, Int8Rows) else x
    if isinstance(weight, NativeWeight) and weight.order is not None:
        rows = rows.index_select(1, weight.order)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if out is None:
        out = torch.empty(rows.shape[0], weight.out_features, dtype=x.dtype)
    lib = native.bound.library
    assert out.stride(1) == 1 and out.dtype == x.dtype
    assert rows.shape[1] == weight.in_features and out.shape[0] == rows.shape[0]
    if isinstance(weight, matmul_int4.NativeInt4):
        return matmul_int4.linear(x, rows, weight, out)
    source = (native.DTYPES[x.dtype], rows.data_ptr(), rows.stride(0))
    bias, threads = 0 if weight.bias is None else weight.bias.data_ptr(), torch.get_num_threads()
    target = (out.data_ptr(), out.stride(0), *out.shape, weight.in_features)
    if weight.format == "int8":
        if isinstance(x, Int8Rows):
            assert (x.group or weight.in_features) == weight.group and x.scales.is_contiguous()
            assert x.hadamard == weight.hadamard
        lib.pk_linear_int8(LINEAR_INT8.pack(
            *source, x.scales.data_ptr() if isinstance(x, Int8Rows) else 0,
            weight.codes.data_ptr(), weight.scales.data_ptr(), bias, *target,
            max(1, weight.group), threads, 0, 0, 0, weight.hadamard,
        ))  # fmt: skip
    else:
        assert isinstance(x, Tensor), f"{weight.format} weights take plain activations"
        lib.pk_linear_codes(LINEAR_CODES.pack(
            *source, weight.codes.data_ptr(),
            _TABLES[weight.format].data_ptr() if weight.format in _TABLES else 0,
            weight.scales.data_ptr(), 0 if weight.shifts is None else weight.shifts.data_ptr(),
            bias, *target, weight.group, threads, _BITS.get(weight.format, 0),
        ))  # fmt: skip
    return out


def _groups_with(marks: Tensor, group: int) -> Tensor:
    """bool [N, K] -> whether a group has a mark, bool [N, G]."""
    padded = F.pad(marks, (0, -marks.shape[1] % group))
    return padded.unflatten(1, (-1, group)).any(2)


def _by_panel(values: Tensor, panel: int) -> Tensor:
    """fp32 [N, G] -> [panels, G, panel], padded with zeros."""
    values = F.pad(values, (0, 0, 0, -values.shape[0] % panel))
    return values.unflatten(0, (-1, panel)).transpose(1, 2).contiguous()
