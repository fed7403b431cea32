"""Attention on the CPU by the native library: packs the arguments of its functions.

The parameters mean what they mean in `kernels/attention.py`, which chooses this backend only if
`suits` is true.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.cpu import native
from penstock.kernels.cpu.arguments import ATTENTION, ROPE_WRITE_KV, WRITE_KV
from penstock.kernels.types import QUANTISED, DecodeBatch, PagedKv, PrefillBatch, Rolling


def suits(x: Tensor, kv: PagedKv) -> bool:
    """Whether the library is available for the dtype of `x` and the scale groups of `kv`."""
    if native.usable(x) is None:
        return False
    if kv.scales is None:
        return True
    num_groups = kv.scales.k.shape[3]
    group = kv.k.shape[3] // num_groups
    return num_groups == 1 or (group >= 8 and group & (group - 1) == 0)


def write_kv(k: Tensor, v: Tensor, kv: PagedKv, slots: Tensor) -> None:
    native.bound.library.pk_write_kv(WRITE_KV.pack(*_write_values(k, v, kv, slots)))


def rope_write_kv(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv: PagedKv, slots: Tensor
) -> None:
    cos, sin = cos.contiguous(), sin.contiguous()
    native.bound.library.pk_rope_write_kv(ROPE_WRITE_KV.pack(
        *_write_values(k, v, kv, slots),
        q.data_ptr(), q.stride(0), q.shape[1], cos.data_ptr(), sin.data_ptr(), cos.shape[1],
    ))  # fmt: skip


def decode_attention(
    q: Tensor, kv: PagedKv, batch: DecodeBatch, scale: float, window: int | None, out: Tensor,
    rolling: Rolling | None = None, softcap: float = 0.0, sink_scores: Tensor | None = None,
) -> Tensor:  # fmt: skip
    native.bound.library.pk_decode(
        _attention_bytes(q, kv, batch, scale, window, rolling, out, softcap, sink_scores)
    )
    return out


def prefill_attention(
    q: Tensor, kv: PagedKv, batch: PrefillBatch, scale: float, window: int | None, out: Tensor,
    rolling: Rolling | None = None, softcap: float = 0.0, sink_scores: Tensor | None = None,
) -> Tensor:  # fmt: skip
    native.bound.library.pk_prefill(
        _attention_bytes(q, kv, batch, scale, window, rolling, out, softcap, sink_scores)
    )
    return out


def _write_values(k: Tensor, v: Tensor, kv: PagedKv, slots: Tensor) -> tuple[int, ...]:
    return (
        native.DTYPES[k.dtype], k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0),
        *_cache_values(kv), slots.data_ptr(), slots.shape[0], torch.get_num_threads(),
    )  # fmt: skip


def _attention_bytes(
    q: Tensor, kv: PagedKv, batch: DecodeBatch | PrefillBatch, scale: float, window: int | None,
    rolling: Rolling | None, out: Tensor, softcap: float, sink_scores: Tensor | None,
) -> bytes:  # fmt: skip
    tables, lens = batch.block_tables, batch.context_lens
    starts = batch.query_starts.data_ptr() if isinstance(batch, PrefillBatch) else 0
    rolled = (0, 0, 0, 0, 0, 0) if rolling is None else (
        rolling.q_sink.data_ptr(), rolling.q_sink.stride(0), rolling.sink_ends.data_ptr(),
        rolling.window_starts.data_ptr(), rolling.sink_blocks.data_ptr(), rolling.bases.data_ptr(),
    )  # fmt: skip
    return ATTENTION.pack(
        native.DTYPES[q.dtype], q.data_ptr(), q.stride(0), *_cache_values(kv),
        tables.data_ptr(), tables.stride(0), starts, lens.data_ptr(), out.data_ptr(),
        lens.shape[0], q.shape[1], scale, softcap, window or 0, torch.get_num_threads(), *rolled,
        0 if sink_scores is None else sink_scores.data_ptr(),
    )  # fmt: skip


def _cache_values(kv: PagedKv) -> tuple[int, ...]:
    k, v, scales, scratch = kv.k, kv.v, kv.scales, kv.scratch
    num_blocks, num_kv_heads, block_size, head_dim = k.shape
    more_k, more_v, more_scales = (
        (None, None, None) if scratch is None else (scratch.k, scratch.v, scratch.scales)
    )
    if scales is None:
        sides = (*_place(k), 0, 0, *_place(more_k), 0, 0, *_place(v), 0, 0, *_place(more_v), 0, 0)
        return *sides, num_blocks, block_size, num_kv_heads, head_dim, 0, head_dim
    of_k, of_v = (None, None) if more_scales is None else (more_scales.k, more_scales.v)
    return (
        *_place(k), *_place(scales.k), *_place(more_k), *_place(of_k),
        *_place(v), *_place(scales.v), *_place(more_v), *_place(of_v),
        num_blocks, block_size, num_kv_heads, head_dim, QUANTISED[k.dtype],
        head_dim // scales.k.shape[3],
    )  # fmt: skip


def _place(blocks: Tensor | None) -> tuple[int, int]:
    """Address and block stride; 0 and 0 where there are none."""
    return (0, 0) if blocks is None else (blocks.data_ptr(), blocks.stride(0))
