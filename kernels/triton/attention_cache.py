"""How the Triton kernels of attention read the cache: which slots, what is stored there, and the
products with it; the scales of a quantised cache are applied on the way.

A `side` is all of K, or all of V: the cache, its block stride, where scratch lies and its block
stride; then the same of the scales. GROUPS is how many scales a key has, 0 in a cache that is not
quantised; GROUPS_TILE the number that fills a row.
"""

# Parameters of a kernel are pointers and constants, which Python types do not tell apart.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.kv_write import find_block


@triton.jit
def find_slots(table_ptr, head, at, seen, sink_pages, base, BLOCK_SIZE: tl.constexpr):
    """Of the keys at positions `at`: the block, and the row inside it."""
    page = at // BLOCK_SIZE
    entry = tl.where(page < sink_pages, page, page - base)
    block = tl.load(table_ptr + entry, mask=seen, other=0).to(tl.int64)
    return block, head * BLOCK_SIZE + at % BLOCK_SIZE


@triton.jit
def _load_stored(side, block, row, seen, dims, num_blocks, HEAD_DIM: tl.constexpr):
    """K or V [keys, dims] as it is stored; 0 where not `seen`, since 0 x NaN is NaN."""
    ptr, stride, scratch_at, scratch_stride, _, _, _, _ = side
    at = find_block(block, stride, scratch_at, scratch_stride, num_blocks) + row * HEAD_DIM
    mask = seen[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(ptr + at[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _load_scales(
    side, block, row, seen, num_blocks, GROUPS: tl.constexpr, GROUPS_TILE: tl.constexpr
):
    """[keys, groups] in fp32; 0 where not `seen`, as above."""
    _, _, _, _, ptr, stride, scratch_at, scratch_stride = side
    group = tl.arange(0, GROUPS_TILE)
    at = find_block(block, stride, scratch_at, scratch_stride, num_blocks) + row * GROUPS
    mask = seen[:, None] & (group < GROUPS)[None, :]
    return tl.load(ptr + at[:, None] + group[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _widen(codes):
    """fp32. uint8 holds the bits of fp8 (on a card without fp8 instructions): those of an fp16 but
    for a factor of 2^8, subnormals included. The code of NaN is never stored."""
    if codes.dtype == tl.uint8:
        bits = codes.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        wide = half.to(tl.float32) * 256.0
    else:
        wide = codes.to(tl.float32)
    return wide


@triton.jit
def score(
    q, side, block, row, seen, dims, num_blocks,
    HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, GROUPS_TILE: tl.constexpr,
):  # fmt: skip
    """q . k [rows, keys]. A scale that is the key's only one multiplies the product."""
    k = _load_stored(side, block, row, seen, dims, num_blocks, HEAD_DIM)
    if GROUPS > 1:
        k = _dequantise(k, _load_scales(side, block, row, seen, num_blocks, GROUPS, GROUPS_TILE))
    elif GROUPS == 1:
        k = _widen(k)
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if GROUPS == 1:
        scales = _load_scales(side, block, row, seen, num_blocks, GROUPS, GROUPS_TILE)
        scores *= tl.trans(scales)
    return scores


@triton.jit
def load_values(
    side, block, row, seen, dims, num_blocks, dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, GROUPS_TILE: tl.constexpr,
):  # fmt: skip
    v = _load_stored(side, block, row, seen, dims, num_blocks, HEAD_DIM)
    if GROUPS > 0:
        scales = _load_scales(side, block, row, seen, num_blocks, GROUPS, GROUPS_TILE)
        v = _dequantise(v, scales).to(dtype)
    return v


@triton.jit
def _dequantise(codes, scales):
    """codes [keys, dims] x scales [keys, groups]: fp32 [keys, dims]"""
    keys: tl.constexpr = codes.shape[0]
    groups: tl.constexpr = scales.shape[1]
    split = _widen(codes).reshape(keys, groups, codes.shape[1] // groups)
    return (split * scales[:, :, None]).reshape(keys, codes.shape[1])
