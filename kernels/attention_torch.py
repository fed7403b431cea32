"""Attention in plain PyTorch: the path of a CPU without the native library, and the reference.

Knows what `attention.py` knows, and means the same by its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.kernels.attention import Rolling

Scratch = tuple[Tensor, Tensor] | None


def write_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scratch: Scratch
) -> None:
    num_blocks, block_size = k_cache.shape[0], k_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    kept = (slots >= 0) & (blocks < num_blocks)
    k_cache[blocks[kept], :, offsets[kept]] = k[kept]
    v_cache[blocks[kept], :, offsets[kept]] = v[kept]
    if scratch is not None:
        apart = blocks >= num_blocks
        scratch[0][blocks[apart] - num_blocks, :, offsets[apart]] = k[apart]
        scratch[1][blocks[apart] - num_blocks, :, offsets[apart]] = v[apart]


def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, lens: Tensor, scale: float,
    window: int | None, rolling: Rolling | None, scratch: Scratch, out: Tensor,
) -> Tensor:  # fmt: skip
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    return prefill_attention(
        q, k_cache, v_cache, tables, starts, lens, scale, window, rolling, scratch, out
    )


def prefill_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, starts: Tensor, lens: Tensor,
    scale: float, window: int | None, rolling: Rolling | None, scratch: Scratch, out: Tensor,
) -> Tensor:  # fmt: skip
    """A sequence at a time: gather the visible blocks, then two products per group of heads."""
    num_kv_heads, bounds = k_cache.shape[1], starts.tolist()
    for b, context in enumerate(lens.tolist()):
        rows = slice(bounds[b], bounds[b + 1])
        all_scores, all_values = [], []
        for queries, begins, ends in _askers(q, rows, context, window, rolling):
            oldest, end = int(begins.min()), int(ends.max())
            slots = _find(tables[b], b, oldest, end, k_cache.shape[2], rolling)
            k = _gather(k_cache, scratch and scratch[0], *slots)  # [KV, S, D]
            grouped = queries.float().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
            scores = grouped.flatten(1, 2) @ k.transpose(1, 2) * scale  # [KV, G * Q, S]
            scores = scores.unflatten(1, (-1, len(queries)))
            at = torch.arange(oldest, end)
            hidden = (at < begins[:, None]) | (at >= ends[:, None])
            all_scores.append(scores.masked_fill_(hidden, float("-inf")))
            all_values.append(_gather(v_cache, scratch and scratch[1], *slots))
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


def _gather(cache: Tensor, scratch: Tensor | None, blocks: Tensor, slots: slice) -> Tensor:
    """fp32 [KV, S, D]"""
    if scratch is None:
        held = cache[blocks]
    else:
        held, apart = cache.new_empty(len(blocks), *cache.shape[1:]), blocks >= len(cache)
        held[~apart] = cache[blocks[~apart]]
        held[apart] = scratch[blocks[apart] - len(cache)]
    return held.transpose(0, 1).flatten(1, 2)[:, slots].float()


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
) -> Tensor:
    """The truth for decode (query_starts = 0, 1, 2, ...) and prefill, in fp32.

    Slow on purpose, a token and a head at a time: it finds each key by its slot and shares no step
    with the paths above.
    """
    (num_blocks, _, block_size, _), group = k_cache.shape, q.shape[1] // k_cache.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    starts = query_starts.tolist()
    tables = block_tables.tolist()
    for b, context in enumerate(context_lens.tolist()):
        for row in range(starts[b], starts[b + 1]):
            position = context - starts[b + 1] + row
            oldest = 0 if window is None else max(0, position - window + 1)
            window_keys, sink_keys, sink_pages, base = range(oldest, position + 1), range(0), 0, 0
            if rolling is not None:
                sink_keys = range(min(int(rolling.sink_ends[row]), position + 1))
                window_keys = range(max(oldest, int(rolling.window_starts[row])), position + 1)
                sink_pages, base = int(rolling.sink_blocks[b]), int(rolling.bases[b])
            k, v = [], []
            for key in (*sink_keys, *window_keys):
                page = key // block_size
                block = tables[b][page if page < sink_pages else page - base]
                keys, values = k_cache, v_cache
                if scratch is not None and block >= num_blocks:
                    (keys, values), block = scratch, block - num_blocks
                k.append(keys[block, :, key % block_size].float())
                v.append(values[block, :, key % block_size].float())
            for head in range(q.shape[1] if k else 0):
                mine = torch.stack(k)[:, head // group]  # [S, D]
                scores = mine @ q[row, head].float() * scale
                if rolling is not None and sink_keys:
                    s = len(sink_keys)
                    scores[:s] = mine[:s] @ rolling.q_sink[row, head].float() * scale
                out[row, head] = scores.softmax(0) @ torch.stack(v)[:, head // group]
    return out.to(q.dtype)
