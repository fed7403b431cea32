"""Triton kernels that quantise rows: as they are, after RMSNorm, after SiLU * mul.

Imported only where it runs: on a GPU, or in Triton's interpreter on CPU tensors. Shapes and meaning
of the arguments are those of `rowwise.py`; codes and scales have the bits of
`quant.quantize_rows_int8` and `quantize_rows_fp8` on a CPU.
"""

# Parameters of a kernel are pointers and constants, which Python types do not tell apart.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.quant import FP8_MAX, HADAMARD_BLOCK, MIN_SCALE, Int8Rows
from penstock.kernels.triton.rowwise import _activated, _added, _normed
from penstock.kernels.types import Activation

_INT8_MAX = tl.constexpr(127.0)
_FP8_MAX = tl.constexpr(FP8_MAX)
_MIN_SCALE = tl.constexpr(MIN_SCALE)
_BLOCK = tl.constexpr(HADAMARD_BLOCK)
_BLOCK_BITS = tl.constexpr(HADAMARD_BLOCK.bit_length() - 1)
_BLOCK_SCALE = tl.constexpr(HADAMARD_BLOCK**-0.5)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: fp32 has no fraction bits there


def rms_norm_int8(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, out: Int8Rows,
    total: Tensor | None, post: Tensor | None = None, factor: float = 1.0,
) -> Int8Rows:  # fmt: skip
    num_rows, dim = x.shape
    added = x if residual is None else residual
    if num_rows:
        _rms_norm_int8_kernel[(num_rows,)](
            x, added, weight, post, out.codes, out.scales, added if total is None else total,
            x.stride(0), added.stride(0), out.codes.stride(0), eps, factor,
            DIM=dim, GROUP=_group(dim, out.group), HADAMARD=out.hadamard,
            ADD=residual is not None, SCALE=factor != 1.0, **_row_tile(dim),
        )  # fmt: skip
    return out


def act_mul_int8(gate_up: Tensor, out: Int8Rows, activation: Activation = "silu") -> Int8Rows:
    num_rows, dim = out.codes.shape
    if num_rows:
        _act_mul_int8_kernel[(num_rows,)](
            gate_up, out.codes, out.scales, gate_up.stride(0), out.codes.stride(0),
            DIM=dim, GROUP=_group(dim, out.group), HADAMARD=out.hadamard,
            GELU=activation == "gelu_tanh", **_row_tile(dim),
        )  # fmt: skip
    return out


def quantize_int8(x: Tensor, out: Int8Rows) -> Int8Rows:
    quantize_rows(x, out.codes, out.scales, out.group, hadamard=out.hadamard)
    return out


def quantize_rows(
    x: Tensor, codes: Tensor, scales: Tensor, group: int | None = None, *, hadamard: bool = False
) -> tuple[Tensor, Tensor]:
    """Fills `codes` [M, K], int8, or uint8 for the bits of E4M3, and `scales` fp32 [M, G], dense.

    `quant.quantize_rows_int8` and `quantize_rows_fp8`, whose rows are one group, in one launch. Any
    stride over rows.
    """
    assert x.stride(1) == 1 and codes.stride(1) == 1 and scales.is_contiguous()
    num_rows, dim = x.shape
    if num_rows:
        _quantize_kernel[(num_rows,)](
            x, codes, scales, x.stride(0), codes.stride(0),
            DIM=dim, GROUP=_group(dim, group), HADAMARD=hadamard,
            FP8=codes.dtype == torch.uint8, **_row_tile(dim),
        )  # fmt: skip
    return codes, scales


def _group(dim: int, group: int | None) -> int:
    """Inputs that share a scale, a power of two; 0: all."""
    if group is None or group >= dim:
        return 0
    assert group & (group - 1) == 0, group
    return group


