"""Linear layers whose weights are packed once, at load, into the layout that is read fastest."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.cpu import huge_pages, native
from penstock.kernels.cpu import matmul as matmul_quant
from penstock.kernels.cpu.arguments import LINEAR, PACK
from penstock.kernels.cpu.matmul import NativeWeight
from penstock.kernels.quant import Int8Rows, QuantizedWeight
from penstock.kernels.types import Layout, LinearFormat, PackedLinear

FLOAT_FORMATS: dict[torch.dtype, LinearFormat] = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip


def pack_linear(weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> PackedLinear:
    """Pack `weight` [N, K], plain or quantised, and `bias` [N].

    The bias of a plain weight has its dtype, that of a quantised one any float dtype; a quantised
    weight takes activations of any float dtype. On the CPU the result holds its own copy (drop the
    original), on a GPU the tensors themselves, unless the format has a layout of its own there.
    """
    if isinstance(weight, QuantizedWeight):
        return _pack_quantized(weight, bias)
    assert weight.dim() == 2
    assert bias is None or (bias.dtype == weight.dtype and bias.shape == weight.shape[:1])
    lib = native.usable(weight)
    if lib is not None:
        return _pack_native(lib, weight, bias)
    if _onednn_packs(weight):
        return _pack_onednn(weight, bias)
    return _packed(weight, weight, bias, "plain")


def empty_linear(
    out_features: int, in_features: int, dtype: torch.dtype, memory: Tensor, *, transposed: bool
) -> PackedLinear:
    """A weight in zeroed `memory`, uint8 [linear_bytes(...)], to be filled in place.

    In the native layout where that can be had; else plain, as [N, K], or `transposed` in memory.
    """
    flat = memory[: linear_bytes(out_features, in_features, dtype, memory.device)].view(dtype)
    if native.usable(flat) is not None:
        weight = flat.view(_native_shape(out_features, in_features, dtype))
        return _empty(weight, in_features, out_features, "native")
    if transposed:
        weight = flat.view(in_features, out_features).T
    else:
        weight = flat.view(out_features, in_features)
    return _empty(weight, in_features, out_features, "plain")


def _empty(weight: Tensor, in_features: int, out_features: int, layout: Layout) -> PackedLinear:
    num_bytes = in_features * out_features * weight.element_size()
    format = FLOAT_FORMATS[weight.dtype]
    return PackedLinear(weight, None, in_features, out_features, num_bytes, format, layout)


def linear_bytes(
    out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Bytes of a weight [N, K] as `empty_linear` lays it out, padding included."""
    if device.type == "cpu" and dtype in native.DTYPES and native.library() is not None:
        return math.prod(_native_shape(out_features, in_features, dtype)) * dtype.itemsize
    return out_features * in_features * dtype.itemsize


def linear(x: Tensor | Int8Rows, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
    """`x` [M, K] times the packed weight, plus the bias -> [M, N] in `x.dtype`; sums in fp32.

    int8 and fp8 weights quantise each row of `x` (int8 ones take `Int8Rows` as they are, so that
    several linears share one pass), and int8 sums are exact; int4 and nf4 are weight-only.
    `quant.linear_reference` defines the result.

    `out` [M, N], if given, is written and returned, and rows of `x` may have any stride: with plain
    weights on a GPU, and on the native path, nothing else that grows with M is allocated then. (On
    a GPU int8 and fp8 weights allocate codes of rows that have none yet, and small batches sums of
    splits.) On the native path a row's result has the same bits whatever M is.
    """
    if packed.layout == "triton":
        from penstock.kernels.triton import matmul as matmul_triton

        return matmul_triton.linear(x, packed.payload, out)
    if isinstance(packed.payload, NativeWeight):
        return matmul_quant.native_linear(x, packed.payload, out)
    if isinstance(packed.payload, QuantizedWeight):
        y = matmul_quant.plain_linear(x, packed.payload, packed.bias)
        return y if out is None else out.copy_(y)
    assert isinstance(x, Tensor), f"{packed.format} weights take plain activations"
    if packed.layout == "native":
        return _native_linear(x, packed, out)
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


def _pack_quantized(weight: QuantizedWeight, bias: Tensor | None) -> PackedLinear:
    layout: Layout = "plain"
    payload: Any = weight
    if weight.codes.is_cuda:
        from penstock.kernels.triton import matmul as matmul_triton

        layout, payload = "triton", matmul_triton.pack(weight, bias)
    elif (packed := matmul_quant.pack_native(weight, bias)) is not None:
        layout, payload = "native", packed
    return PackedLinear(
        payload, bias, weight.in_features, weight.out_features, weight.num_bytes, weight.format,
        layout,
    )  # fmt: skip


def _packed(payload: Tensor, weight: Tensor, bias: Tensor | None, layout: Layout) -> PackedLinear:
    num_outputs, num_inputs = weight.shape
    num_bytes, format = weight.numel() * weight.element_size(), FLOAT_FORMATS[weight.dtype]
    return PackedLinear(payload, bias, num_inputs, num_outputs, num_bytes, format, layout)


def _pack_native(lib: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> PackedLinear:
    num_outputs, num_inputs = weight.shape
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    shape = _native_shape(num_outputs, num_inputs, weight.dtype)
    packed = huge_pages.empty(shape, weight.dtype)
    lib.pk_pack(PACK.pack(
        native.DTYPES[weight.dtype], weight.data_ptr(), weight.stride(0), packed.data_ptr(),
        num_outputs, num_inputs, torch.get_num_threads(),
    ))  # fmt: skip
    return _packed(packed, weight, None if bias is None else bias.contiguous(), "native")


def _native_shape(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Panels, input features (bf16 is read in pairs), output features of a panel."""
    lib = native.library()
    assert lib is not None
    panel = lib.pk_panel()
    depth = num_inputs + num_inputs % 2 if dtype == torch.bfloat16 else num_inputs
    return -(-num_outputs // panel), depth, panel


def _native_linear(x: Tensor, packed: PackedLinear, out: Tensor | None) -> Tensor:
    assert x.dtype == packed.payload.dtype and x.shape[1] == packed.in_features
    num_rows, depth = x.shape[0], packed.payload.shape[1]
    if depth != x.shape[1]:
        x = F.pad(x, (0, 1))  # bf16 is read in pairs
    elif x.stride(1) != 1:
        x = x.contiguous()
    if out is None:
        out = x.new_empty(num_rows, packed.out_features)
    lib = native.library()
    assert lib is not None and out.stride(1) == 1 and out.dtype == x.dtype
    bias = packed.bias
    lib.pk_linear(LINEAR.pack(
        native.DTYPES[x.dtype], x.data_ptr(), x.stride(0), packed.payload.data_ptr(),
        0 if bias is None else bias.data_ptr(), out.data_ptr(), out.stride(0), num_rows,
        packed.out_features, packed.in_features, torch.get_num_threads(),
    ))  # fmt: skip
    return out


def _onednn_packs(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _pack_onednn(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    # 16 is only a hint for the layout, which serves every batch size.
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
    return _packed(reordered, weight, bias, "onednn")
