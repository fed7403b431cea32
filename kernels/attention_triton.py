"""The Triton kernels of `attention.py`: write, decode with split-KV and a merge, varlen prefill.

Knows pointers, strides and tiles. Imported only where it runs: on a GPU, or in Triton's interpreter
on CPU tensors. Shapes and meaning of the arguments are those of `attention.py`.
"""

# Parameters of a kernel are pointers and constants, which Python types do not tell apart.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Keys of one decode program. Fixed, so that a sequence's result does not depend on its batch-mates;
# small, so that one sequence of 1,000 tokens and 8 kv heads already makes 32 programs.
SPLIT = 256
LOG2_E = tl.constexpr(1.4426950408889634)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    num_tokens, num_kv_heads, head_dim = k.shape
    if not num_tokens:
        return
    _write_kv_kernel[(num_tokens,)](
        k, v, k_cache, v_cache, slots,
        k.stride(0), v.stride(0), k_cache.stride(0), v_cache.stride(0),
        BLOCK_SIZE=k_cache.shape[2], HEAD_DIM=head_dim, WIDTH=num_kv_heads * head_dim,
        TILE=triton.next_power_of_2(num_kv_heads * head_dim),
    )  # fmt: skip


def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor,
    scale: float, window: int | None, max_context_len: int, out: Tensor,
) -> Tensor:  # fmt: skip
    batch, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    if not batch:
        return out
    # A window may straddle one split more than its length fills.
    longest = max_context_len if window is None else min(max_context_len, window + SPLIT - 1)
    num_splits = triton.cdiv(longest, SPLIT)
    group = num_heads // num_kv_heads
    shape = (batch, num_heads, num_splits)
    partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((2, *shape), dtype=torch.float32, device=q.device)  # top, total
    dim_tile = max(16, triton.next_power_of_2(head_dim))
    _decode_kernel[(batch, num_kv_heads, num_splits)](
        q, k_cache, v_cache, block_tables, context_lens, partial, stats[0], stats[1],
        q.stride(0), k_cache.stride(0), v_cache.stride(0), block_tables.stride(0),
        scale, window or 0, num_splits,
        NUM_HEADS=num_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        ROWS=max(16, triton.next_power_of_2(group)), DIM_TILE=dim_tile,
        KEY_TILE=_key_tile(q, dim_tile), SPLIT_KEYS=SPLIT,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    _merge_kernel[(batch, num_heads)](
        partial, stats[0], stats[1], context_lens, out, window or 0, num_splits,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, DIM_TILE=dim_tile, SPLIT_KEYS=SPLIT, num_warps=1,
    )  # fmt: skip
    return out


def prefill_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, query_starts: Tensor,
    context_lens: Tensor, scale: float, window: int | None, max_query_len: int, out: Tensor,
) -> Tensor:  # fmt: skip
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = k_cache.shape[1:3]
    batch = context_lens.shape[0]
    if not batch or not max_query_len:
        return out
    dim_tile = max(16, triton.next_power_of_2(head_dim))
    # As wide as registers allow without a spill (looked up in the cubins for sm_80 and sm_90), but
    # a prompt of a few tokens needs no wide tile.
    widest = 32 if q.element_size() == 4 else 128 if dim_tile <= 128 else 64
    query_tile = max(16, min(widest, triton.next_power_of_2(max_query_len)))
    _prefill_kernel[(triton.cdiv(max_query_len, query_tile), num_heads, batch)](
        q, k_cache, v_cache, block_tables, query_starts, context_lens, out,
        q.stride(0), k_cache.stride(0), v_cache.stride(0), block_tables.stride(0),
        scale, window or 0,
        NUM_HEADS=num_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size, QUERY_TILE=query_tile, DIM_TILE=dim_tile,
        KEY_TILE=_key_tile(q, dim_tile),
        num_warps=8 if query_tile == 128 else 4, num_stages=2,
    )  # fmt: skip
    return out


def _key_tile(q: Tensor, dim_tile: int) -> int:
    """Keys a tile holds, so that a stage of K and V fits into 32 KiB of shared memory."""
    row_bytes = dim_tile * q.element_size()
    return 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16


