"""The Triton backend of attention: launches decode (split KV and merge) and prefill of chunks.

Writing to the cache is in `kv_write.py`. Imported only where it runs: on a GPU, or in Triton's
interpreter on CPU tensors. The parameters mean what they mean in `kernels/attention.py`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from penstock.kernels.triton import attention_kernels as programs
from penstock.kernels.triton.kv_write import find_blocks, rope_write_kv, scales_of, write_kv
from penstock.kernels.types import DecodeBatch, PagedKv, PrefillBatch, Rolling

__all__ = ["decode_attention", "prefill_attention", "rope_write_kv", "write_kv"]

# Keys of a decode program, and of a piece of a sum in prefill. Fixed, so that a sequence's result
# depends neither on its batch-mates nor on the kernel; small, so that one sequence of 1,000 tokens
# and 8 kv heads already makes 32 programs.
SPLIT = 256


def decode_attention(
    q: Tensor, kv: PagedKv, batch: DecodeBatch, scale: float, window: int | None, out: Tensor,
    rolling: Rolling | None = None, softcap: float = 0.0, sink_scores: Tensor | None = None,
) -> Tensor:  # fmt: skip
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.k.shape[1:3]
    if not num_rows:
        return out
    tables, lens = batch.block_tables, batch.context_lens
    num_splits = _num_splits(batch.max_context_len, window, rolling)
    group = num_heads // num_kv_heads
    shape = (num_rows, num_heads, num_splits)
    partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((2, *shape), dtype=torch.float32, device=q.device)  # top, total
    dim_tile = max(16, triton.next_power_of_2(head_dim))
    least_rows = _least_rows(q)
    q_sink, q_sink_stride, sink_ends, window_starts, sink_blocks, bases = _rolled(rolling)
    k_cache, v_cache = _readable(kv.k), _readable(kv.v)
    programs._decode_kernel[(num_rows, num_kv_heads, num_splits)](
        q, q_sink, k_cache, v_cache, tables, lens,
        sink_ends, window_starts, sink_blocks, bases, partial, stats[0], stats[1],
        *scales_of(kv), q.stride(0), q_sink_stride,
        *find_blocks(kv),
        tables.stride(0), scale, softcap or None, window or 0, num_splits,
        NUM_HEADS=num_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        ROWS=max(least_rows, triton.next_power_of_2(group)), DIM_TILE=dim_tile,
        KEY_TILE=_key_tile(q, dim_tile), SPLIT_KEYS=SPLIT, **_groups(kv, head_dim, dim_tile),
        num_warps=4, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    programs._merge_kernel[(num_rows, num_heads)](
        partial, stats[0], stats[1], lens, sink_ends, window_starts, sink_scores, out,
        window or 0, num_splits,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, DIM_TILE=dim_tile, SPLIT_KEYS=SPLIT, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def prefill_attention(
    q: Tensor, kv: PagedKv, batch: PrefillBatch, scale: float, window: int | None, out: Tensor,
    rolling: Rolling | None = None, softcap: float = 0.0, sink_scores: Tensor | None = None,
) -> Tensor:  # fmt: skip
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv.k.shape[1:3]
    tables, starts, lens = batch.block_tables, batch.query_starts, batch.context_lens
    num_chunks, max_query_len = lens.shape[0], batch.max_query_len
    if not num_chunks or not max_query_len:
        return out
    dim_tile = max(16, triton.next_power_of_2(head_dim))
    # As wide as registers allow without a spill (looked up in the cubins for sm_80 and sm_90), but
    # a prompt of a few tokens needs no wide tile.
    widest = 32 if q.element_size() == 4 else 128 if dim_tile <= 128 else 64
    query_tile = max(_least_rows(q), min(widest, triton.next_power_of_2(max_query_len)))
    q_sink, q_sink_stride, *rolled = _rolled(rolling)
    k_cache, v_cache = _readable(kv.k), _readable(kv.v)
    programs._prefill_kernel[(triton.cdiv(max_query_len, query_tile), num_heads, num_chunks)](
        q, q_sink, k_cache, v_cache, tables, starts, lens, *rolled, sink_scores, out,
        *scales_of(kv), q.stride(0), q_sink_stride,
        *find_blocks(kv),
        tables.stride(0), scale, softcap or None, window or 0,
        NUM_HEADS=num_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size, QUERY_TILE=query_tile, DIM_TILE=dim_tile,
        KEY_TILE=_key_tile(q, dim_tile), SPLIT_KEYS=SPLIT, **_groups(kv, head_dim, dim_tile),
        num_warps=8 if query_tile == 128 else 4, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _num_splits(max_context_len: int, window: int | None, rolling: Rolling | None) -> int:
    """Decode programs a row and head: those that the longest visible window can touch."""
    longest = max_context_len
    for visible in (window, None if rolling is None else rolling.max_visible_len):
        if visible is not None:
            # What does not begin at 0 may straddle one split more than its length fills.
            longest = min(longest, visible + SPLIT - 1)
    return triton.cdiv(longest, SPLIT) + (rolling is not None)  # and one for the sinks


def _rolled(rolling: Rolling | None) -> tuple[Tensor | int | None, ...]:
    """q_sink, its row stride, and the integers. None is a constant to the compiler."""
    if rolling is None:
        return None, 0, None, None, None, None
    return (
        rolling.q_sink, rolling.q_sink.stride(0), rolling.sink_ends, rolling.window_starts,
        rolling.sink_blocks, rolling.bases,
    )  # fmt: skip


def _groups(kv: PagedKv, head_dim: int, dim_tile: int) -> dict[str, int]:
    """Scales a key has, and the groups that fill the tile."""
    if kv.scales is None:
        return {"GROUPS": 0, "GROUPS_TILE": 1}
    groups = kv.scales.k.shape[3]
    tile = 1 if groups == 1 else dim_tile // (head_dim // groups)
    assert tile * (head_dim // groups) == dim_tile or groups == 1, "a group is a power of two"
    return {"GROUPS": groups, "GROUPS_TILE": tile}


def _readable(cache: Tensor) -> Tensor:
    """fp8 as its bits, where the card has no instruction for it."""
    if cache.dtype != torch.float8_e4m3fn or not cache.is_cuda:
        return cache
    return cache if torch.cuda.get_device_capability() >= (8, 9) else cache.view(torch.uint8)


def _key_tile(q: Tensor, dim_tile: int) -> int:
    """Keys a tile holds, so that a stage of K and V fits into 32 KiB of shared memory."""
    row_bytes = dim_tile * q.element_size()
    return 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16


def _least_rows(q: Tensor) -> int:
    """Rows of the smallest tile. From Hopper to the Blackwell of data centres 16-bit tiles of 64
    rows and fewer go through different instructions, whose sums may differ: none is smaller."""
    if q.is_cuda and q.element_size() == 2 and torch.cuda.get_device_capability()[0] in (9, 10):
        return 64
    return 16
