"""Attention in plain PyTorch: the path of a CPU without the native library, and the reference.

Knows what `attention.py` knows, and means the same by its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.quant import dequantize_kv, quantize_kv
from penstock.kernels.types import KvScales, Rolling

Scratch = tuple[Tensor, Tensor] | None


def write_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scratch: Scratch,
    scales: KvScales | None,
) -> None:  # fmt: skip
    more = scratch or (None, None)
    if scales is None:
        _scatter(k, k_cache, more[0], slots)
        _scatter(v, v_cache, more[1], slots)
        return
    group = k_cache.shape[3] // scales.k.shape[3]
    more_scales = scales.scratch or (None, None)
    for x, cache, apart, scale_cache, scales_apart in (
        (k, k_cache, more[0], scales.k, more_scales[0]),
        (v, v_cache, more[1], scales.v, more_scales[1]),
    ):
        codes, each = quantize_kv(x, cache.dtype, group)
        _scatter(codes, cache, apart, slots)
        _scatter(each, scale_cache, scales_apart, slots)


def _scatter(rows: Tensor, cache: Tensor, scratch: Tensor | None, slots: Tensor) -> None:
    """Rows [T, KV, *] to their slots."""
    rows, cache = _indexable(rows), _indexable(cache)
    num_blocks, block_size = cache.shape[0], cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    kept = (slots >= 0) & (blocks < num_blocks)
    cache[blocks[kept], :, offsets[kept]] = rows[kept]
    if scratch is not None:
        apart = blocks >= num_blocks
        _indexable(scratch)[blocks[apart] - num_blocks, :, offsets[apart]] = rows[apart]


def _indexable(x: Tensor) -> Tensor:
    """PyTorch does not gather and scatter float8 everywhere."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, lens: Tensor, scale: float,
    window: int | None, rolling: Rolling | None, scratch: Scratch, scales: KvScales | None,
    out: Tensor,
) -> Tensor:  # fmt: skip
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    return prefill_attention(
        q, k_cache, v_cache, tables, starts, lens, scale, window, rolling, scratch, scales, out
    )


def prefill_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, starts: Tensor, lens: Tensor,
    scale: float, window: int | None, rolling: Rolling | None, scratch: Scratch,
    scales: KvScales | None, out: Tensor,
) -> Tensor:  # fmt: skip
    """A sequence at a time: gather the visible blocks, then two products per group of heads."""
    num_kv_heads, bounds = k_cache.shape[1], starts.tolist()
    keys, values = _sides(k_cache, v_cache, scratch, scales)
    for b, context in enumerate(lens.tolist()):
        rows = slice(bounds[b], bounds[b + 1])
        all_scores, all_values = [], []
        for queries, begins, ends in _askers(q, rows, context, window, rolling):
            oldest, end = int(begins.min()), int(ends.max())
            slots = _find(tables[b], b, oldest, end, k_cache.shape[2], rolling)
            k = _stored(keys, *slots)  # [KV, S, D]
            grouped = queries.float().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
            scores = grouped.flatten(1, 2) @ k.transpose(1, 2) * scale  # [KV, G * Q, S]
            scores = scores.unflatten(1, (-1, len(queries)))
            at = torch.arange(oldest, end)
            hidden = (at < begins[:, None]) | (at >= ends[:, None])
            all_scores.append(scores.masked_fill_(hidden, float("-inf")))
            all_values.append(_stored(values, *slots))
        if not all_scores:
            out[rows] = 0
            continue
        y = torch.cat(all_scores, -1).softmax(-1).flatten(1, 2) @ torch.cat(all_values, 1)
        y = y.unflatten(1, (-1, rows.stop - rows.start)).permute(2, 0, 1, 3)
        out[rows] = y.flatten(1, 2).to(out.dtype)
    return out


