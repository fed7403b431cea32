"""Paged caches of rolled sequences: sinks, a window, nothing between, and blocks in scratch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.types import KvScales, PagedKv, Rolling
from tests.kernels.kernel_cases import Paged, poisoned, put

INT32 = torch.int32


@dataclass(frozen=True)
class Roll:
    """Keep `sinks` tokens and the last `window`, dropping `roll` at a time (research note 2.1)."""

    sinks: int
    window: int
    roll: int

    def edges(self, t: int, block_size: int) -> tuple[int, int, int]:
        """Of the query at t: sink end, window start, and by how much the sinks come closer."""
        head = -(-self.sinks // block_size) * block_size
        start = head + self.roll * -(-max(0, t + 1 - head - self.window) // self.roll)
        if start > head:
            return self.sinks, start, start - self.sinks
        return min(head, t + 1), start, 0


@dataclass
class RolledPaged(Paged):
    rolling: Rolling
    query_lens: Sequence[int]


def rolled_paged(
    lens: Sequence[int],
    query_lens: Sequence[int],
    rolls: Sequence[Roll | None],
    *,
    num_heads: int,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    num_scratch: int = 0,
    device: str = "cpu",
    kv: torch.dtype | None = None,
    group: int = 0,
) -> RolledPaged:
    """Sequences of `lens` tokens whose last `query_lens` ask; `rolls[b]` None is full context.

    Only keys that some row sees are written; every other slot, in listed blocks too, is NaN. Table
    entries that no visible key needs are random integers. The last `num_scratch` blocks of each
    sequence (so far as it has them) lie in scratch. q_sink is unrelated to any q, so that a key
    read with the wrong query shows.
    """
    pages, bases, sink_blocks, ends, starts, seen = [], [], [], [], [], []
    for context, num_queries, roll in zip(lens, query_lens, rolls, strict=True):
        at = range(context - num_queries, context)
        edges = [roll.edges(t, block_size) if roll else (0, 0, 0) for t in at]
        ends += [edge[0] for edge in edges]
        starts += [edge[1] for edge in edges]
        keys = {p for t, edge in zip(at, edges, strict=True) for p in range(min(edge[0], t + 1))}
        keys |= {p for t, edge in zip(at, edges, strict=True) for p in range(edge[1], t + 1)}
        seen.append(torch.tensor(sorted(keys)))
        sink_blocks.append(-(-roll.sinks // block_size) if roll else 0)
        bases.append(edges[0][1] // block_size - sink_blocks[-1])  # whole pages before the window
        pages.append(sorted({p // block_size for p in keys}))
    num_blocks = sum(map(len, pages)) + 3
    shape = (num_blocks, 3, 2, num_kv_heads, block_size, head_dim)
    arena, scales = poisoned(shape, dtype, kv, group, device)
    apart_shape = (num_scratch * len(lens) + 1, *shape[2:])
    more, more_scales = poisoned(apart_shape, dtype, kv, group, device)
    width = max(map(len, pages)) + max(sink_blocks) + 2
    tables = torch.randint(-(2**31), 2**31 - 1, (len(lens), width), dtype=INT32)
    ids, spare = torch.randperm(num_blocks).tolist(), torch.randperm(len(more)).tolist()
    all_keys, all_values = [], []
    for b, (mine, positions) in enumerate(zip(pages, seen, strict=True)):
        both = torch.randn(2, lens[b], num_kv_heads, head_dim).to(device, dtype)
        kept = both.float() if kv else both
        for i, page in enumerate(mine):
            apart = len(mine) - i <= num_scratch
            block = spare.pop() if apart else ids.pop()
            entry = page if page < sink_blocks[b] else page - bases[b]
            tables[b, entry] = block + num_blocks * apart
            here = positions[positions // block_size == page]
            home = more[block] if apart else arena[block, 1]  # [2, KV, bs, D]
            theirs = None
            if scales is not None and more_scales is not None:
                theirs = more_scales[block] if apart else scales[block, 1]
            where = (slice(None), slice(None), here % block_size)
            kept[:, here] = put(both[:, here].transpose(1, 2), home, theirs, where).transpose(1, 2)
        all_keys.append(kept[0])
        all_values.append(kept[1])
    rolling = Rolling(
        q_sink=torch.randn(sum(query_lens), num_heads + 1, head_dim).to(device, dtype)[:, 1:],
        sink_ends=torch.tensor(ends, dtype=INT32, device=device),
        window_starts=torch.tensor(starts, dtype=INT32, device=device),
        sink_blocks=torch.tensor(sink_blocks, dtype=INT32, device=device),
        bases=torch.tensor(bases, dtype=INT32, device=device),
        max_visible_len=max(
            n - start
            for n, start in zip(
                [n for n, m in zip(lens, query_lens, strict=True) for _ in range(m)],
                starts,
                strict=True,
            )
        ),
    )
    of_blocks = None if scales is None else KvScales(scales[:, 1, 0], scales[:, 1, 1])
    of_more = None if more_scales is None else KvScales(more_scales[:, 0], more_scales[:, 1])
    scratch = PagedKv(more[:, 0], more[:, 1], of_more) if num_scratch else None
    return RolledPaged(
        kv=PagedKv(arena[:, 1, 0], arena[:, 1, 1], of_blocks, scratch),
        tables=tables.to(device),
        lens=torch.tensor(lens, dtype=INT32, device=device),
        keys=all_keys,
        values=all_values,
        rolling=rolling,
        query_lens=query_lens,
    )


def dense_rolled_attention(
    q: Tensor, case: RolledPaged, scale: float, window: int | None = None
) -> Tensor:
    """The oracle: float64, from the keys as they were drawn, not through the cache."""
    group, out, row = q.shape[1] // case.k_cache.shape[1], [], 0
    for m, keys, values in zip(case.query_lens, case.keys, case.values, strict=True):
        k = keys.double().repeat_interleave(group, 1)  # [S, H, D]
        v = values.double().repeat_interleave(group, 1)
        at = torch.arange(len(keys), device=q.device)
        for t in range(len(keys) - m, len(keys)):
            sinks = at < case.rolling.sink_ends[row]
            hidden = ~sinks & (
                (at < case.rolling.window_starts[row]) | (at <= t - (window or t + 1))
            )
            plain = torch.einsum("hd,shd->hs", q[row].double(), k)
            near = torch.einsum("hd,shd->hs", case.rolling.q_sink[row].double(), k)
            scores = torch.where(sinks, near, plain) * scale
            weights = scores.masked_fill(hidden | (at > t), float("-inf")).softmax(-1)
            out.append(torch.einsum("hs,shd->hd", weights, v))
            row += 1
    return torch.stack(out).to(q.dtype)
