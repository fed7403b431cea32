"""Row-wise operators on the CPU by the native library: packs the arguments of its functions.

The parameters mean what they mean in `kernels/rowwise.py`, which chooses this backend only for
tensors that the library supports (`native.usable`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.cpu import native
from penstock.kernels.cpu.arguments import (
    ACT_MUL,
    COMBINE,
    HADAMARD,
    QUANTIZE,
    RMS_NORM,
    ROPE,
    ROPE_TO,
    SOFT_CAP,
    SWIGLU,
)
from penstock.kernels.quant import Int8Rows
from penstock.kernels.types import ACTIVATIONS, Activation


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, out: Tensor,
    total: Tensor | None, post: Tensor | None = None, factor: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    to = out.data_ptr(), out.stride(0), out.stride(-2)
    _rms_norm(x, weight, eps, residual, to, total, (0, 0, 0, 0, 0), post, factor)
    return out if total is None else (out, total)


def rms_norm_int8(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, out: Int8Rows,
    total: Tensor | None, post: Tensor | None = None, factor: float = 1.0,
) -> Int8Rows:  # fmt: skip
    _rms_norm(x, weight, eps, residual, (0, 0, 0), total, _codes_args(out), post, factor)
    return out


def _rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None,
    to: tuple[int, int, int], total: Tensor | None, codes: tuple[int, int, int, int, int],
    post: Tensor | None, factor: float,
) -> None:  # fmt: skip
    heads = x.shape[1] if x.dim() == 3 else 1
    assert residual is None or (heads == 1 and residual.dtype == x.dtype)
    any_weight = post if weight is None else weight
    native.bound.library.pk_rms_norm(RMS_NORM.pack(
        native.DTYPES[x.dtype], x.data_ptr(), x.stride(0), x.stride(-2),
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        0 if weight is None else weight.data_ptr(), 0 if post is None else post.data_ptr(), factor,
        any_weight is not None and any_weight.dtype != x.dtype, *to,
        0 if total is None else total.data_ptr(), x.shape[0], heads, x.shape[-1], eps,
        torch.get_num_threads(), *codes,
    ))  # fmt: skip


def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    assert cos.dtype == sin.dtype == torch.float32 and k.dtype == q.dtype
    cos, sin = cos.contiguous(), sin.contiguous()
    native.bound.library.pk_rope(ROPE.pack(
        native.DTYPES[q.dtype], q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0),
        cos.data_ptr(), sin.data_ptr(), q.shape[0], q.shape[1], k.shape[1], q.shape[2],
        cos.shape[1], torch.get_num_threads(),
    ))  # fmt: skip


def rope_to(q: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    assert cos.dtype == sin.dtype == torch.float32
    cos, sin = cos.contiguous(), sin.contiguous()
    native.bound.library.pk_rope_to(ROPE_TO.pack(
        native.DTYPES[q.dtype], q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0),
        cos.data_ptr(), sin.data_ptr(), *q.shape, cos.shape[1], torch.get_num_threads(),
    ))  # fmt: skip
    return out


def act_mul(gate_up: Tensor, out: Tensor, activation: Activation) -> Tensor:
    native.bound.library.pk_act_mul(ACT_MUL.pack(
        native.DTYPES[gate_up.dtype], gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(),
        out.stride(0), *out.shape, ACTIVATIONS.index(activation), torch.get_num_threads(),
        0, 0, 0, 0, 0,
    ))  # fmt: skip
    return out


def act_mul_int8(gate_up: Tensor, out: Int8Rows, activation: Activation) -> Int8Rows:
    native.bound.library.pk_act_mul(ACT_MUL.pack(
        native.DTYPES[gate_up.dtype], gate_up.data_ptr(), gate_up.stride(0), 0, 0, *out.shape,
        ACTIVATIONS.index(activation), torch.get_num_threads(), *_codes_args(out),
    ))  # fmt: skip
    return out


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    native.bound.library.pk_soft_cap(
        SOFT_CAP.pack(x.data_ptr(), x.stride(0), *x.shape, cap, torch.get_num_threads())
    )
    return x


def swiglu(gate_up: Tensor, out: Tensor, alpha: float, limit: float) -> Tensor:
    native.bound.library.pk_swiglu(SWIGLU.pack(
        native.DTYPES[gate_up.dtype], gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(),
        out.stride(0), *out.shape, alpha, limit, torch.get_num_threads(),
    ))  # fmt: skip
    return out


def quantize_int8(x: Tensor, out: Int8Rows) -> Int8Rows:
    assert x.stride(1) == 1
    native.bound.library.pk_quantize(QUANTIZE.pack(
        native.DTYPES[x.dtype], x.data_ptr(), x.stride(0), *x.shape, torch.get_num_threads(),
        *_codes_args(out),
    ))  # fmt: skip
    return out


def hadamard(x: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.float32)
    native.bound.library.pk_hadamard(HADAMARD.pack(
        native.DTYPES[x.dtype], x.data_ptr(), x.stride(0), out.data_ptr(), *x.shape,
        torch.get_num_threads(),
    ))  # fmt: skip
    return out


def combine(routed: Tensor, places: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    num_tokens, num_ranks = places.shape
    native.bound.library.pk_combine(COMBINE.pack(
        native.DTYPES[routed.dtype], routed.data_ptr(), places.data_ptr(), weights.data_ptr(),
        out.data_ptr(), num_tokens, num_ranks, routed.shape[1], torch.get_num_threads(),
    ))  # fmt: skip
    return out


def _codes_args(out: Int8Rows) -> tuple[int, int, int, int, int]:
    assert out.codes.stride(1) == 1 and out.scales.is_contiguous()
    group = out.group or out.codes.shape[1] or 1
    return out.codes.data_ptr(), out.codes.stride(0), out.scales.data_ptr(), group, out.hadamard