@triton.jit
def _write_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
    k_stride, v_stride, k_block_stride, v_block_stride,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program a token, all its heads. Not yet run on a GPU."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        i = tl.arange(0, TILE)
        keep = i < WIDTH
        inside = (i // HEAD_DIM * BLOCK_SIZE + offset) * HEAD_DIM + i % HEAD_DIM
        k = tl.load(k_ptr + token * k_stride + i, mask=keep)
        v = tl.load(v_ptr + token * v_stride + i, mask=keep)
        tl.store(k_cache_ptr + block * k_block_stride + inside, k, mask=keep)
        tl.store(v_cache_ptr + block * v_block_stride + inside, v, mask=keep)


@triton.jit
def _load_keys(
    k_ptr, v_ptr, table_ptr, head, at, seen, dims, k_block_stride, v_block_stride,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """K and V [keys, dims] at positions `at`; 0 where not `seen`, since 0 x NaN is NaN."""
    block = tl.load(table_ptr + at // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    inside = (head * BLOCK_SIZE + at % BLOCK_SIZE) * HEAD_DIM
    mask = seen[:, None] & (dims < HEAD_DIM)[None, :]
    k_at = (block * k_block_stride + inside)[:, None] + dims[None, :]
    v_at = (block * v_block_stride + inside)[:, None] + dims[None, :]
    return tl.load(k_ptr + k_at, mask=mask, other=0.0), tl.load(v_ptr + v_at, mask=mask, other=0.0)


@triton.jit
def _soften(scores, visible, top, total, acc, v):
    """One step of the online softmax in base 2; rows that see nothing stay as they are."""
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * keep + tl.sum(weights, 1)
    acc = acc * keep[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, partial_ptr, top_ptr, total_ptr,
    q_stride, k_block_stride, v_block_stride, table_stride,
    scale, window, num_splits,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, DIM_TILE: tl.constexpr, KEY_TILE: tl.constexpr, SPLIT_KEYS: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, kv head, split): all query heads of the group, padded to ROWS.

    Leaves unnormalised sums and softmax statistics. Splits stand at multiples of SPLIT_KEYS.
    Not yet run on a GPU.
    """
    b, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context_len = tl.load(lens_ptr + b)
    oldest = tl.where(window > 0, tl.maximum(context_len - window, 0), 0)
    first = (oldest // SPLIT_KEYS + split) * SPLIT_KEYS
    begin, end = tl.maximum(first, oldest), tl.minimum(first + SPLIT_KEYS, context_len)
    if begin < end:
        rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM_TILE)
        row_head = head * GROUP + rows
        mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        q_at = b * q_stride + (row_head * HEAD_DIM)[:, None] + dims[None, :]
        q = tl.load(q_ptr + q_at, mask=mask, other=0.0)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, DIM_TILE), tl.float32)
        for start in range(first, end, KEY_TILE):
            at = start + tl.arange(0, KEY_TILE)
            seen = (at >= begin) & (at < end)
            k, v = _load_keys(
                k_ptr, v_ptr, tables_ptr + b * table_stride, head, at, seen, dims,
                k_block_stride, v_block_stride, HEAD_DIM, BLOCK_SIZE,
            )  # fmt: skip
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
            top, total, acc = _soften(scores, seen[None, :], top, total, acc, v)
        out_at = (b * NUM_HEADS + row_head) * num_splits + split
        tl.store(partial_ptr + (out_at * HEAD_DIM)[:, None] + dims[None, :], acc, mask=mask)
        tl.store(top_ptr + out_at, top, mask=rows < GROUP)
        tl.store(total_ptr + out_at, total, mask=rows < GROUP)


@triton.jit
def _merge_kernel(
    partial_ptr, top_ptr, total_ptr, lens_ptr, out_ptr, window, num_splits,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, head): the splits that hold keys, in their order.

    Not yet run on a GPU.
    """
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, DIM_TILE)
    context_len = tl.load(lens_ptr + b)
    oldest = tl.where(window > 0, tl.maximum(context_len - window, 0), 0)
    filled = tl.cdiv(context_len, SPLIT_KEYS) - oldest // SPLIT_KEYS
    row = (b * NUM_HEADS + head) * num_splits
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((DIM_TILE,), tl.float32)
    for split in range(0, filled):
        split_top = tl.load(top_ptr + row + split)
        new_top = tl.maximum(top, split_top)
        keep, weight = tl.exp2(top - new_top), tl.exp2(split_top - new_top)
        part = tl.load(
            partial_ptr + (row + split) * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0
        )
        acc = acc * keep + part * weight
        total = total * keep + tl.load(total_ptr + row + split) * weight
        top = new_top
    total = tl.where(filled > 0, total, 1.0)
    at = (b * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(out_ptr + at, (acc / total).to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, starts_ptr, lens_ptr, out_ptr,
    q_stride, k_block_stride, v_block_stride, table_stride,
    scale, window,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERY_TILE: tl.constexpr, DIM_TILE: tl.constexpr, KEY_TILE: tl.constexpr,
):  # fmt: skip
    """One program a (query tile, head, sequence), after FlashAttention-2. Not yet run on a GPU."""
    tile, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row0 = tl.load(starts_ptr + b)
    num_queries = tl.load(starts_ptr + b + 1) - row0
    first = tile * QUERY_TILE
    if first < num_queries:
        offset = tl.load(lens_ptr + b) - num_queries
        i, dims = first + tl.arange(0, QUERY_TILE), tl.arange(0, DIM_TILE)
        row, query_at = (row0 + i).to(tl.int64), offset + i
        mask = (i < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
        q_at = (row * q_stride + head * HEAD_DIM)[:, None] + dims[None, :]
        q = tl.load(q_ptr + q_at, mask=mask, other=0.0)
        top = tl.full((QUERY_TILE,), float("-inf"), tl.float32)
        total = tl.zeros((QUERY_TILE,), tl.float32)
        acc = tl.zeros((QUERY_TILE, DIM_TILE), tl.float32)
        end = offset + tl.minimum(first + QUERY_TILE, num_queries)
        oldest = tl.where(window > 0, tl.maximum(offset + first - window + 1, 0), 0)
        for start in range(oldest // KEY_TILE * KEY_TILE, end, KEY_TILE):
            at = start + tl.arange(0, KEY_TILE)
            seen = (at >= oldest) & (at < end)
            k, v = _load_keys(
                k_ptr, v_ptr, tables_ptr + b * table_stride, head // GROUP, at, seen, dims,
                k_block_stride, v_block_stride, HEAD_DIM, BLOCK_SIZE,
            )  # fmt: skip
            reach = tl.where(window > 0, window, end)
            distance = query_at[:, None] - at[None, :]
            visible = seen[None, :] & (distance >= 0) & (distance < reach)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
            top, total, acc = _soften(scores, visible, top, total, acc, v)
        total = tl.where(total == 0, 1.0, total)  # rows past the chunk
        out_at = (row * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
        y = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_at, y, mask=mask)
