"""Attention over a paged KV cache: write, decode (one query a sequence), prefill (query chunks).

Knows tensors, block tables and lengths; nothing of sequences, schedulers or models.
On a GPU Triton runs, on a CPU the native library, else plain PyTorch.

k_cache, v_cache are [num_blocks, num_kv_heads, block_size, head_dim] views with any stride over the
blocks and dense blocks. A token's slot is block_id * block_size + offset. A table entry past the
context, and a slot that nobody has written, may hold anything: neither is ever read.

`scratch`, where given, is a K and a V view of further blocks in the same layout. Block id
num_blocks + i is scratch block i, in slots and in tables.

A cache of int8 or float8_e4m3fn holds codes, and `scales` what a code of 1 is worth (`quant.py`);
q, k and v are of the model's dtype all the same. Attention reads what is stored, nothing else.
"""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from penstock.kernels.cpu import native
from penstock.kernels.rowwise import rope_
from penstock.kernels.types import QUANTISED, KvScales, Rolling

_ATTENTION = struct.Struct("32qd8q")
_WRITE = struct.Struct("30q")
_ROPE_WRITE = struct.Struct("36q")


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    scratch: tuple[Tensor, Tensor] | None = None,
    scales: KvScales | None = None,
) -> None:
    """Store `k`, `v` [T, KV, D] at `slots` int64 [T]; a negative slot is skipped.

    k and v may be views of one fused projection (any stride over T), in the dtype of the cache, or
    in that of the model where `scales` is given: they are quantised as `quant.quantize_kv` does.
    """
    assert native.rows_are_dense(k) and native.rows_are_dense(v)
    assert k.dtype == v.dtype and slots.dtype == torch.int64
    _check_cache(k.dtype, k_cache, v_cache, scratch, scales)
    if k.is_cuda:
        from penstock.kernels.triton import attention as attention_triton

        attention_triton.write_kv(k, v, k_cache, v_cache, slots, scratch, scales)
        return
    lib = _library(k, k_cache, scales)
    if lib is not None:
        lib.ps_write_kv(
            _WRITE.pack(*_write_arguments(k, v, k_cache, v_cache, slots, scratch, scales))
        )
    else:
        from penstock.kernels.reference import attention as attention_torch

        attention_torch.write_kv(k, v, k_cache, v_cache, slots, scratch, scales)


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    scratch: tuple[Tensor, Tensor] | None = None,
    scales: KvScales | None = None,
) -> None:
    """`rowwise.rope_(q, k, cos, sin)` and then `write_kv` in one pass; on the CPU the same bits.

    `q` [T, H, D] is rotated in place; what `k` holds afterwards is not said.
    """
    lib = _library(k, k_cache, scales)
    if lib is None and not k.is_cuda:
        rope_(q, k, cos, sin)
        write_kv(k, v, k_cache, v_cache, slots, scratch=scratch, scales=scales)
        return
    assert native.rows_are_dense(q) and native.rows_are_dense(k) and native.rows_are_dense(v)
    assert q.dtype == k.dtype == v.dtype and slots.dtype == torch.int64
    assert cos.dtype == sin.dtype == torch.float32
    _check_cache(k.dtype, k_cache, v_cache, scratch, scales)
    if lib is None:
        from penstock.kernels.triton import attention as attention_triton

        attention_triton.rope_write_kv(q, k, v, cos, sin, k_cache, v_cache, slots, scratch, scales)
        return
    cos, sin = cos.contiguous(), sin.contiguous()
    lib.ps_rope_write_kv(_ROPE_WRITE.pack(
        *_write_arguments(k, v, k_cache, v_cache, slots, scratch, scales),
        q.data_ptr(), q.stride(0), q.shape[1], cos.data_ptr(), sin.data_ptr(), cos.shape[1],
    ))  # fmt: skip


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
    rolling: Rolling | None = None,
    scratch: tuple[Tensor, Tensor] | None = None,
    scales: KvScales | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One query a sequence over its blocks: `q` [B, H, D] -> [B, H, D], written to `out` if given.

    `block_tables` int32 [B, max_blocks]; `context_lens` int32 [B], the current token included (and
    what a rolled sequence dropped); `window`: only the last so many tokens are seen.
    `max_context_len` >= every length (it sizes the launch on a GPU). Long contexts are split over
    programs or threads and merged, as FlashDecoding does. The splits stand at fixed positions of
    the context, the sinks of a rolled one before them, so that on the CPU a row has the same bits
    whatever the batch and the number of threads. The work is that of the visible keys.
    """
    out = _prepare(q, k_cache, v_cache, block_tables, context_lens, rolling, scratch, scales, out)
    if q.is_cuda:
        from penstock.kernels.triton import attention as attention_triton

        return attention_triton.decode_attention(
            q, k_cache, v_cache, block_tables, context_lens, scale, window, max_context_len, out,
            rolling, scratch, scales,
        )  # fmt: skip
    lib = _library(q, k_cache, scales)
    if lib is not None:
        arguments = _native_arguments(
            q, k_cache, v_cache, block_tables, 0, context_lens, scale, window, rolling, scratch,
            scales, out,
        )  # fmt: skip
        lib.ps_decode(arguments)
        return out
    from penstock.kernels.reference import attention as attention_torch

    return attention_torch.decode_attention(
        q, k_cache, v_cache, block_tables, context_lens, scale, window, rolling, scratch,
        scales, out,
    )  # fmt: skip


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
    rolling: Rolling | None = None,
    scratch: tuple[Tensor, Tensor] | None = None,
    scales: KvScales | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of flat query chunks over blocks: `q` [T, H, D] -> [T, H, D].

    Chunk b is rows [query_starts[b], query_starts[b+1]) of q (int32 [B+1]) and ends at position
    context_lens[b] (int32 [B]); its own K and V are in the cache (or in scratch) already. A query
    at position t sees keys in (t - window, t]. `max_query_len` and `max_context_len` bound the
    lengths. Online softmax over key tiles, as in FlashAttention-2. On the CPU the tiles stand at
    fixed positions of the context, those of the sinks first, so that a row has the same bits
    however its prompt is cut into chunks. The work is that of the visible keys.
    """
    assert query_starts.dtype == torch.int32
    out = _prepare(q, k_cache, v_cache, block_tables, context_lens, rolling, scratch, scales, out)
    if q.is_cuda:
        from penstock.kernels.triton import attention as attention_triton

        return attention_triton.prefill_attention(
            q, k_cache, v_cache, block_tables, query_starts, context_lens, scale, window,
            max_query_len, out, rolling, scratch, scales,
        )  # fmt: skip
    lib = _library(q, k_cache, scales)
    if lib is not None:
        arguments = _native_arguments(
            q, k_cache, v_cache, block_tables, query_starts.data_ptr(), context_lens, scale, window,
            rolling, scratch, scales, out,
        )  # fmt: skip
        lib.ps_prefill(arguments)
        return out
    from penstock.kernels.reference import attention as attention_torch

    return attention_torch.prefill_attention(
        q, k_cache, v_cache, block_tables, query_starts, context_lens, scale, window, rolling,
        scratch, scales, out,
    )  # fmt: skip


