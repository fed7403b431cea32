"""Row-wise operators: RMSNorm (with residual add), rotary embedding, SiLU * mul.

A row's result does not depend on the other rows of the call. On a GPU Triton runs, on a CPU the
native library, else plain PyTorch.
"""

from __future__ import annotations

import ctypes
from typing import overload

import torch
from torch import Tensor

from penstock.kernels.cpu import native
from penstock.kernels.cpu.arguments import QUANTIZE, RMS_NORM, ROPE, ROPE_TO, SILU_MUL
from penstock.kernels.quant import Int8Rows, quantize_rows_int8
from penstock.kernels.reference.rowwise import (
    rms_norm_reference,
    rope_reference,
    silu_mul_reference,
)
from penstock.kernels.types import rows_are_dense


@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: None = None, out: Tensor | None = None
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor,
    out: Tensor | None = None,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Root-mean-square norm over the last dimension of `x`, times `weight` [D], in `x.dtype`.

    `x` is [T, D], or [T, H, D] for a norm per head; it may be a view with any stride over T and H,
    and `out` may be `x` itself. Without `residual` the result is y. With `residual` [T, D] it is
    (y, h): h = x + residual rounded to `x.dtype`, y the norm of h; h is written to `total` [T, D],
    dense, which may be `residual` itself. fp32 inside; the normed value is rounded before the
    weight multiplies it, as in transformers' LlamaRMSNorm.
    """
    assert x.stride(-1) == 1 and weight.dtype == x.dtype
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if residual is not None and total is None:
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert total is None or (total.is_contiguous() and total.shape == x.shape)
    if x.is_cuda:
        from penstock.kernels.triton import rowwise as rowwise_triton

        return rowwise_triton.rms_norm(x, weight, eps, residual, out, total)
    lib = native.usable(x)
    if lib is not None:
        _native_rms_norm(lib, x, weight, eps, residual, out, total)
        return out if total is None else (out, total)
    return _torch_rms_norm(x, weight, eps, residual, out, total)


def rms_norm_int8(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    out: Int8Rows | None = None,
    total: Tensor | None = None,
) -> Int8Rows:
    """`rms_norm` of `x` [T, D], and its rows quantised, in one pass: the codes and the scales that
    `quantize_rows_int8(rms_norm(...))` gives, bit for bit, the roundings to `x.dtype` included.

    With `residual` [T, D], h = x + residual is written to `total` (which may be `residual` itself)
    and normed; without, `total` must be None. `out` may be `Int8Rows.inside` any memory but that of
    `weight`, `total` and `residual`; that of `x` is allowed.
    """
    assert x.dim() == 2 and x.stride(1) == 1 and weight.dtype == x.dtype
    assert (residual is None) == (total is None)
    assert total is None or (total.is_contiguous() and total.shape == x.shape)
    if out is None:
        out = _new_rows(x, x.shape[1])
    if x.is_cuda:
        from penstock.kernels.triton import rowwise_quant as rowwise_quant_triton

        return rowwise_quant_triton.rms_norm_int8(x, weight, eps, residual, out, total)
    lib = native.usable(x)
    if lib is not None:
        _native_rms_norm(lib, x, weight, eps, residual, out, total)
        return out
    if residual is None or total is None:
        return _quantize(rms_norm(x, weight, eps), out)
    return _quantize(rms_norm(x, weight, eps, residual=residual, total=total)[0], out)


def silu_mul_int8(gate_up: Tensor, out: Int8Rows | None = None) -> Int8Rows:
    """`silu_mul` of `gate_up` [T, 2I], and its rows [T, I] quantised, in one pass: the codes and
    the scales that `quantize_rows_int8(silu_mul(gate_up))` gives, bit for bit.

    `out` may be `Int8Rows.inside` the gate half itself.
    """
    assert gate_up.stride(-1) == 1
    if out is None:
        out = _new_rows(gate_up, gate_up.shape[1] // 2)
    if gate_up.is_cuda:
        from penstock.kernels.triton import rowwise_quant as rowwise_quant_triton

        return rowwise_quant_triton.silu_mul_int8(gate_up, out)
    lib = native.usable(gate_up)
    if lib is not None:
        _native_silu_mul(lib, gate_up, out)
        return out
    return _quantize(silu_mul(gate_up), out)


def quantize_int8(x: Tensor, out: Int8Rows | None = None) -> Int8Rows:
    """The rows of `x` [T, D] as `quantize_rows_int8` makes them, for linears that share them."""
    if out is None:
        out = _new_rows(x, x.shape[1])
    if x.is_cuda:
        from penstock.kernels.triton import rowwise_quant as rowwise_quant_triton

        rowwise_quant_triton.quantize_rows(x, out.codes, out.scales)
        return out
    lib = native.usable(x)
    if lib is None:
        return _quantize(x, out)
    assert x.stride(1) == 1
    lib.pk_quantize(QUANTIZE.pack(
        native.DTYPES[x.dtype], x.data_ptr(), x.stride(0), *x.shape, torch.get_num_threads(),
        *_codes_args(out),
    ))  # fmt: skip
    return out


def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `q` [T, H, D] and `k` [T, KV, D] in place by `cos`, `sin` fp32 [T, rot/2].

    Half-split ("rotate_half") layout: dimension i < rot/2 turns together with i + rot/2; dimensions
    from rot on stay. q and k may be views of one fused projection (any stride over T). fp32 inside.
    """
    assert rows_are_dense(q) and rows_are_dense(k)
    if q.is_cuda:
        from penstock.kernels.triton import rowwise as rowwise_triton

        rowwise_triton.rope_(q, k, cos, sin)
        return
    lib = native.usable(q)
    if lib is not None:
        _native_rope(lib, q, k, cos, sin)
    else:
        q.copy_(rope_reference(q, cos, sin))
        k.copy_(rope_reference(k, cos, sin))


