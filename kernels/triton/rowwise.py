"""The Triton kernels of `rowwise.py`: RMSNorm (with residual add), rotary embedding, activation *
mul, soft caps; and the weighted sum of routed rows of `moe.py`.

Imported only where it runs: on a GPU, or in Triton's interpreter on CPU tensors. Shapes and meaning
of the arguments are those of `rowwise.py`.
"""

# Parameters of a kernel are pointers and constants, which Python types do not tell apart.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.types import Activation


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    out: Tensor,
    total: Tensor | None = None,
    post: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor]:
    heads = x.shape[1] if x.dim() == 3 else 1
    num_rows, dim = x.shape[0] * heads, x.shape[-1]
    if residual is None:
        total = out  # not written
    elif total is None:
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    added = x if residual is None else residual
    tile = triton.next_power_of_2(dim)
    if num_rows:
        _rms_norm_kernel[(num_rows,)](
            x, added, weight, post, out, total,
            x.stride(0), x.stride(-2), added.stride(0), out.stride(0), out.stride(-2), eps, factor,
            HEADS=heads, DIM=dim, TILE=tile, ADD=residual is not None, SCALE=factor != 1.0,
            num_warps=min(16, max(1, tile // 512)),
        )  # fmt: skip
    return out if residual is None or total is None else (out, total)


def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    for x in (q, k):
        rope_to(x, cos, sin, x)


def rope_to(q: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """`out` may be `q`."""
    num_tokens, num_heads, head_dim = q.shape
    cos, sin, half = cos.contiguous(), sin.contiguous(), cos.shape[1]
    rest = 0 if out is q else head_dim - 2 * half  # what does not turn lies there already
    if num_tokens:
        _rope_kernel[(num_tokens,)](
            q, cos, sin, out, q.stride(0), out.stride(0),
            HEADS=num_heads, HEAD_DIM=head_dim, HALF=half,
            HEAD_TILE=triton.next_power_of_2(num_heads), HALF_TILE=triton.next_power_of_2(half),
            REST_TILE=triton.next_power_of_2(rest) if rest else 0,
        )  # fmt: skip
    return out


def act_mul(gate_up: Tensor, out: Tensor, activation: Activation = "silu") -> Tensor:
    num_rows, dim = out.shape
    tile = min(1024, triton.next_power_of_2(dim))
    if num_rows:
        _act_mul_kernel[(num_rows, triton.cdiv(dim, tile))](
            gate_up, out, gate_up.stride(0), out.stride(0), dim, TILE=tile,
            GELU=activation == "gelu_tanh",
        )  # fmt: skip
    return out


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    num_rows, dim = x.shape
    tile = min(1024, triton.next_power_of_2(dim))
    if num_rows:
        _soft_cap_kernel[(num_rows, triton.cdiv(dim, tile))](x, x.stride(0), dim, cap, TILE=tile)
    return x


def swiglu(gate_up: Tensor, out: Tensor, alpha: float, limit: float) -> Tensor:
    num_rows, dim = out.shape
    tile = min(1024, triton.next_power_of_2(dim))
    if num_rows:
        _swiglu_kernel[(num_rows, triton.cdiv(dim, tile))](
            gate_up, out, gate_up.stride(0), out.stride(0), dim, alpha, limit, TILE=tile
        )
    return out


def combine(routed: Tensor, places: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """sum_k weights[t, k] * routed[places[t, k]] into `out` [T, d], k ascending, in fp32."""
    num_rows, dim = out.shape
    tile = min(1024, triton.next_power_of_2(dim))
    if num_rows:
        _combine_kernel[(num_rows, triton.cdiv(dim, tile))](
            routed, places, weights, out, routed.stride(0), out.stride(0), dim,
            RANKS=places.shape[1], TILE=tile,
        )  # fmt: skip
    return out


@triton.jit
def _normed(x, weight, eps, DIM: tl.constexpr, dtype: tl.constexpr, weight_dtype: tl.constexpr):
    """A row of fp32 values, normed: rounded to `dtype` in the end, and to the weight's before."""
    normed = (x * tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)).to(weight_dtype).to(tl.float32)
    return (normed * weight).to(dtype)


@triton.jit
def _added(
    x, added, post_ptr, i, keep, eps, factor,
    DIM: tl.constexpr, dtype: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """added + factor * x of a row, in `dtype`; with x normed before, where `post_ptr` is given."""
    if post_ptr is not None:
        weight_dtype: tl.constexpr = post_ptr.dtype.element_ty
        post = tl.load(post_ptr + i, mask=keep, other=0.0).to(tl.float32)
        x = _normed(x, post, eps, DIM, dtype, weight_dtype).to(tl.float32)
    if SCALE:
        x = x * factor
    return (x + added.to(tl.float32)).to(dtype)


@triton.jit
def _rms_norm_kernel(
    x_ptr, added_ptr, weight_ptr, post_ptr, out_ptr, total_ptr,
    x_stride, x_head_stride, added_stride, out_stride, out_head_stride, eps, factor,
    HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, ADD: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """One program a row, read once."""
    row = tl.program_id(0).to(tl.int64)
    token, head = row // HEADS, row % HEADS
    i = tl.arange(0, TILE)
    keep = i < DIM
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + token * x_stride + head * x_head_stride + i, mask=keep, other=0.0)
    x = x.to(tl.float32)
    if ADD:
        added = tl.load(added_ptr + token * added_stride + i, mask=keep, other=0.0)
        total = _added(x, added, post_ptr, i, keep, eps, factor, DIM, dtype, SCALE)
        tl.store(total_ptr + token * DIM + i, total, mask=keep)
        x = total.to(tl.float32)
    if weight_ptr is not None:
        weight_dtype: tl.constexpr = weight_ptr.dtype.element_ty
        weight = tl.load(weight_ptr + i, mask=keep, other=0.0).to(tl.float32)
        y = _normed(x, weight, eps, DIM, dtype, weight_dtype)
        tl.store(out_ptr + token * out_stride + head * out_head_stride + i, y, mask=keep)


@triton.jit
def _rope_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, x_stride, out_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HEAD_TILE: tl.constexpr, HALF_TILE: tl.constexpr, REST_TILE: tl.constexpr,
):  # fmt: skip
    """One program a token, all its heads; REST_TILE 0 leaves what does not turn."""
    token = tl.program_id(0).to(tl.int64)
    head, i = tl.arange(0, HEAD_TILE), tl.arange(0, HALF_TILE)
    cos = tl.load(cos_ptr + token * HALF + i, mask=i < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + i, mask=i < HALF, other=0.0)[None, :]
    mask = (head < HEADS)[:, None] & (i < HALF)[None, :]
    at = head[:, None] * HEAD_DIM + i[None, :]
    x_row, out_row = x_ptr + token * x_stride, out_ptr + token * out_stride
    first = tl.load(x_row + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_row + at + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_row + at, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(out_row + at + HALF, (second * cos + first * sin).to(dtype), mask=mask)
    if REST_TILE > 0:
        d = 2 * HALF + tl.arange(0, REST_TILE)
        mask = (head < HEADS)[:, None] & (d < HEAD_DIM)[None, :]
        at = head[:, None] * HEAD_DIM + d[None, :]
        tl.store(out_row + at, tl.load(x_row + at, mask=mask), mask=mask)


@triton.jit
def _tanh(x):
    """By exp; near 0, where that has no digits left, by the series to x^7."""
    size, square = tl.abs(x), x * x
    decay = tl.exp(size * -2.0)
    small = size * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    found = tl.where(size < 0.15, small, (1.0 - decay) / (1.0 + decay))
    return tl.where(x < 0, -found, found)


@triton.jit
def _activated(gate, GELU: tl.constexpr):
    """SiLU; or GELU by tanh, where (1 + tanh(u)) / 2 is the logistic function of 2u."""
    if GELU:
        return gate * tl.sigmoid(gate * (gate * gate * 0.044715 + 1.0) * 1.5957691216057308)
    return gate * tl.sigmoid(gate)


@triton.jit
def _act_mul_kernel(
    gate_up_ptr, out_ptr, stride, out_stride, dim, TILE: tl.constexpr, GELU: tl.constexpr
):
    """One program a tile of one row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    keep = i < dim
    gate = tl.load(gate_up_ptr + row * stride + i, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + dim + i, mask=keep, other=0.0).to(tl.float32)
    y = _activated(gate, GELU) * up
    tl.store(out_ptr + row * out_stride + i, y.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _soft_cap_kernel(x_ptr, stride, dim, cap, TILE: tl.constexpr):
    """One program a tile of one row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + row * stride + i, mask=i < dim, other=0.0)
    tl.store(x_ptr + row * stride + i, _tanh(x / cap) * cap, mask=i < dim)


@triton.jit
def _swiglu_kernel(
    gate_up_ptr, out_ptr, stride, out_stride, dim, alpha, limit, TILE: tl.constexpr
):  # fmt: skip
    """One program a tile of one row. Not yet run on a GPU."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    keep = i < dim
    gate = tl.load(gate_up_ptr + row * stride + i, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + dim + i, mask=keep, other=0.0).to(tl.float32)
    gate = tl.where(gate > limit, limit, gate)  # NaN stays
    up = tl.where(up > limit, limit, up)
    up = tl.where(up < -limit, -limit, up)
    y = (up + 1.0) * gate * tl.sigmoid(alpha * gate)
    tl.store(out_ptr + row * out_stride + i, y.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _combine_kernel(
    routed_ptr, places_ptr, weights_ptr, out_ptr, stride, out_stride, dim,
    RANKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program a tile of one token."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    keep = i < dim
    total = tl.zeros([TILE], tl.float32)
    for rank in tl.static_range(RANKS):
        place = tl.load(places_ptr + token * RANKS + rank)
        weight = tl.load(weights_ptr + token * RANKS + rank)
        row = tl.load(routed_ptr + place * stride + i, mask=keep, other=0.0)
        total += weight * row.to(tl.float32)
    tl.store(out_ptr + token * out_stride + i, total.to(out_ptr.dtype.element_ty), mask=keep)
