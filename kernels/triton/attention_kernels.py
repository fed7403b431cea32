"""The Triton kernels that `attention.py` launches, and the steps that they share.

Parameters of `rolling`, `scratch` or `scales` are None where these are None, and so is a soft cap
of 0: the compiler then omits the code that uses them.
"""

# Parameters of a kernel are pointers and constants, which Python types do not tell apart.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.attention_cache import find_slots, load_values, score
from penstock.kernels.triton.attention_order import (
    add_sink,
    capped,
    merge,
    nothing_seen,
    soften,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _pages(sink_blocks_ptr, bases_ptr, b):
    """How many table entries are sinks, and how many pages were dropped after them."""
    sink_pages, base = 0, 0
    if bases_ptr is not None:
        sink_pages, base = tl.load(sink_blocks_ptr + b), tl.load(bases_ptr + b)
    return sink_pages, base


@triton.jit
def _seen_by_decode(lens_ptr, sink_ends_ptr, window_starts_ptr, b, window):
    """What row b sees: keys before `sink_end`, and those in [oldest, context_len)."""
    context_len = tl.load(lens_ptr + b)
    oldest = tl.where(window > 0, tl.maximum(context_len - window, 0), 0)
    sink_end = 0
    if sink_ends_ptr is not None:
        sink_end = tl.minimum(tl.load(sink_ends_ptr + b), context_len)
        oldest = tl.maximum(oldest, tl.load(window_starts_ptr + b))
    return sink_end, oldest, context_len


@triton.jit
def _decode_kernel(
    q_ptr, q_sink_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr,
    sink_ends_ptr, window_starts_ptr, sink_blocks_ptr, bases_ptr, partial_ptr, top_ptr, total_ptr,
    k_scales_ptr, v_scales_ptr, q_stride, q_sink_stride,
    k_block_stride, k_scratch_at, k_scratch_stride,
    k_scales_stride, k_scales_at, k_scales_scratch_stride,
    v_block_stride, v_scratch_at, v_scratch_stride,
    v_scales_stride, v_scales_at, v_scales_scratch_stride, num_blocks,
    table_stride, scale, softcap, window, num_splits,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, DIM_TILE: tl.constexpr, KEY_TILE: tl.constexpr, SPLIT_KEYS: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_TILE: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, kv head, split): all query heads of the group, padded to ROWS.

    Leaves unnormalised sums and softmax statistics. Splits stand at multiples of SPLIT_KEYS; where
    contexts may be rolled, split 0 is the sinks of each, and the others follow.
    """
    b, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    sink_end, oldest, context_len = _seen_by_decode(
        lens_ptr, sink_ends_ptr, window_starts_ptr, b, window
    )
    if q_sink_ptr is None:
        first = (oldest // SPLIT_KEYS + split) * SPLIT_KEYS
        begin, end = tl.maximum(first, oldest), tl.minimum(first + SPLIT_KEYS, context_len)
    else:
        first = (oldest // SPLIT_KEYS + split - 1) * SPLIT_KEYS
        begin = tl.where(split == 0, 0, tl.maximum(first, oldest))
        end = tl.where(split == 0, sink_end, tl.minimum(first + SPLIT_KEYS, context_len))
        first = begin // KEY_TILE * KEY_TILE
    if begin < end:
        keys = (
            k_ptr, k_block_stride, k_scratch_at, k_scratch_stride,
            k_scales_ptr, k_scales_stride, k_scales_at, k_scales_scratch_stride,
        )  # fmt: skip
        values = (
            v_ptr, v_block_stride, v_scratch_at, v_scratch_stride,
            v_scales_ptr, v_scales_stride, v_scales_at, v_scales_scratch_stride,
        )  # fmt: skip
        rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM_TILE)
        row_head = head * GROUP + rows
        mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        q_at = (row_head * HEAD_DIM)[:, None] + dims[None, :]
        q_row = q_ptr + b * q_stride
        if q_sink_ptr is not None:
            q_row = tl.where(split == 0, q_sink_ptr + b * q_sink_stride, q_row)
        q = tl.load(q_row + q_at, mask=mask, other=0.0)
        sink_pages, base = _pages(sink_blocks_ptr, bases_ptr, b)
        top, total, acc = nothing_seen(ROWS, DIM_TILE)
        for start in range(first, end, KEY_TILE):
            at = start + tl.arange(0, KEY_TILE)
            seen = (at >= begin) & (at < end)
            block, row = find_slots(
                tables_ptr + b * table_stride, head, at, seen, sink_pages, base, BLOCK_SIZE
            )
            scores = score(
                q, keys, block, row, seen, dims, num_blocks, HEAD_DIM, GROUPS, GROUPS_TILE
            )
            v = load_values(
                values, block, row, seen, dims, num_blocks, q.dtype, HEAD_DIM, GROUPS, GROUPS_TILE
            )
            scores = capped(scores, scale, softcap)
            top, total, acc = soften(scores, seen[None, :], scale * LOG2_E, top, total, acc, v)
        out_at = (b * NUM_HEADS + row_head) * num_splits + split
        tl.store(partial_ptr + (out_at * HEAD_DIM)[:, None] + dims[None, :], acc, mask=mask)
        tl.store(top_ptr + out_at, top, mask=rows < GROUP)
        tl.store(total_ptr + out_at, total, mask=rows < GROUP)


@triton.jit
def _merge_kernel(
    partial_ptr, top_ptr, total_ptr, lens_ptr, sink_ends_ptr, window_starts_ptr, sink_scores_ptr,
    out_ptr,
    window, num_splits,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, head): the splits that hold keys, in their order."""
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, DIM_TILE)
    sink_end, oldest, context_len = _seen_by_decode(
        lens_ptr, sink_ends_ptr, window_starts_ptr, b, window
    )
    filled = tl.cdiv(context_len, SPLIT_KEYS) - oldest // SPLIT_KEYS
    begin, end = 0, filled
    if sink_ends_ptr is not None:  # split 0 is the sinks
        begin = tl.where(sink_end > 0, 0, 1)
        end = tl.where(oldest < context_len, filled, 0) + 1
    row = (b * NUM_HEADS + head) * num_splits
    one, mask = tl.zeros((1,), tl.int64), (dims < HEAD_DIM)[None, :]
    top, total, acc = nothing_seen(1, DIM_TILE)
    for split in range(begin, end):
        at = row + split + one
        part = tl.load(partial_ptr + (at * HEAD_DIM)[:, None] + dims[None, :], mask=mask, other=0.0)
        top, total, acc = merge(
            top, total, acc, tl.load(top_ptr + at), tl.load(total_ptr + at), part
        )
    if sink_scores_ptr is not None:
        sink = tl.load(sink_scores_ptr + head) * LOG2_E
        total, acc = add_sink(top, total, acc, sink)
    total = tl.where(begin < end, total, 1.0)
    at = ((b * NUM_HEADS + head + one) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _attend(
    q, first, end, row_begin, row_end, top, total, acc, keys, values,
    table_ptr, head, dims, sink_pages, base, num_blocks, scale, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEY_TILE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_TILE: tl.constexpr,
):  # fmt: skip
    """A tile of queries over the keys [first, end), merged with what it had seen before them; a row
    sees those in [row_begin, row_end). Pieces end at multiples of SPLIT_KEYS; 0: it is one."""
    part_top, part_total, part = nothing_seen(q.shape[0], q.shape[1])
    for start in range(first // KEY_TILE * KEY_TILE, end, KEY_TILE):
        at = start + tl.arange(0, KEY_TILE)
        seen = (at >= first) & (at < end)
        block, row = find_slots(table_ptr, head, at, seen, sink_pages, base, BLOCK_SIZE)
        scores = score(q, keys, block, row, seen, dims, num_blocks, HEAD_DIM, GROUPS, GROUPS_TILE)
        v = load_values(
            values, block, row, seen, dims, num_blocks, q.dtype, HEAD_DIM, GROUPS, GROUPS_TILE
        )
        visible = (at[None, :] >= row_begin[:, None]) & (at[None, :] < row_end[:, None])
        scores = capped(scores, scale, softcap)
        part_top, part_total, part = soften(
            scores, visible, scale * LOG2_E, part_top, part_total, part, v
        )
        if SPLIT_KEYS > 0:  # noqa: SIM102  # `and` would evaluate both
            if (start + KEY_TILE) % SPLIT_KEYS == 0:
                top, total, acc = merge(top, total, acc, part_top, part_total, part)
                part_top, part_total, part = nothing_seen(q.shape[0], q.shape[1])
    return merge(top, total, acc, part_top, part_total, part)


@triton.jit
def _prefill_kernel(
    q_ptr, q_sink_ptr, k_ptr, v_ptr, tables_ptr, starts_ptr, lens_ptr,
    sink_ends_ptr, window_starts_ptr, sink_blocks_ptr, bases_ptr, sink_scores_ptr, out_ptr,
    k_scales_ptr, v_scales_ptr, q_stride, q_sink_stride,
    k_block_stride, k_scratch_at, k_scratch_stride,
    k_scales_stride, k_scales_at, k_scales_scratch_stride,
    v_block_stride, v_scratch_at, v_scratch_stride,
    v_scales_stride, v_scales_at, v_scales_scratch_stride, num_blocks,
    table_stride, scale, softcap, window,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERY_TILE: tl.constexpr, DIM_TILE: tl.constexpr, KEY_TILE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_TILE: tl.constexpr,
):  # fmt: skip
    """One program a (query tile, head, sequence), after FlashAttention-2: sinks, then window, in
    the pieces of `_decode_kernel`."""
    tile, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row0 = tl.load(starts_ptr + b)
    num_queries = tl.load(starts_ptr + b + 1) - row0
    first = tile * QUERY_TILE
    if first < num_queries:
        keys = (
            k_ptr, k_block_stride, k_scratch_at, k_scratch_stride,
            k_scales_ptr, k_scales_stride, k_scales_at, k_scales_scratch_stride,
        )  # fmt: skip
        values = (
            v_ptr, v_block_stride, v_scratch_at, v_scratch_stride,
            v_scales_ptr, v_scales_stride, v_scales_at, v_scales_scratch_stride,
        )  # fmt: skip
        offset = tl.load(lens_ptr + b) - num_queries
        i, dims = first + tl.arange(0, QUERY_TILE), tl.arange(0, DIM_TILE)
        row, kept = (row0 + i).to(tl.int64), i < num_queries
        mask = kept[:, None] & (dims < HEAD_DIM)[None, :]
        top, total, acc = nothing_seen(QUERY_TILE, DIM_TILE)
        table_ptr, kv_head = tables_ptr + b * table_stride, head // GROUP
        sink_pages, base = _pages(sink_blocks_ptr, bases_ptr, b)
        row_end = tl.where(kept, offset + i + 1, 0)  # a row past the chunk sees nothing
        row_begin = tl.where(window > 0, tl.maximum(row_end - window, 0), 0)
        end = offset + tl.minimum(first + QUERY_TILE, num_queries)
        oldest = tl.where(window > 0, tl.maximum(offset + first - window + 1, 0), 0)
        if q_sink_ptr is not None:
            sink_end = tl.minimum(tl.load(sink_ends_ptr + row, mask=kept, other=0), row_end)
            q_at = (row * q_sink_stride + head * HEAD_DIM)[:, None] + dims[None, :]
            q_sink = tl.load(q_sink_ptr + q_at, mask=mask, other=0.0)
            top, total, acc = _attend(
                q_sink, 0, tl.max(sink_end, 0), tl.zeros_like(sink_end), sink_end, top, total, acc,
                keys, values, table_ptr, kv_head, dims, sink_pages, base, num_blocks, scale,
                softcap, HEAD_DIM, BLOCK_SIZE, KEY_TILE, 0, GROUPS, GROUPS_TILE,
            )  # fmt: skip
            starts = tl.load(window_starts_ptr + row, mask=kept, other=0)
            row_begin = tl.maximum(row_begin, starts)
            oldest = tl.min(tl.where(kept, row_begin, end), 0)
        q_at = (row * q_stride + head * HEAD_DIM)[:, None] + dims[None, :]
        q = tl.load(q_ptr + q_at, mask=mask, other=0.0)
        top, total, acc = _attend(
            q, oldest, end, row_begin, row_end, top, total, acc,
            keys, values, table_ptr, kv_head, dims, sink_pages, base, num_blocks, scale, softcap,
            HEAD_DIM, BLOCK_SIZE, KEY_TILE, SPLIT_KEYS, GROUPS, GROUPS_TILE,
        )  # fmt: skip
        if sink_scores_ptr is not None:
            sink = tl.load(sink_scores_ptr + head) * LOG2_E
            total, acc = add_sink(top, total, acc, sink)
        total = tl.where(total == 0, 1.0, total)  # rows past the chunk
        out_at = (row * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
        y = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_at, y, mask=mask)