def _prepare(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, lens: Tensor,
    rolling: Rolling | None, scratch: tuple[Tensor, Tensor] | None, scales: KvScales | None,
    out: Tensor | None,
) -> Tensor:  # fmt: skip
    """Check what the kernels rely on, and give the tensor to write."""
    assert native.rows_are_dense(q)
    assert tables.dtype == lens.dtype == torch.int32 and tables.stride(1) == 1
    _check_cache(q.dtype, k_cache, v_cache, scratch, scales)
    if rolling is not None:
        q_sink = rolling.q_sink
        assert native.rows_are_dense(q_sink) and q_sink.shape == q.shape and q_sink.dtype == q.dtype
        ends, starts = rolling.sink_ends, rolling.window_starts
        sink_blocks, bases = rolling.sink_blocks, rolling.bases
        assert ends.numel() == starts.numel() == q.shape[0]
        assert sink_blocks.numel() == bases.numel() == lens.numel()
        assert ends.dtype == starts.dtype == sink_blocks.dtype == bases.dtype == torch.int32
        assert ends.is_contiguous() and starts.is_contiguous()
        assert sink_blocks.is_contiguous() and bases.is_contiguous()
    if out is None:
        return q.new_empty(q.shape)
    assert out.shape == q.shape and out.is_contiguous() and out.dtype == q.dtype
    return out


