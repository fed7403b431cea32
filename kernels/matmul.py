"""Linear layers with weights that are packed once, at load.

Knows matrices; nothing of checkpoints or layers.
"""

from __future__ import annotations

import ctypes
import math
import struct
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels import huge_pages, matmul_quant, native
from penstock.kernels.matmul_quant import NativeWeight
from penstock.kernels.quant import Int8Rows, QuantizedWeight

# Which CPU path, decided here alone. Microseconds, lowest of interleaved runs, weights out of
# cache, one core of an AMD EPYC (Zen 4, AVX-512, BF16), torch 2.13:
#
#   dtype  K x N         M   F.linear  oneDNN prepacked  native  MKL prepacked
#   bf16   896 x 4864    1       1009               657     429
#                        4       1193               600     451
#                       16       1665              1022     894
#          4864 x 896   64       3191              2786    2586
#                      512      21133             20509   19864
#          896 x 32000   1       6352              3862    2317
#   fp32   896 x 4864    1       1270              1166     740            818
#                        4       2026              1011     748           1923
#                       16       3128              1762    1440           2911
#                       64       7352              5464    5097           7194
#                      512      46370             40201   39539
#
# With two threads native reads bf16 weights at 27-38 GB/s for M <= 4, all that this memory gives.
# It also sums each element in one order whatever M is, which the others do not, so that a token's
# result does not depend on its batch-mates. Hence: native wherever it could be compiled.
#
# Quantised weights, the same on one core of an Intel Xeon at 2.5 GHz (AVX-512 without VNNI), rows
# in fp32; torch's int8 operators leave out part of the work (linear_dynamic has one scale for all
# rows and 7 bits, qlinear is given codes):
#
#   format K x N         M   native  linear_dynamic  onednn.qlinear  _weight_int4pack_mm
#   int8   896 x 4864    1      532             694             775
#                        4      603             720             795
#                       16     1178            1197            1328
#          896 x 1024   64      992            1055             941
#   int4   896 x 4864    1      416                                                  423
#                        4      536                                                  700
#                       16     1584                                                 2601
#          896 x 1024   64     1181                                                 2173
#
# Where torch leads at M = 16 and 64 (by 16 % at most, 4864 x 896) it does so with 7 bits and one
# scale for all rows, which makes a row depend on its batch-mates, or with int16 sums that overflow
# without VNNI. Hence again: native at every M, no crossover between operators. For few rows the
# codes are unpacked in registers as they stream by, for several tiles of rows once for all.
#
# Between formats there is a crossover. Rows in bf16, one core of that Xeon (2026-11-22):
#
#   K x N           M    int4    int8    bf16    fp32
#   896 x 4864      1     292     458     939    1611
#                   4     471     498    1069    1801
#                  16    1474    1041    2613    2533
#                  64    4958    3712   10367    5961
#                 256   19362   14394   39965   19261
#   2048 x 8192     1    1009    1677    3469    6288
#                  16    5368    3871   10305   10861
#                  64   19641   13461   53083   27684
#                 256   73566   50706  175001   98422
#
# int4 leads up to M = 4, int8 (by 1.3 to 1.5) from 16 on. An int4 weight stays with its path all
# the same: opened once into bf16 or fp32 it would be no faster at any M, and through the int8 path
# rows of large batches would be rounded to 8 bits: a token would depend on its batch-mates.
#
# With AMX (one core of a Xeon, Sapphire Rapids, 2026-11-22), 896 x 4864, against the best of torch:
#
#   format   M   native   torch        M   native   torch
#   bf16     1      819    1404       64     1073    1306
#   int8     1      431     698       64     1145    1925
#   int4     1      263     321       64     5086    9894
#
# `benchmarks/matmul.py` measures against torch again.
Layout = Literal["native", "onednn", "plain", "triton"]

LinearFormat = Literal["fp32", "bf16", "fp16", "int8", "int4", "nf4", "fp8"]
FLOAT_FORMATS: dict[torch.dtype, LinearFormat] = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip

_PACK = struct.Struct("7q")
_LINEAR = struct.Struct("11q")


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight [N, K] in the form that `linear` reads fastest, and its bias [N] or None.

    `payload` is that form, and `layout` says who can read it. `num_bytes` is what one pass over the
    weight reads: codes, scales and zeros, or plain elements.
    """

    payload: Any
    bias: Tensor | None
    in_features: int
    out_features: int
    num_bytes: int
    format: LinearFormat
    layout: Layout


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
    `quant.linear_reference` is the truth.

    `out` [M, N], if given, is written and returned, and rows of `x` may have any stride: with plain
    weights on a GPU, and on the native path, nothing else that grows with M is allocated then. (On
    a GPU int8 and fp8 weights allocate codes of rows that have none yet, and small batches sums of
    splits.) On the native path a row's result has the same bits whatever M is.
    """
    if packed.layout == "triton":
        from penstock.kernels import matmul_triton

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
        from penstock.kernels import matmul_triton

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
    lib.ps_pack(_PACK.pack(
        native.DTYPES[weight.dtype], weight.data_ptr(), weight.stride(0), packed.data_ptr(),
        num_outputs, num_inputs, torch.get_num_threads(),
    ))  # fmt: skip
    return _packed(packed, weight, None if bias is None else bias.contiguous(), "native")


def _native_shape(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Panels, input features (bf16 is read in pairs), output features of a panel."""
    lib = native.library()
    assert lib is not None
    panel = lib.ps_panel()
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
    lib.ps_linear(_LINEAR.pack(
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
    # 16 is only a hint for the layout; every batch size runs with it.
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
    return _packed(reordered, weight, bias, "onednn")
