"""Attention in plain PyTorch: the backend of a CPU without the native library, and the reference.

The parameters mean what they mean in `kernels/attention.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.kernels.quant import dequantize_kv, quantize_kv
from penstock.kernels.types import DecodeBatch, PagedKv, PrefillBatch, Rolling


def write_kv(k: Tensor, v: Tensor, kv: PagedKv, slots: Tensor) -> None:
    for rows, side in ((k, 0), (v, 1)):
        blocks, scales, scratch, scratch_scales = _side(kv, side)
        if scales is not None:
            rows, each = quantize_kv(rows, blocks.dtype, blocks.shape[3] // scales.shape[3])
            _scatter(each, scales, scratch_scales, slots)
        _scatter(rows, blocks, scratch, slots)


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
    q: Tensor, kv: PagedKv, batch: DecodeBatch, scale: float, window: int | None, out: Tensor,
    rolling: Rolling | None = None, softcap: float = 0.0, sink_scores: Tensor | None = None,
) -> Tensor:  # fmt: skip
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    chunks = PrefillBatch(batch.block_tables, starts, batch.context_lens, 1)
    return prefill_attention(q, kv, chunks, scale, window, out, rolling, softcap, sink_scores)


def prefill_attention(
    q: Tensor, kv: PagedKv, batch: PrefillBatch, scale: float, window: int | None, out: Tensor,
    rolling: Rolling | None = None, softcap: float = 0.0, sink_scores: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A sequence at a time: gather the visible blocks, then two products per group of heads."""
    (_, num_kv_heads, block_size, _), bounds = kv.k.shape, batch.query_starts.tolist()
    keys, values = _side(kv, 0), _side(kv, 1)
    for b, context in enumerate(batch.context_lens.tolist()):
        rows = slice(bounds[b], bounds[b + 1])
        all_scores, all_values = [], []
        for queries, begins, ends in _visible_parts(q, rows, context, window, rolling):
            oldest, end = int(begins.min()), int(ends.max())
            slots = _find(batch.block_tables[b], b, oldest, end, block_size, rolling)
            k = _stored(keys, *slots)  # [KV, S, D]
            grouped = queries.float().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
            scores = grouped.flatten(1, 2) @ k.transpose(1, 2) * scale  # [KV, G * Q, S]
            scores = _capped(scores, softcap).unflatten(1, (-1, len(queries)))
            at = torch.arange(oldest, end)
            hidden = (at < begins[:, None]) | (at >= ends[:, None])
            all_scores.append(scores.masked_fill_(hidden, float("-inf")))
            all_values.append(_stored(values, *slots))
        if not all_scores:
            out[rows] = 0
            continue
        scores = torch.cat(all_scores, -1)  # [KV, G, Q, S]
        if sink_scores is not None:
            sinks = sink_scores.view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        y = weights.flatten(1, 2) @ torch.cat(all_values, 1)
        y = y.unflatten(1, (-1, rows.stop - rows.start)).permute(2, 0, 1, 3)
        out[rows] = y.flatten(1, 2).to(out.dtype)
    return out


def _capped(scores: Tensor, softcap: float) -> Tensor:
    return torch.tanh(scores / softcap) * softcap if softcap else scores


def _visible_parts(
    q: Tensor, rows: slice, context: int, window: int | None, rolling: Rolling | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The queries of one sequence with the keys [begin, end) that each sees: sinks, then window."""
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
    """The blocks that hold positions [oldest, end), and the slots of these positions in them."""
    pages = torch.arange(oldest // block_size, -(-end // block_size))
    if rolling is not None:
        pages -= torch.where(pages < rolling.sink_blocks[b], 0, rolling.bases[b])
    first = oldest % block_size
    return table[pages].long(), slice(first, first + end - oldest)


_Side = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def _side(kv: PagedKv, side: int) -> _Side:
    """K (side 0) or V (1): blocks, their scales, scratch blocks and the scales of those."""
    scratch = kv.scratch
    blocks = (kv.k, kv.v)[side]
    scales = None if kv.scales is None else (kv.scales.k, kv.scales.v)[side]
    if scratch is None:
        return blocks, scales, None, None
    more = None if scratch.scales is None else (scratch.scales.k, scratch.scales.v)[side]
    return blocks, scales, (scratch.k, scratch.v)[side], more


def _stored(side: _Side, ids: Tensor, slots: slice) -> Tensor:
    """fp32 [KV, S, D]"""
    blocks, scales, scratch, scratch_scales = side
    held = _gather(blocks, scratch, ids, slots)
    if scales is None:
        return held.float()
    return dequantize_kv(held, _gather(scales, scratch_scales, ids, slots))


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
    kv: PagedKv,
    batch: PrefillBatch,
    *,
    scale: float,
    window: int | None = None,
    rolling: Rolling | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """The reference for prefill, and for decode as chunks of one query, in fp32.

    Slow on purpose, a token and a head at a time: it finds each key by its slot and shares no step
    with the paths above.
    """
    (num_blocks, num_kv_heads, block_size, _) = kv.k.shape
    group = q.shape[1] // num_kv_heads
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    starts = batch.query_starts.tolist()
    tables = batch.block_tables.tolist()
    sides = _side(kv, 0), _side(kv, 1)
    for b, context in enumerate(batch.context_lens.tolist()):
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
                apart = kv.scratch is not None and block >= num_blocks
                at = (block - num_blocks * apart, slice(None), key % block_size)
                for side, found in zip(sides, (k, v), strict=True):
                    held, per_group = side[2:] if apart else side[:2]
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
                scores = _capped(scores, softcap)
                out[row, head] = scores.softmax(0) @ torch.stack(v)[:, head // group]
    return out.to(q.dtype)