def rope_to(q: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """`q` [T, H, D] rotated as `rope_` does, written to `out` [T, H, D]; `q` stays as it is.

    The second query of a rolled context (`attention.Rolling`): the same q at another position. Any
    stride over T in both. Returns `out`, which has the bits that `rope_` would leave in q.
    """
    assert rows_are_dense(q) and rows_are_dense(out)
    assert out.shape == q.shape and out.dtype == q.dtype
    if q.is_cuda:
        from penstock.kernels.triton import rowwise as rowwise_triton

        return rowwise_triton.rope_to(q, cos, sin, out)
    lib = native.usable(q)
    if lib is not None:
        return _native_rope_to(lib, q, cos, sin, out)
    return out.copy_(rope_reference(q, cos, sin))


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up of `gate_up` [T, 2I], gate first, into [T, I]; math in fp32.

    `out` may have any stride over T, and may be the gate half itself.
    """
    assert gate_up.stride(-1) == 1
    if out is None:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    if gate_up.is_cuda:
        from penstock.kernels.triton import rowwise as rowwise_triton

        return rowwise_triton.silu_mul(gate_up, out)
    lib = native.usable(gate_up)
    if lib is not None:
        _native_silu_mul(lib, gate_up, out)
        return out
    return out.copy_(silu_mul_reference(gate_up))


def _new_rows(x: Tensor, num_columns: int) -> Int8Rows:
    codes = torch.empty(x.shape[0], num_columns, dtype=torch.int8, device=x.device)
    return Int8Rows(codes, torch.empty(x.shape[0], dtype=torch.float32, device=x.device), x.dtype)


def _quantize(x: Tensor, out: Int8Rows) -> Int8Rows:
    codes, scales = quantize_rows_int8(x)
    out.codes.copy_(codes)
    out.scales.copy_(scales)
    return out


def _codes_args(out: Int8Rows) -> tuple[int, int, int]:
    assert out.codes.stride(1) == 1 and out.scales.stride(0) == 1
    return out.codes.data_ptr(), out.codes.stride(0), out.scales.data_ptr()


def _native_rms_norm(
    lib: ctypes.CDLL, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None,
    out: Tensor | Int8Rows, total: Tensor | None,
) -> None:  # fmt: skip
    heads = x.shape[1] if x.dim() == 3 else 1
    assert residual is None or (heads == 1 and residual.dtype == x.dtype)
    if isinstance(out, Int8Rows):
        to, codes = (0, 0, 0), _codes_args(out)
    else:
        to, codes = (out.data_ptr(), out.stride(0), out.stride(-2)), (0, 0, 0)
    lib.pk_rms_norm(RMS_NORM.pack(
        native.DTYPES[x.dtype], x.data_ptr(), x.stride(0), x.stride(-2),
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        weight.data_ptr(), *to, 0 if total is None else total.data_ptr(), x.shape[0], heads,
        x.shape[-1], eps, torch.get_num_threads(), *codes,
    ))  # fmt: skip


def _native_rope(lib: ctypes.CDLL, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    assert cos.dtype == sin.dtype == torch.float32 and k.dtype == q.dtype
    cos, sin = cos.contiguous(), sin.contiguous()
    lib.pk_rope(ROPE.pack(
        native.DTYPES[q.dtype], q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0),
        cos.data_ptr(), sin.data_ptr(), q.shape[0], q.shape[1], k.shape[1], q.shape[2],
        cos.shape[1], torch.get_num_threads(),
    ))  # fmt: skip


def _native_rope_to(lib: ctypes.CDLL, q: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    assert cos.dtype == sin.dtype == torch.float32
    cos, sin = cos.contiguous(), sin.contiguous()
    lib.pk_rope_to(ROPE_TO.pack(
        native.DTYPES[q.dtype], q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0),
        cos.data_ptr(), sin.data_ptr(), *q.shape, cos.shape[1], torch.get_num_threads(),
    ))  # fmt: skip
    return out


def _native_silu_mul(lib: ctypes.CDLL, gate_up: Tensor, out: Tensor | Int8Rows) -> None:
    if isinstance(out, Int8Rows):
        to, codes = (0, 0), _codes_args(out)
    else:
        to, codes = (out.data_ptr(), out.stride(0)), (0, 0, 0)
    lib.pk_silu_mul(SILU_MUL.pack(
        native.DTYPES[gate_up.dtype], gate_up.data_ptr(), gate_up.stride(0), *to, *out.shape,
        torch.get_num_threads(), *codes,
    ))  # fmt: skip


def _torch_rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out: Tensor,
    total: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    if residual is None or total is None:
        return out.copy_(rms_norm_reference(x, weight, eps))
    torch.add(x, residual, out=total)
    return out.copy_(rms_norm_reference(total, weight, eps)), total
