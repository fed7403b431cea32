"""Triton kernels that write K and V to the paged cache: quantised if the cache is, with the rotary
embedding in the same pass on request; and the address of a block, which attention shares.

Imported only where it runs: on a GPU, or in Triton's interpreter on CPU tensors. The parameters
mean what they mean in `kernels/attention.py` and `kernels/rowwise.py`.
"""

# Parameters of a kernel are pointers and constants, which Python types do not tell apart.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels import quant
from penstock.kernels.types import PagedKv

MIN_SCALE = tl.constexpr(quant.MIN_KV_SCALE)
MAX_SCALE = tl.constexpr(quant.MAX_KV_SCALE)
FP8_MAX = tl.constexpr(quant.FP8_MAX)
FLOAT_MAX = tl.constexpr(torch.finfo(torch.float32).max)


def write_kv(k: Tensor, v: Tensor, kv: PagedKv, slots: Tensor) -> None:
    _write(None, k, v, None, None, kv, slots)


def rope_write_kv(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv: PagedKv, slots: Tensor
) -> None:
    """`rowwise.rope_` and `write_kv` in one pass: q [T, H, D] is rotated in place, k is written
    rotated and stays as it is. The cache receives what the two calls would have written."""
    _write(q, k, v, cos.contiguous(), sin.contiguous(), kv, slots)


