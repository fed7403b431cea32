"""Linear layers whose weights are packed once, at load, into the layout that is read fastest.

Backends: Triton on a GPU, the native library on a CPU where it supports the
dtype, else PyTorch. The one that packed a weight also multiplies with it: `PackedLinear.layout`.
"""

from __future__ import annotations

import functools
import math
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.cpu import matmul as native_matmul
from penstock.kernels.cpu import native
from penstock.kernels.quant import Int8Rows, QuantizedWeight
from penstock.kernels.reference import matmul as reference
from penstock.kernels.types import FLOAT_FORMATS, Layout, PackedLinear


class MatmulBackend(Protocol):
    """What each backend implements: packing a weight, and the product with one that it packed."""

    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None
    ) -> PackedLinear: ...

    def packed_linear(
        self, x: Tensor | Int8Rows, packed: PackedLinear, out: Tensor | None
    ) -> Tensor: ...


def backend_for(weight: Tensor | QuantizedWeight, device: torch.device) -> MatmulBackend:
    """What packs `weight` for `device`, where it lies already or will be."""
    if device.type == "cuda":
        return _triton()
    return native_matmul if native_matmul.suits(weight) else reference


@functools.cache  # `linear` asks at each call
def _backend_of(layout: Layout) -> MatmulBackend:
    if layout == "triton":
        return _triton()
    return native_matmul if layout == "native" else reference


@functools.cache
def _triton() -> MatmulBackend:
    from penstock.kernels.triton import matmul  # Triton is not installed on every machine

    return matmul


def pack_linear(weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> PackedLinear:
    """Pack `weight` [N, K], plain or quantised, and `bias` [N].

    The bias of a plain weight has its dtype, that of a quantised one any float dtype; a quantised
    weight takes activations of any float dtype. On the CPU the result holds its own copy (drop the
    original), on a GPU the tensors themselves, unless the format has a layout of its own there.
    """
    if isinstance(weight, QuantizedWeight):
        return backend_for(weight, weight.codes.device).pack_linear(weight, bias)
    assert weight.dim() == 2
    assert bias is None or (bias.dtype == weight.dtype and bias.shape == weight.shape[:1])
    return backend_for(weight, weight.device).pack_linear(weight, bias)


def empty_linear(
    out_features: int, in_features: int, dtype: torch.dtype, memory: Tensor, *, transposed: bool
) -> PackedLinear:
    """A weight in zeroed `memory`, uint8 [linear_bytes(...)], to be filled in place.

    In the native layout where that can be had; else plain, as [N, K], or `transposed` in memory.
    """
    flat = memory[: linear_bytes(out_features, in_features, dtype, memory.device)].view(dtype)
    if native.usable(flat) is not None:
        weight = flat.view(native_matmul.packed_shape(out_features, in_features, dtype))
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
    if device.type == "cpu" and dtype in native.DTYPES and native.bound.library is not None:
        shape = native_matmul.packed_shape(out_features, in_features, dtype)
        return math.prod(shape) * dtype.itemsize
    return out_features * in_features * dtype.itemsize


def linear(x: Tensor | Int8Rows, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
    """`x` [M, K] times the packed weight, plus the bias -> [M, N] in `x.dtype`; sums in fp32.

    int8 and fp8 weights quantise the rows of `x` (int8 ones take `Int8Rows` in their groups as they
    are, so that several linears share one pass); the others are weight-only.
    `quant.linear_reference` defines the result.

    `out` [M, N], if given, is written and returned, and rows of `x` may have any stride: on a GPU
    and on the native path nothing else that grows with M is allocated then. (On a GPU int8 and fp8
    weights allocate codes of rows that have none yet, and small batches sums of pieces, 17 MB at
    most on an H100.) There, too, a row's result has the same bits whatever M is.
    """
    return _backend_of(packed.layout).packed_linear(x, packed, out)
