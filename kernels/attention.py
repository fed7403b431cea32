"""Attention over a paged KV cache: write, decode (one query a sequence), prefill (query chunks).

Knows tensors, block tables and lengths; nothing of sequences, schedulers or models.
On a GPU Triton runs, on a CPU the native library, else plain PyTorch.

k_cache, v_cache are [num_blocks, num_kv_heads, block_size, head_dim] views with any stride over the
blocks and dense blocks. A token's slot is block_id * block_size + offset. A table entry past the
context, and a slot that nobody has written, may hold anything: neither is ever read.
"""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from penstock.kernels import native

_ATTENTION = struct.Struct("17qd2q")
_WRITE = struct.Struct("15q")


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store `k`, `v` [T, KV, D] at `slots` int64 [T]; a negative slot is skipped.

    k and v may be views of one fused projection (any stride over T), in the dtype of the cache.
    """
    assert native.rows_are_dense(k) and native.rows_are_dense(v)
    assert k.dtype == v.dtype == k_cache.dtype == v_cache.dtype and slots.dtype == torch.int64
    if k.is_cuda:
        from penstock.kernels import attention_triton

        attention_triton.write_kv(k, v, k_cache, v_cache, slots)
        return
    lib = native.usable(k)
    if lib is not None:
        _native_write_kv(lib, k, v, k_cache, v_cache, slots)
    else:
        _torch_write_kv(k, v, k_cache, v_cache, slots)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    max_context_len: int,
    out: Tensor | None = None,
) -> Tensor:
    """One query a sequence over its blocks: `q` [B, H, D] -> [B, H, D], written to `out` if given.

    `block_tables` int32 [B, max_blocks]; `context_lens` int32 [B], the current token included;
    `window`: only the last so many tokens are seen. `max_context_len` >= every length (it sizes the
    launch on a GPU). Long contexts are split over programs or threads and merged, as FlashDecoding
    does. The splits stand at fixed positions of the context, so that on the CPU a row has the same
    bits whatever the batch and the number of threads.
    """
    out = _prepare(q, k_cache, v_cache, block_tables, context_lens, out)
    if q.is_cuda:
        from penstock.kernels import attention_triton

        return attention_triton.decode_attention(
            q, k_cache, v_cache, block_tables, context_lens, scale, window, max_context_len, out
        )
    run = _torch_decode if native.usable(q) is None else _native_decode
    return run(q, k_cache, v_cache, block_tables, context_lens, scale, window, out)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    max_query_len: int,
    max_context_len: int,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of flat query chunks over blocks: `q` [T, H, D] -> [T, H, D].

    Chunk b is rows [query_starts[b], query_starts[b+1]) of q (int32 [B+1]) and ends at position
    context_lens[b] (int32 [B]); its own K and V are in the cache already. A query at position t
    sees keys in (t - window, t]. `max_query_len` and `max_context_len` bound the lengths. Online
    softmax over key tiles, as in FlashAttention-2. On the CPU the tiles stand at fixed positions of
    the context, so that a row has the same bits however its prompt is cut into chunks.
    """
    out = _prepare(q, k_cache, v_cache, block_tables, context_lens, out)
    if q.is_cuda:
        from penstock.kernels import attention_triton

        return attention_triton.prefill_attention(
            q, k_cache, v_cache, block_tables, query_starts, context_lens, scale, window,
            max_query_len, out,
        )  # fmt: skip
    run = _torch_prefill if native.usable(q) is None else _native_prefill
    return run(q, k_cache, v_cache, block_tables, query_starts, context_lens, scale, window, out)


def _prepare(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, lens: Tensor, out: Tensor | None
) -> Tensor:
    """Check what the kernels rely on, and give the tensor to write."""
    assert native.rows_are_dense(q) and q.dtype == k_cache.dtype == v_cache.dtype
    assert tables.dtype == lens.dtype == torch.int32 and tables.stride(1) == 1
    if out is None:
        return q.new_empty(q.shape)
    assert out.shape == q.shape and out.is_contiguous() and out.dtype == q.dtype
    return out


def _native_write_kv(
    lib: ctypes.CDLL, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> None:
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    lib.ps_write_kv(_WRITE.pack(
        native.DTYPES[k.dtype], k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0),
        k_cache.data_ptr(), v_cache.data_ptr(), k_cache.stride(0), v_cache.stride(0), block_size,
        head_dim, slots.data_ptr(), slots.shape[0], num_kv_heads, torch.get_num_threads(),
    ))  # fmt: skip


