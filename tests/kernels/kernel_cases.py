"""What the kernel tests share: one tolerance per dtype, and paged caches full of traps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.quant import dequantize_kv, quantize_kv
from penstock.kernels.types import DecodeBatch, KvScales, PagedKv, PrefillBatch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """For values of about 1. A NaN on either side alone is a failure."""
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@dataclass
class Paged:
    """A cache in the layout of the engine, and the keys and values that were meant to be in it.

    Every block that no sequence owns, every slot never written, and every slot that has slid out of
    the window is NaN. Block ids are shuffled; unused table entries are random integers.
    In a quantised cache scales are what is NaN, and `keys` and `values` are what was stored, fp32.
    """

    kv: PagedKv  # one layer of a block-major arena
    tables: Tensor  # int32 [B, max_blocks]
    lens: Tensor  # int32 [B]
    keys: list[Tensor]  # per sequence [context, KV, D]
    values: list[Tensor]

    @property
    def k_cache(self) -> Tensor:
        return self.kv.k

    @property
    def v_cache(self) -> Tensor:
        return self.kv.v

    @property
    def max_len(self) -> int:
        return int(self.lens.max())

    def decode(self, rows: slice = slice(None)) -> DecodeBatch:
        """One query a sequence, of all or of some."""
        return DecodeBatch(self.tables[rows], self.lens[rows], self.max_len)

    def prefill(self, query_lens: Sequence[int], lens: Tensor | None = None) -> PrefillBatch:
        """The last `query_lens` tokens of each sequence; `lens`: other lengths than its own."""
        starts = starts_of(query_lens, str(self.lens.device))
        lens = self.lens if lens is None else lens
        return PrefillBatch(self.tables[: len(lens)], starts, lens, max(query_lens))


def paged(
    lens: Sequence[int],
    *,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    oldest: Sequence[int] | None = None,
    device: str = "cpu",
    kv: torch.dtype | None = None,
    group: int = 0,
) -> Paged:
    """`oldest[b]`: keys of sequence b before this position are gone, and so are their blocks.
    `kv`, `group`: a cache of codes, where 0 is the whole head."""
    counts = [-(-context // block_size) for context in lens]
    num_blocks = sum(counts) + 3
    # Three layers to a block, of which the middle one is ours: blocks lie six times further apart.
    shape = (num_blocks, 3, 2, num_kv_heads, block_size, head_dim)
    arena, scales = poisoned(shape, dtype, kv, group, device)
    tables = torch.randint(-(2**31), 2**31 - 1, (len(lens), max(counts) + 2), dtype=torch.int32)
    ids = torch.randperm(num_blocks).to(torch.int32)
    keys, values = [], []
    for b, (context, count) in enumerate(zip(lens, counts, strict=True)):
        mine, ids = ids[:count], ids[count:]
        first = oldest[b] if oldest else 0
        tables[b, first // block_size : count] = mine[first // block_size :]
        at = torch.arange(first, context)
        block, offset = mine[at // block_size].long().to(device), (at % block_size).to(device)
        both = torch.randn(2, context, num_kv_heads, head_dim).to(device, dtype)
        where = (block, slice(None), slice(None), offset)
        mine, theirs = arena[:, 1], None if scales is None else scales[:, 1]
        stored = put(both[:, first:].transpose(0, 1), mine, theirs, where)
        both = torch.cat((both[:, :first].to(stored.dtype), stored.transpose(0, 1)), 1)
        keys.append(both[0])
        values.append(both[1])
    lens_tensor = torch.tensor(lens, dtype=torch.int32, device=device)
    of_both = None if scales is None else KvScales(scales[:, 1, 0], scales[:, 1, 1])
    layer = PagedKv(arena[:, 1, 0], arena[:, 1, 1], of_both)
    return Paged(layer, tables.to(device), lens_tensor, keys, values)


def poisoned(
    shape: Sequence[int], dtype: torch.dtype, kv: torch.dtype | None, group: int, device: str
) -> tuple[Tensor, Tensor | None]:
    """A cache of that shape, all NaN, and its scales; codes are random where scales are NaN."""
    if kv is None:
        return torch.full(shape, float("nan"), dtype=dtype, device=device), None
    codes = torch.randint(0, 127, shape, dtype=torch.uint8).to(device).view(kv)
    groups = shape[-1] // (group or shape[-1])
    return codes, torch.full((*shape[:-1], groups), float("nan"), dtype=torch.float16).to(device)


def put(rows: Tensor, cache: Tensor, scales: Tensor | None, at: tuple) -> Tensor:
    """Store `rows` [..., D] at `cache[at]`; what the cache has of them then."""
    if scales is None:
        cache[at] = rows
        return rows
    codes, each = quantize_kv(rows, cache.dtype, cache.shape[-1] // scales.shape[-1])
    cache.view(torch.uint8)[at] = codes.view(torch.uint8)
    scales[at] = each
    return dequantize_kv(codes, each)


def starts_of(lens: Sequence[int], device: str = "cpu") -> Tensor:
    """int32 [B + 1]: 0 and the running sums."""
    return torch.tensor([0, *lens], device=device).cumsum(0).to(torch.int32)


def dense_attention(
    q: Tensor,
    paged: Paged,
    query_lens: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float = 0.0,
    sink_scores: Tensor | None = None,
) -> Tensor:
    """The oracle's oracle: float64, from the keys as they were drawn, not through the cache."""
    group, out = q.shape[1] // paged.k_cache.shape[1], []
    for rows, keys, values in zip(q.split(list(query_lens)), paged.keys, paged.values, strict=True):
        k = keys.double().repeat_interleave(group, 1).transpose(0, 1)  # [H, S, D]
        v = values.double().repeat_interleave(group, 1).transpose(0, 1)
        context = keys.shape[0]
        at = torch.arange(context - len(rows), context, device=q.device)[:, None]
        distance = at - torch.arange(context, device=q.device)[None, :]
        hidden = (distance < 0) | (distance >= (window or context))
        scores = rows.double().transpose(0, 1) @ k.transpose(1, 2) * scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        scores = scores.masked_fill(hidden, float("-inf"))
        if sink_scores is not None:  # as of one more key, whose value is 0
            more = sink_scores.double()[:, None, None].expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, more], -1)
            v = torch.nn.functional.pad(v, (0, 0, 0, 1))
        weights = scores.softmax(-1)
        out.append((weights @ v).transpose(0, 1))
    return torch.cat(out).to(q.dtype)