def _askers(
    q: Tensor, rows: slice, context: int, window: int | None, rolling: Rolling | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Queries of one sequence, and the keys [begin, end) that each sees: sinks, then window."""
    at = torch.arange(context - (rows.stop - rows.start), context)
    begins = torch.zeros_like(at) if window is None else (at - window + 1).clamp(min=0)
    if rolling is not None:
        ends = torch.minimum(rolling.sink_ends[rows], at + 1)
        if (ends > 0).any():
            yield rolling.q_sink[rows], torch.zeros_like(ends), ends
        begins = torch.maximum(begins, rolling.window_starts[rows])
    if (begins <= at).any():
        yield q[rows], begins, at + 1


def _find(
    table: Tensor, b: int, oldest: int, end: int, block_size: int, rolling: Rolling | None
) -> tuple[Tensor, slice]:
    """The blocks that hold positions [oldest, end), and which of their slots those are."""
    pages = torch.arange(oldest // block_size, -(-end // block_size))
    if rolling is not None:
        pages -= torch.where(pages < rolling.sink_blocks[b], 0, rolling.bases[b])
    first = oldest % block_size
    return table[pages].long(), slice(first, first + end - oldest)


@dataclass(frozen=True, slots=True)
class _Side:
    """All of K, or all of V."""

    cache: Tensor
    scratch: Tensor | None
    scales: Tensor | None
    scratch_scales: Tensor | None


def _sides(
    k_cache: Tensor, v_cache: Tensor, scratch: Scratch, scales: KvScales | None
) -> tuple[_Side, _Side]:
    more = scratch or (None, None)
    if scales is None:
        return _Side(k_cache, more[0], None, None), _Side(v_cache, more[1], None, None)
    apart = scales.scratch or (None, None)
    return (
        _Side(k_cache, more[0], scales.k, apart[0]),
        _Side(v_cache, more[1], scales.v, apart[1]),
    )


def _stored(side: _Side, blocks: Tensor, slots: slice) -> Tensor:
    """fp32 [KV, S, D]"""
    held = _gather(side.cache, side.scratch, blocks, slots)
    if side.scales is None:
        return held.float()
    return dequantize_kv(held, _gather(side.scales, side.scratch_scales, blocks, slots))


def _gather(cache: Tensor, scratch: Tensor | None, blocks: Tensor, slots: slice) -> Tensor:
    """[KV, S, *]"""
    source = _indexable(cache)
    if scratch is None:
        held = source[blocks]
    else:
        held, apart = source.new_empty(len(blocks), *source.shape[1:]), blocks >= len(source)
        held[~apart] = source[blocks[~apart]]
        held[apart] = _indexable(scratch)[blocks[apart] - len(source)]
    return held.view(cache.dtype).transpose(0, 1).flatten(1, 2)[:, slots]


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
    rolling: Rolling | None = None,
    scratch: Scratch = None,
    scales: KvScales | None = None,
) -> Tensor:
    """The truth for decode (query_starts = 0, 1, 2, ...) and prefill, in fp32.

    Slow on purpose, a token and a head at a time: it finds each key by its slot and shares no step
    with the paths above.
    """
    (num_blocks, _, block_size, _), group = k_cache.shape, q.shape[1] // k_cache.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    starts = query_starts.tolist()
    tables = block_tables.tolist()
    sides = _sides(k_cache, v_cache, scratch, scales)
    for b, context in enumerate(context_lens.tolist()):
        for row in range(starts[b], starts[b + 1]):
            position = context - starts[b + 1] + row
            oldest = 0 if window is None else max(0, position - window + 1)
            window_keys, sink_keys, sink_pages, base = range(oldest, position + 1), range(0), 0, 0
            if rolling is not None:
                sink_keys = range(min(int(rolling.sink_ends[row]), position + 1))
                window_keys = range(max(oldest, int(rolling.window_starts[row])), position + 1)
                sink_pages, base = int(rolling.sink_blocks[b]), int(rolling.bases[b])
            k: list[Tensor] = []
            v: list[Tensor] = []
            for key in (*sink_keys, *window_keys):
                page = key // block_size
                block = tables[b][page if page < sink_pages else page - base]
                apart = scratch is not None and block >= num_blocks
                at = (block - num_blocks * apart, slice(None), key % block_size)
                for side, found in zip(sides, (k, v), strict=True):
                    held = side.scratch if apart else side.cache
                    per_group = side.scratch_scales if apart else side.scales
                    assert held is not None
                    if per_group is None:
                        found.append(held[at].float())
                    else:
                        found.append(dequantize_kv(held[at], per_group[at]))
            for head in range(q.shape[1] if k else 0):
                mine = torch.stack(k)[:, head // group]  # [S, D]
                scores = mine @ q[row, head].float() * scale
                if rolling is not None and sink_keys:
                    s = len(sink_keys)
                    scores[:s] = mine[:s] @ rolling.q_sink[row, head].float() * scale
                out[row, head] = scores.softmax(0) @ torch.stack(v)[:, head // group]
    return out.to(q.dtype)