def _check_cache(
    dtype: torch.dtype, k_cache: Tensor, v_cache: Tensor, scratch: tuple[Tensor, Tensor] | None,
    scales: KvScales | None,
) -> None:  # fmt: skip
    assert k_cache.dtype == v_cache.dtype
    assert k_cache.dtype == dtype if scales is None else k_cache.dtype in QUANTISED
    _check_scratch((k_cache, v_cache), scratch)
    if scales is None:
        return
    for cache, per_group in zip((k_cache, v_cache), (scales.k, scales.v), strict=True):
        assert per_group.dtype == torch.float16 and per_group.shape[:3] == cache.shape[:3]
        assert cache.shape[3] % per_group.shape[3] == 0 and per_group[0].is_contiguous()
    assert scales.k.shape == scales.v.shape
    assert (scratch is None) == (scales.scratch is None)
    _check_scratch((scales.k, scales.v), scales.scratch)


def _check_scratch(caches: tuple[Tensor, Tensor], scratch: tuple[Tensor, Tensor] | None) -> None:
    if scratch is not None:
        for cache, more in zip(caches, scratch, strict=True):
            assert more.shape[1:] == cache.shape[1:] and more.stride()[1:] == cache.stride()[1:]
            assert more.dtype == cache.dtype


def _library(x: Tensor, k_cache: Tensor, scales: KvScales | None) -> ctypes.CDLL | None:
    """The library, if it can work on `x` and this cache."""
    lib = native.usable(x)
    if lib is None or scales is None:
        return lib
    num_groups = scales.k.shape[3]
    group = k_cache.shape[3] // num_groups
    return lib if num_groups == 1 or (group >= 8 and group & (group - 1) == 0) else None


def _write_arguments(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    scratch: tuple[Tensor, Tensor] | None, scales: KvScales | None,
) -> tuple[int, ...]:  # fmt: skip
    return (
        native.DTYPES[k.dtype], k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0),
        *_cache_arguments(k_cache, v_cache, scratch, scales), slots.data_ptr(), slots.shape[0],
        torch.get_num_threads(),
    )  # fmt: skip


def _native_arguments(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, starts: int, lens: Tensor,
    scale: float, window: int | None, rolling: Rolling | None,
    scratch: tuple[Tensor, Tensor] | None, scales: KvScales | None, out: Tensor,
) -> bytes:  # fmt: skip
    rolled = (0, 0, 0, 0, 0, 0) if rolling is None else (
        rolling.q_sink.data_ptr(), rolling.q_sink.stride(0), rolling.sink_ends.data_ptr(),
        rolling.window_starts.data_ptr(), rolling.sink_blocks.data_ptr(), rolling.bases.data_ptr(),
    )  # fmt: skip
    return _ATTENTION.pack(
        native.DTYPES[q.dtype], q.data_ptr(), q.stride(0),
        *_cache_arguments(k_cache, v_cache, scratch, scales), tables.data_ptr(), tables.stride(0),
        starts, lens.data_ptr(), out.data_ptr(), lens.shape[0], q.shape[1], scale, window or 0,
        torch.get_num_threads(), *rolled,
    )  # fmt: skip


def _cache_arguments(
    k_cache: Tensor, v_cache: Tensor, scratch: tuple[Tensor, Tensor] | None,
    scales: KvScales | None,
) -> tuple[int, ...]:  # fmt: skip
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    coded, blocks, more = (0, head_dim), (k_cache, v_cache), scratch or (None, None)
    if scales is None:
        places = [(*_place(blocks[i]), 0, 0, *_place(more[i]), 0, 0) for i in (0, 1)]
    else:
        coded = (QUANTISED[k_cache.dtype], head_dim // scales.k.shape[3])
        each, apart = (scales.k, scales.v), scales.scratch or (None, None)
        places = [
            (*_place(blocks[i]), *_place(each[i]), *_place(more[i]), *_place(apart[i]))
            for i in (0, 1)
        ]
    return *places[0], *places[1], num_blocks, block_size, num_kv_heads, head_dim, *coded


def _place(blocks: Tensor | None) -> tuple[int, int]:
    return (0, 0) if blocks is None else (blocks.data_ptr(), blocks.stride(0))