def _write(
    q: Tensor | None, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, kv: PagedKv,
    slots: Tensor,
) -> None:  # fmt: skip
    num_tokens, num_kv_heads, head_dim = k.shape
    num_heads = 1 if q is None else q.shape[1]
    half = 1 if cos is None else cos.shape[1]
    groups = 1 if kv.scales is None else kv.scales.k.shape[3]
    k_cache, v_cache = kv.k, kv.v
    if k_cache.dtype == torch.float8_e4m3fn:  # the kernel computes the bits itself
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    if num_tokens:
        _write_kv_kernel[(num_tokens, 1 if q is None else 2)](
            q, k, v, cos, sin, k_cache, v_cache, *scales_of(kv), slots,
            0 if q is None else q.stride(0), k.stride(0), v.stride(0),
            *find_blocks(kv),
            BLOCK_SIZE=k_cache.shape[2], HEAD_DIM=head_dim, HALF=half,
            NUM_HEADS=num_heads, HEAD_TILE=triton.next_power_of_2(num_heads),
            HALF_TILE=triton.next_power_of_2(half),
            NUM_GROUPS=num_kv_heads * groups, GROUP=head_dim // groups,
            GROUPS_TILE=triton.next_power_of_2(num_kv_heads * groups),
            GROUP_TILE=triton.next_power_of_2(head_dim // groups),
        )  # fmt: skip


def scales_of(kv: PagedKv) -> tuple[Tensor | None, Tensor | None]:
    """Of K and of V. None is a constant to the compiler, which then omits the code for scales."""
    return (None, None) if kv.scales is None else (kv.scales.k, kv.scales.v)


def find_blocks(kv: PagedKv) -> tuple[int | None, ...]:
    """Six integers of K, six of V, and the first id of scratch.

    First of the codes, then of their scales: the stride from block to block, the elements from the
    cache to scratch, and the stride there. GPU memory is one flat space.
    """
    scratch = kv.scratch
    more = (None, None) if scratch is None else (scratch.k, scratch.v)
    more_scales = (None, None) if scratch is None else scales_of(scratch)
    found: list[int | None] = []
    for cache, apart, scales, scales_apart in zip((kv.k, kv.v), more, scales_of(kv), more_scales):
        found += _find(cache, apart)
        found += (0, None, 0) if scales is None else _find(scales, scales_apart)
    return (*found, kv.k.shape[0])


def _find(cache: Tensor, scratch: Tensor | None) -> tuple[int | None, ...]:
    if scratch is None:
        return cache.stride(0), None, 0
    distance = scratch.data_ptr() - cache.data_ptr()
    assert distance % cache.element_size() == 0
    return cache.stride(0), distance // cache.element_size(), scratch.stride(0)


@triton.jit
def find_block(block, stride, scratch_at, scratch_stride, num_blocks):
    """Elements from the cache's first to the block; ids from num_blocks on are blocks of scratch.

    A select, of pointers or of offsets, would lose the alignment that the compiler has proven: 193
    scalar loads where now are 35 asynchronous copies of 16 bytes (decode, Triton 3.9).
    """
    at = block * stride
    if scratch_at is not None:
        there = scratch_at + (block - num_blocks) * scratch_stride
        at += (block >= num_blocks).to(tl.int64) * (there - at)
    return at


@triton.jit
def _write_kv_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr,
    slots_ptr, q_stride, k_stride, v_stride,
    k_block_stride, k_scratch_at, k_scratch_stride,
    k_scales_stride, k_scales_at, k_scales_scratch_stride,
    v_block_stride, v_scratch_at, v_scratch_stride,
    v_scales_stride, v_scales_at, v_scales_scratch_stride, num_blocks,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEAD_TILE: tl.constexpr, HALF_TILE: tl.constexpr,
    NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS_TILE: tl.constexpr, GROUP_TILE: tl.constexpr,
):  # fmt: skip
    """One program for K and V of a token, in groups that share a scale (heads, where there are no
    scales), and one for its q."""
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            group, i = tl.arange(0, GROUPS_TILE)[:, None], tl.arange(0, GROUP_TILE)[None, :]
            keep = (group < NUM_GROUPS) & (i < GROUP)
            at = group * GROUP + i  # in the row of the token
            head, d = at // HEAD_DIM, at % HEAD_DIM
            k = tl.load(k_ptr + token * k_stride + at, mask=keep, other=0.0)
            if cos_ptr is not None:
                k = _turn(k, k_ptr + token * k_stride + at, cos_ptr, sin_ptr, token, d, keep, HALF)
            v = tl.load(v_ptr + token * v_stride + at, mask=keep, other=0.0)
            inside = (head * BLOCK_SIZE + offset) * HEAD_DIM + d
            per_head: tl.constexpr = HEAD_DIM // GROUP
            row = (group // per_head * BLOCK_SIZE + offset) * per_head + group % per_head
            k_at = find_block(block, k_block_stride, k_scratch_at, k_scratch_stride, num_blocks)
            v_at = find_block(block, v_block_stride, v_scratch_at, v_scratch_stride, num_blocks)
            if k_scales_ptr is not None:
                fp8: tl.constexpr = k_cache_ptr.dtype.element_ty == tl.uint8
                k, k_scales = _quantise(k, fp8)
                v, v_scales = _quantise(v, fp8)
                k_scales_from = find_block(
                    block, k_scales_stride, k_scales_at, k_scales_scratch_stride, num_blocks
                )
                v_scales_from = find_block(
                    block, v_scales_stride, v_scales_at, v_scales_scratch_stride, num_blocks
                )
                tl.store(k_scales_ptr + k_scales_from + row, k_scales, mask=group < NUM_GROUPS)
                tl.store(v_scales_ptr + v_scales_from + row, v_scales, mask=group < NUM_GROUPS)
            tl.store(k_cache_ptr + k_at + inside, k, mask=keep)
            tl.store(v_cache_ptr + v_at + inside, v, mask=keep)
    elif q_ptr is not None:
        head, i = tl.arange(0, HEAD_TILE)[:, None], tl.arange(0, HALF_TILE)[None, :]
        keep = (head < NUM_HEADS) & (i < HALF)
        cos = tl.load(cos_ptr + token * HALF + i, mask=i < HALF, other=0.0)
        sin = tl.load(sin_ptr + token * HALF + i, mask=i < HALF, other=0.0)
        q_row = q_ptr + token * q_stride + head * HEAD_DIM + i
        first = tl.load(q_row, mask=keep, other=0.0).to(tl.float32)
        second = tl.load(q_row + HALF, mask=keep, other=0.0).to(tl.float32)
        dtype = q_ptr.dtype.element_ty
        tl.store(q_row, (first * cos - second * sin).to(dtype), mask=keep)
        tl.store(q_row + HALF, (second * cos + first * sin).to(dtype), mask=keep)


@triton.jit
def _turn(x, x_at, cos_ptr, sin_ptr, token, d, keep, HALF: tl.constexpr):
    """The rotary embedding of `x`, whose elements are dimension `d` of a head each: the partner is
    loaded once more, so that a tile may be cut anywhere."""
    turning = keep & (d < 2 * HALF)
    first = d < HALF
    partner = tl.load(x_at + tl.where(first, HALF, -HALF), mask=turning, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * HALF + d % HALF, mask=turning, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + d % HALF, mask=turning, other=0.0)
    turned = x.to(tl.float32) * cos + partner * tl.where(first, -sin, sin)
    return tl.where(turning, turned.to(x.dtype), x)


@triton.jit
def _quantise(x, FP8: tl.constexpr):
    """`quant.quantize_kv` of each row of x [groups, values]: codes, and scales [groups, 1]."""
    wide = x.to(tl.float32)
    size = tl.abs(wide)
    # A maximum may drop a NaN. The comparison is false for NaN.
    lost = tl.max((~(size <= FLOAT_MAX)).to(tl.int32), 1, keep_dims=True) > 0
    top: tl.constexpr = FP8_MAX if FP8 else 127.0
    scales = tl.div_rn(tl.max(size, 1, keep_dims=True), tl.full((1, 1), top, tl.float32))
    scales = tl.minimum(tl.maximum(scales, MIN_SCALE), MAX_SCALE).to(tl.float16)
    y = tl.div_rn(wide, tl.broadcast_to(scales.to(tl.float32), wide.shape))
    y = tl.where(lost, 0.0, tl.minimum(tl.maximum(y, -top), top))
    scales = tl.where(lost, float("nan"), scales.to(tl.float32)).to(tl.float16)
    if FP8:
        codes = _round_to_e4m3(y)
    else:  # from 2^23 on a float has no bits for a fraction: the sum is rounded, half to even
        codes = (y + 12582912.0 - 12582912.0).to(tl.int8)
    return codes, scales


@triton.jit
def _round_to_e4m3(x):
    """The bits of float8_e4m3fn nearest to x, half to even, for |x| <= 448. A card before
    capability 8.9 has no instruction for it."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # 960: 127 - 7 in the exponent
    # Below 2^-6 the codes are multiples of 2^-9, as are the floats from 2^14 to 2^15.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    return (code | (bits >> 24 & 0x80)).to(tl.uint8)