def _row_tile(dim: int) -> dict[str, int]:
    """A whole row in registers: it is read before any of it is written."""
    tile = triton.next_power_of_2(dim)
    return {"TILE": tile, "num_warps": min(32, max(1, tile // 512))}


@triton.jit
def _row_scale(y, largest_code, AXIS: tl.constexpr = 0):
    """The scale of a row, or of each row, of fp32 values; NaN where one is not finite."""
    size = tl.abs(y)
    finite = tl.min((size < float("inf")).to(tl.int32), AXIS)  # of a NaN this is false, too
    largest = tl.max(tl.where(size < float("inf"), size, 0.0), AXIS)
    scale = tl.maximum(tl.div_rn(largest, largest_code), _MIN_SCALE)
    return tl.where(finite == 1, scale, float("nan"))


@triton.jit
def _int8_codes(y, scale):
    """Half goes to even, which adding and taking away a large number does; NaN is 0."""
    steps = tl.div_rn(y, scale + tl.zeros_like(y))
    codes = tl.minimum(tl.maximum((steps + _ROUND) - _ROUND, -_INT8_MAX), _INT8_MAX)
    return tl.where(steps == steps, codes, 0.0).to(tl.int8)


@triton.jit
def _fp8_codes(y, scale):
    """The bits of E4M3, half to even: no GPU before Ada has the type. NaN is 0."""
    steps = tl.div_rn(y, scale + tl.zeros_like(y))
    steps = tl.where(steps == steps, steps, 0.0)
    sign = (steps.to(tl.uint32, bitcast=True) >> 31).to(tl.int32) << 7
    size = tl.minimum(tl.abs(steps), _FP8_MAX)
    bits = size.to(tl.uint32, bitcast=True)
    # Drop 20 of 23 digits; the exponent's bias goes from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20).to(tl.int32) - (120 << 3)
    small = ((size * 512.0 + _ROUND) - _ROUND).to(tl.int32)  # below 2^-6, steps of 2^-9
    return (tl.where(size < 0.015625, small, normal) | sign).to(tl.uint8)


@triton.jit
def _transformed(y, i, DIM: tl.constexpr, TILE: tl.constexpr):
    """`quant.hadamard_transform` of a row, whose elements are numbered `i`.

    Each step takes the last bit of an element's place, adds and subtracts over it, and makes it the
    first one: after six of them the places are what they were.
    """
    whole: tl.constexpr = DIM // _BLOCK * _BLOCK
    if whole == 0:
        return y
    z = tl.reshape(y, [TILE // _BLOCK, _BLOCK])
    for _ in tl.static_range(_BLOCK_BITS):
        a, b = tl.split(tl.reshape(z, [TILE // _BLOCK, _BLOCK // 2, 2]))
        both = tl.permute(tl.join(a + b, a - b), (0, 2, 1))
        z = tl.reshape(both, [TILE // _BLOCK, _BLOCK])
    return tl.where(i < whole, tl.reshape(z, [TILE]) * _BLOCK_SCALE, y)


@triton.jit
def _store_int8(
    y, codes_ptr, scales_ptr, row, stride, i, keep,
    DIM: tl.constexpr, GROUP: tl.constexpr, HADAMARD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if HADAMARD:
        y = _transformed(y, i, DIM, TILE)
    if GROUP == 0:
        scale = _row_scale(y, _INT8_MAX)
        tl.store(codes_ptr + row * stride + i, _int8_codes(y, scale), mask=keep)
        tl.store(scales_ptr + row, scale)
    else:
        groups = tl.reshape(y, [TILE // GROUP, GROUP])
        scale = _row_scale(groups, _INT8_MAX, 1)
        codes = tl.reshape(_int8_codes(groups, scale[:, None]), [TILE])
        # A row's scale waits for the whole row; of groups, one warp may be through before another
        # has read what the codes of the first are written over.
        tl.debug_barrier()
        tl.store(codes_ptr + row * stride + i, codes, mask=keep)
        g = tl.arange(0, TILE // GROUP)
        num_groups: tl.constexpr = (DIM + GROUP - 1) // GROUP
        tl.store(scales_ptr + row * num_groups + g, scale, mask=g < num_groups)


@triton.jit
def _quantize_kernel(
    x_ptr, codes_ptr, scales_ptr, stride, codes_stride,
    DIM: tl.constexpr, GROUP: tl.constexpr, HADAMARD: tl.constexpr, TILE: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, TILE)
    keep = i < DIM
    y = tl.load(x_ptr + row * stride + i, mask=keep, other=0.0).to(tl.float32)
    if FP8:
        scale = _row_scale(y, _FP8_MAX)
        tl.store(codes_ptr + row * codes_stride + i, _fp8_codes(y, scale), mask=keep)
        tl.store(scales_ptr + row, scale)
    else:
        _store_int8(
            y, codes_ptr, scales_ptr, row, codes_stride, i, keep, DIM, GROUP, HADAMARD, TILE
        )


@triton.jit
def _rms_norm_int8_kernel(
    x_ptr, added_ptr, weight_ptr, post_ptr, codes_ptr, scales_ptr, total_ptr,
    x_stride, added_stride, codes_stride, eps, factor,
    DIM: tl.constexpr, GROUP: tl.constexpr, HADAMARD: tl.constexpr, TILE: tl.constexpr,
    ADD: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """`_rms_norm_kernel`, and the row quantised where it is."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, TILE)
    keep = i < DIM
    dtype = x_ptr.dtype.element_ty
    y = tl.load(x_ptr + row * x_stride + i, mask=keep, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(added_ptr + row * added_stride + i, mask=keep, other=0.0)
        total = _added(y, added, post_ptr, i, keep, eps, factor, DIM, dtype, SCALE)
        tl.store(total_ptr + row * DIM + i, total, mask=keep)
        y = total.to(tl.float32)
    if weight_ptr is not None:
        weight_dtype: tl.constexpr = weight_ptr.dtype.element_ty
        weight = tl.load(weight_ptr + i, mask=keep, other=0.0).to(tl.float32)
        y = _normed(y, weight, eps, DIM, dtype, weight_dtype).to(tl.float32)
    _store_int8(y, codes_ptr, scales_ptr, row, codes_stride, i, keep, DIM, GROUP, HADAMARD, TILE)


@triton.jit
def _act_mul_int8_kernel(
    gate_up_ptr, codes_ptr, scales_ptr, stride, codes_stride,
    DIM: tl.constexpr, GROUP: tl.constexpr, HADAMARD: tl.constexpr, TILE: tl.constexpr,
    GELU: tl.constexpr,
):  # fmt: skip
    """One program a row, rounded as `_act_mul_kernel` does."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, TILE)
    keep = i < DIM
    gate = tl.load(gate_up_ptr + row * stride + i, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + DIM + i, mask=keep, other=0.0).to(tl.float32)
    y = (_activated(gate, GELU) * up).to(gate_up_ptr.dtype.element_ty).to(tl.float32)
    _store_int8(y, codes_ptr, scales_ptr, row, codes_stride, i, keep, DIM, GROUP, HADAMARD, TILE)
