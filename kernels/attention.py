"""Attention over a paged KV cache: write, decode (one query per sequence), prefill (query chunks).

The caller passes tensors, the cache of a layer as one `PagedKv`, and the block tables and lengths
of a step as one `DecodeBatch` or `PrefillBatch`.
Backends: Triton on a GPU, the native library on a CPU where it supports the dtype and the scale
groups, else plain PyTorch. A block-table entry past the context is never read.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.cpu import attention as native_attention
from penstock.kernels.reference import attention as reference
from penstock.kernels.rowwise import rope_
from penstock.kernels.types import DecodeBatch, PagedKv, PrefillBatch, Rolling, rows_are_dense


class AttentionBackend(Protocol):
    """What each backend implements. The functions below check the arguments before they call it."""

    def write_kv(self, k: Tensor, v: Tensor, kv: PagedKv, slots: Tensor) -> None: ...

    def decode_attention(
        self, q: Tensor, kv: PagedKv, batch: DecodeBatch, scale: float, window: int | None,
        out: Tensor, rolling: Rolling | None = None, softcap: float = 0.0,
        sink_scores: Tensor | None = None,
    ) -> Tensor: ...  # fmt: skip

    def prefill_attention(
        self, q: Tensor, kv: PagedKv, batch: PrefillBatch, scale: float, window: int | None,
        out: Tensor, rolling: Rolling | None = None, softcap: float = 0.0,
        sink_scores: Tensor | None = None,
    ) -> Tensor: ...  # fmt: skip


class FusedBackend(AttentionBackend, Protocol):
    """A backend that rotates and writes in one pass."""

    def rope_write_kv(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv: PagedKv, slots: Tensor
    ) -> None: ...


def _backend(x: Tensor, kv: PagedKv) -> AttentionBackend:
    return _fused_backend(x, kv) or reference


def _fused_backend(x: Tensor, kv: PagedKv) -> FusedBackend | None:
    if x.is_cuda:
        return _triton()
    return native_attention if native_attention.suits(x, kv) else None


def backend_name(x: Tensor, kv: PagedKv) -> str:
    """The backend for activations like `x` and this cache, for people."""
    if _fused_backend(x, kv) is None:
        return "PyTorch"
    return "Triton" if x.is_cuda else "native"


@functools.cache
def _triton() -> FusedBackend:
    from penstock.kernels.triton import attention  # Triton is not installed on every machine

    return attention


def write_kv(k: Tensor, v: Tensor, kv: PagedKv, slots: Tensor) -> None:
    """Store `k`, `v` [T, KV, D] at `slots` int64 [T]; a negative slot is skipped.

    k and v may be views of one fused projection (any stride over T). Their dtype is that of the
    cache, or the model's if the cache has scales: they are then quantised by `quant.quantize_kv`.
    """
    assert rows_are_dense(k) and rows_are_dense(v)
    assert k.dtype == v.dtype and slots.dtype == torch.int64
    kv.check(k.dtype)
    _backend(k, kv).write_kv(k, v, kv, slots)


def rope_write_kv(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv: PagedKv, slots: Tensor
) -> None:
    """`rowwise.rope_(q, k, cos, sin)` and then `write_kv` in one pass; on the CPU the same bits.

    `q` [T, H, D] is rotated in place; the contents of `k` afterwards are unspecified.
    """
    assert rows_are_dense(q) and rows_are_dense(k) and rows_are_dense(v)
    assert q.dtype == k.dtype == v.dtype and slots.dtype == torch.int64
    assert cos.dtype == sin.dtype == torch.float32
    kv.check(k.dtype)
    backend = _fused_backend(k, kv)
    if backend is None:
        rope_(q, k, cos, sin)
        reference.write_kv(k, v, kv, slots)
    else:
        backend.rope_write_kv(q, k, v, cos, sin, kv, slots)


def decode_attention(
    q: Tensor,
    kv: PagedKv,
    batch: DecodeBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    rolling: Rolling | None = None,
    sink_scores: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One query per sequence over its blocks: `q` [B, H, D] -> [B, H, D], in `out` if given.

    `window`: only the last `window` tokens are visible. `softcap` c, unless 0: a score s becomes
    c * tanh(s / c) before the softmax (Gemma 2, arXiv 2408.00118, section 2). `sink_scores` fp32
    [H]: a score for each head that takes part in the softmax and has no value, as if of a key whose
    value is 0 (gpt-oss's attention sinks, arXiv 2508.10925). Long contexts are split over programs
    or threads and merged, as in FlashDecoding. The splits are at fixed positions of the context,
    the sinks of a rolled one before them, so that but for plain PyTorch a row has the same bits
    whatever the batch and the number of threads, and those of the same row in `prefill_attention`.
    The work is proportional to the visible keys.
    """
    out = _prepare(q, kv, batch.context_lens, rolling, sink_scores, out)
    return _backend(q, kv).decode_attention(
        q, kv, batch, scale, window, out, rolling, softcap, sink_scores
    )


def prefill_attention(
    q: Tensor,
    kv: PagedKv,
    batch: PrefillBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    rolling: Rolling | None = None,
    sink_scores: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of flat query chunks over blocks: `q` [T, H, D] -> [T, H, D].

    K and V of the chunks are in the cache (or in scratch) already. A query at position t sees keys
    in (t - window, t]. `softcap`, `sink_scores`: as for `decode_attention`. Online softmax over key
    tiles, as in FlashAttention-2. But for plain PyTorch tiles and splits are those of
    `decode_attention`: a row has the same bits however its prompt is
    cut into chunks, and as a decode row. The work is proportional to the visible keys.
    """
    out = _prepare(q, kv, batch.context_lens, rolling, sink_scores, out)
    return _backend(q, kv).prefill_attention(
        q, kv, batch, scale, window, out, rolling, softcap, sink_scores
    )


def _prepare(
    q: Tensor, kv: PagedKv, lens: Tensor, rolling: Rolling | None, sink_scores: Tensor | None,
    out: Tensor | None,
) -> Tensor:  # fmt: skip
    """Check what the backends rely on, and return the tensor to write."""
    assert rows_are_dense(q)
    kv.check(q.dtype)
    if rolling is not None:
        rolling.check(q, lens)
    if sink_scores is not None:
        assert sink_scores.dtype == torch.float32 and sink_scores.is_contiguous()
        assert sink_scores.shape == q.shape[1:2]
    if out is None:
        return q.new_empty(q.shape)
    assert out.shape == q.shape and out.is_contiguous() and out.dtype == q.dtype
    return out
