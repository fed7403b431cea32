"""Row-wise operators: RMSNorm (with residual add), rotary embedding, activation * mul, soft caps,
int8 rows, and the weighted sum of routed rows.

A row's result does not depend on the other rows of the call. Backends: Triton on a GPU, the native
library on a CPU where it supports the dtype, else plain PyTorch.
"""

from __future__ import annotations

import functools
from typing import Protocol, overload

import torch
from torch import Tensor

from penstock.kernels.cpu import native
from penstock.kernels.cpu import rowwise as native_rowwise
from penstock.kernels.quant import Int8Rows, hadamard_transform, num_groups
from penstock.kernels.reference import rowwise as reference
from penstock.kernels.types import Activation, rows_are_dense


class RowwiseBackend(Protocol):
    """What each backend implements. The functions below check the arguments before they call it."""

    def rms_norm(
        self, x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, out: Tensor,
        total: Tensor | None, post: Tensor | None = None, factor: float = 1.0,
    ) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip

    def rope_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None: ...

    def rope_to(self, q: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor: ...

    def act_mul(self, gate_up: Tensor, out: Tensor, activation: Activation) -> Tensor: ...

    def soft_cap_(self, x: Tensor, cap: float) -> Tensor: ...

    def swiglu(self, gate_up: Tensor, out: Tensor, alpha: float, limit: float) -> Tensor: ...

    def combine(self, routed: Tensor, places: Tensor, weights: Tensor, out: Tensor) -> Tensor: ...


class Int8Backend(Protocol):
    """The same for the operators that quantise their rows."""

    def rms_norm_int8(
        self, x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, out: Int8Rows,
        total: Tensor | None, post: Tensor | None = None, factor: float = 1.0,
    ) -> Int8Rows: ...  # fmt: skip

    def act_mul_int8(self, gate_up: Tensor, out: Int8Rows, activation: Activation) -> Int8Rows: ...

    def quantize_int8(self, x: Tensor, out: Int8Rows) -> Int8Rows: ...


def _backend(x: Tensor) -> RowwiseBackend:
    if x.is_cuda:
        return _triton()
    return reference if native.usable(x) is None else native_rowwise


def _int8_backend(x: Tensor) -> Int8Backend:
    if x.is_cuda:
        return _triton_int8()
    return reference if native.usable(x) is None else native_rowwise


@functools.cache
def _triton() -> RowwiseBackend:
    from penstock.kernels.triton import rowwise  # Triton is not installed on every machine

    return rowwise


@functools.cache
def _triton_int8() -> Int8Backend:
    from penstock.kernels.triton import rowwise_quant  # as above

    return rowwise_quant


@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: None = None, out: Tensor | None = None
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    residual: Tensor,
    out: Tensor | None = None,
    total: Tensor | None = None,
    post: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    total: Tensor | None = None,
    post: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Root-mean-square norm over the last dimension of `x`, times `weight` [D], in `x.dtype`.

    `x` is [T, D], or [T, H, D] for a norm per head; it may be a view with any stride over T and H,
    and `out` may be `x` itself. Without `residual` the result is y. With `residual` [T, D] it is
    (y, h): h = residual + factor * x rounded to `x.dtype`, y the norm of h; h is written to `total`
    [T, D], dense, which may be `residual` itself. With `post` [D], x is normed by it before it is
    added. Without `weight`, y is h itself, and nothing is written to `out`.

    fp32 inside. Weights in `x.dtype` multiply the normed value rounded to it, as in transformers'
    LlamaRMSNorm; weights in fp32 the normed value itself, as in its Gemma3RMSNorm.
    """
    assert x.stride(-1) == 1
    _check_norms(x, weight, post, residual)
    if residual is not None and total is None:
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out is None:
        is_sum = total is not None and weight is None
        out = x if is_sum else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert total is None or (total.is_contiguous() and total.shape == x.shape)
    found = _backend(x).rms_norm(x, weight, eps, residual, out, total, post, factor)
    return found if weight is not None or total is None else (total, total)


def rms_norm_int8(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
    group: int | None = None,
    hadamard: bool = False,
    out: Int8Rows | None = None,
    total: Tensor | None = None,
    post: Tensor | None = None,
    factor: float = 1.0,
) -> Int8Rows:
    """`rms_norm` of `x` [T, D], and its rows quantised, in one pass: the codes and the scales that
    `quantize_rows_int8(rms_norm(...), group, hadamard=hadamard)` gives, bit for bit, the roundings
    to `x.dtype` included. `group` and `hadamard` count only without `out`, which has its own.

    With `residual` [T, D], the sum of `rms_norm` is written to `total` (which may be `residual`
    itself) and normed, or without `weight` quantised as it is; without, `total` must be None. `out`
    may be `Int8Rows.inside` any memory but that of the weights, `total` and `residual`; that of `x`
    is allowed.
    """
    assert x.dim() == 2 and x.stride(1) == 1
    _check_norms(x, weight, post, residual)
    assert (residual is None) == (total is None)
    assert total is None or (total.is_contiguous() and total.shape == x.shape)
    if out is None:
        out = _new_rows(x, x.shape[1], group, hadamard)
    return _int8_backend(x).rms_norm_int8(x, weight, eps, residual, out, total, post, factor)


def _check_norms(
    x: Tensor, weight: Tensor | None, post: Tensor | None, residual: Tensor | None
) -> None:
    either = post if weight is None else weight  # of every norm of every layer: no sets
    assert either is None or either.dtype == x.dtype or either.dtype == torch.float32
    assert weight is None or post is None or weight.dtype == post.dtype
    assert residual is not None or (weight is not None and post is None)


def act_mul_int8(
    gate_up: Tensor,
    *,
    activation: Activation = "silu",
    group: int | None = None,
    hadamard: bool = False,
    out: Int8Rows | None = None,
) -> Int8Rows:
    """`act_mul` of `gate_up` [T, 2I], and its rows [T, I] quantised, in one pass: the codes and
    the scales that `quantize_rows_int8` of `act_mul(gate_up)` gives, bit for bit.

    `group` and `hadamard` count only without `out`, which may be `Int8Rows.inside` the gate half
    itself.
    """
    assert gate_up.stride(-1) == 1
    if out is None:
        out = _new_rows(gate_up, gate_up.shape[1] // 2, group, hadamard)
    return _int8_backend(gate_up).act_mul_int8(gate_up, out, activation)


def quantize_int8(
    x: Tensor,
    *,
    group: int | None = None,
    hadamard: bool = False,
    out: Int8Rows | None = None,
) -> Int8Rows:
    """The rows of `x` [T, D] as `quantize_rows_int8` makes them, for linears that share them.

    `group` and `hadamard` count only without `out`, which has its own.
    """
    if out is None:
        out = _new_rows(x, x.shape[1], group, hadamard)
    return _int8_backend(x).quantize_int8(x, out)


def hadamard(x: Tensor) -> Tensor:
    """`quant.hadamard_transform` of `x` [N, K], bit for bit: in one pass where the native library
    is."""
    if x.is_cpu and x.dtype not in native.DTYPES:
        x = x.float()
    if x.stride(1) == 1 and native.usable(x) is not None:
        return native_rowwise.hadamard(x)
    return hadamard_transform(x)


def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `q` [T, H, D] and `k` [T, KV, D] in place by `cos`, `sin` fp32 [T, rot/2].

    Half-split ("rotate_half") layout: dimension i < rot/2 turns together with i + rot/2; dimensions
    from rot on stay. q and k may be views of one fused projection (any stride over T). fp32 inside.
    """
    assert rows_are_dense(q) and rows_are_dense(k)
    _backend(q).rope_(q, k, cos, sin)


def rope_to(q: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """`q` [T, H, D] rotated as `rope_` does, written to `out` [T, H, D]; `q` stays as it is.

    The second query of a rolled context (`attention.Rolling`): the same q at another position. Any
    stride over T in both. Returns `out`, which has the bits that `rope_` would leave in q.
    """
    assert rows_are_dense(q) and rows_are_dense(out)
    assert out.shape == q.shape and out.dtype == q.dtype
    return _backend(q).rope_to(q, cos, sin, out)


def act_mul(gate_up: Tensor, out: Tensor | None = None, activation: Activation = "silu") -> Tensor:
    """activation(gate) * up of `gate_up` [T, 2I], gate first, into [T, I]; math in fp32.

    `out` may have any stride over T, and may be the gate half itself.
    """
    assert gate_up.stride(-1) == 1
    if out is None:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    return _backend(gate_up).act_mul(gate_up, out, activation)


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) in place, of fp32 `x` [T, D], dense rows."""
    assert x.dtype == torch.float32 and x.stride(1) == 1
    return _backend(x).soft_cap_(x, cap)


def swiglu(gate_up: Tensor, alpha: float, limit: float, out: Tensor | None = None) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate) of `gate_up` [T, 2I], gate first, into [T, I]; math
    in fp32. Before, gate is clamped to `limit`, up to [-limit, limit] (gpt-oss, arXiv 2508.10925).

    `out` as for `act_mul`.
    """
    assert gate_up.stride(-1) == 1
    if out is None:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    return _backend(gate_up).swiglu(gate_up, out, alpha, limit)


def combine(routed: Tensor, places: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """sum_k weights[t, k] * routed[places[t, k]], k ascending and in fp32, into `out` [T, d].

    `routed` [R, d] and `out` are dense; `places` int64 and `weights` are [T, k].
    """
    assert out.is_contiguous() and routed.is_contiguous()
    return _backend(routed).combine(routed, places, weights.float().contiguous(), out)


def _new_rows(x: Tensor, num_columns: int, group: int | None, hadamard: bool) -> Int8Rows:
    codes = torch.empty(x.shape[0], num_columns, dtype=torch.int8, device=x.device)
    groups = num_groups(num_columns, group)
    scales = torch.empty(x.shape[0], groups, dtype=torch.float32, device=x.device)
    return Int8Rows(codes, scales, group, x.dtype, hadamard)