def _native_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, lens: Tensor, scale: float,
    window: int | None, out: Tensor,
) -> Tensor:  # fmt: skip
    lib = native.library()
    assert lib is not None
    lib.ps_decode(_attention_arguments(q, k_cache, v_cache, tables, 0, lens, scale, window, out))
    return out


def _native_prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, starts: Tensor, lens: Tensor,
    scale: float, window: int | None, out: Tensor,
) -> Tensor:  # fmt: skip
    lib = native.library()
    assert lib is not None and starts.dtype == torch.int32
    lib.ps_prefill(
        _attention_arguments(
            q, k_cache, v_cache, tables, starts.data_ptr(), lens, scale, window, out
        )
    )
    return out


def _attention_arguments(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, starts: int, lens: Tensor,
    scale: float, window: int | None, out: Tensor,
) -> bytes:  # fmt: skip
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    return _ATTENTION.pack(
        native.DTYPES[q.dtype], q.data_ptr(), q.stride(0), k_cache.data_ptr(), v_cache.data_ptr(),
        k_cache.stride(0), v_cache.stride(0), block_size, head_dim, tables.data_ptr(),
        tables.stride(0), starts, lens.data_ptr(), out.data_ptr(), lens.shape[0], q.shape[1],
        num_kv_heads, scale, window or 0, torch.get_num_threads(),
    )  # fmt: skip


def _torch_write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    block_size, kept = k_cache.shape[2], slots >= 0
    blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
    k_cache[blocks, :, offsets] = k[kept]
    v_cache[blocks, :, offsets] = v[kept]


def _torch_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, lens: Tensor, scale: float,
    window: int | None, out: Tensor,
) -> Tensor:  # fmt: skip
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    return _torch_prefill(q, k_cache, v_cache, tables, starts, lens, scale, window, out)


def _torch_prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, starts: Tensor, lens: Tensor,
    scale: float, window: int | None, out: Tensor,
) -> Tensor:  # fmt: skip
    """A sequence at a time: gather the visible blocks, then two products per group of heads."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = k_cache.shape[1:3]
    bounds = starts.tolist()
    for b, context in enumerate(lens.tolist()):
        num_queries = bounds[b + 1] - bounds[b]
        rows = slice(bounds[b], bounds[b + 1])
        oldest = 0 if window is None else max(0, context - num_queries - window + 1)
        first = oldest // block_size
        blocks = tables[b, first : -(-context // block_size)].long()
        seen = slice(oldest - first * block_size, context - first * block_size)
        k = k_cache[blocks].transpose(0, 1).flatten(1, 2)[:, seen].float()  # [KV, S, D]
        v = v_cache[blocks].transpose(0, 1).flatten(1, 2)[:, seen].float()
        grouped = q[rows].float().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
        scores = grouped.flatten(1, 2) @ k.transpose(1, 2) * scale  # [KV, G * Q, S]
        scores = scores.unflatten(1, (-1, num_queries))
        scores.masked_fill_(~_visible(num_queries, context, oldest, window, q), float("-inf"))
        y = (scores.softmax(-1).flatten(1, 2) @ v).unflatten(1, (-1, num_queries))
        out[rows] = y.permute(2, 0, 1, 3).reshape(-1, num_heads, head_dim).to(out.dtype)
    return out


def _visible(
    num_queries: int, context: int, oldest: int, window: int | None, like: Tensor
) -> Tensor:
    """bool [num_queries, context - oldest]: which keys from position `oldest` on a query sees."""
    query_at = torch.arange(context - num_queries, context, device=like.device)[:, None]
    key_at = torch.arange(oldest, context, device=like.device)[None, :]
    visible = key_at <= query_at
    return visible if window is None else visible & (key_at > query_at - window)


def attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """The truth for decode (query_starts = 0, 1, 2, ...) and prefill, in fp32.

    Slow on purpose, a token and a head at a time: it finds each key by its slot and shares no step
    with the paths above.
    """
    block_size, group = k_cache.shape[2], q.shape[1] // k_cache.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    starts = query_starts.tolist()
    for b, context in enumerate(context_lens.tolist()):
        num_queries = starts[b + 1] - starts[b]
        for i in range(num_queries):
            position = context - num_queries + i
            oldest = 0 if window is None else max(0, position - window + 1)
            at = torch.arange(oldest, position + 1, device=q.device)
            blocks, offsets = block_tables[b, at // block_size].long(), at % block_size
            k = k_cache[blocks, :, offsets].float()  # [S, KV, D]
            v = v_cache[blocks, :, offsets].float()
            for head in range(q.shape[1]):
                scores = k[:, head // group] @ q[starts[b] + i, head].float() * scale
                out[starts[b] + i, head] = scores.softmax(0) @ v[:, head // group]
    return out.to(q.dtype)
