"""Checks and timings of attention for `check.py`: decode, prefill, and writing to the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.cases import CUDA, DEVICE, HALF, Checks, Triples, Work, starts_of
from penstock.kernels.reference import attention as attention_torch
from penstock.kernels.triton import attention as attention_triton
from penstock.kernels.types import DecodeBatch, PagedKv, PrefillBatch

SCALE = 0.125
# query heads a kv head, kv heads, head_dim, block_size, window
ATTENTION_SHAPES = [
    (1, 2, 64, 16, None),
    (7, 2, 64, 16, None),
    (8, 1, 128, 32, 100),
    (2, 2, 80, 1, 16),
    (4, 2, 128, 16, None),
    (20, 1, 20, 128, 1),
    (3, 1, 256, 16, 300),
]


@dataclass(frozen=True)
class Cache:
    """One layer of a block-major arena with shuffled blocks; slots never written are NaN."""

    kv: PagedKv
    tables: Tensor
    lens: Tensor

    def decode(self, max_len: int) -> DecodeBatch:
        """One query a sequence."""
        return DecodeBatch(self.tables, self.lens, max_len)

    def prefill(self, query_lens: Sequence[int]) -> PrefillBatch:
        """The last `query_lens` tokens of each sequence."""
        return PrefillBatch(self.tables, starts_of(query_lens), self.lens, max(query_lens))


def make_cache(
    lens: Sequence[int],
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    num_layers: int = 3,
    spare_blocks: int = 3,
) -> Cache:
    counts = [-(-n // block_size) for n in lens]
    num_blocks = sum(counts) + spare_blocks
    shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
    arena = torch.empty(shape, dtype=dtype, device=DEVICE)
    k, v = arena[:, num_layers // 2, 0], arena[:, num_layers // 2, 1]
    k.fill_(float("nan")), v.fill_(float("nan"))
    # From the top, so that a cache with many spare blocks is used at its far end.
    ids = (num_blocks - 1 - torch.randperm(sum(counts) + 3)[: sum(counts)]).to(torch.int32)
    tables = torch.randint(-(2**31), 2**31 - 1, (len(lens), max(counts) + 1), dtype=torch.int32)
    for b, mine in enumerate(ids.split(counts)):
        tables[b, : len(mine)] = mine
        at = torch.arange(lens[b])
        blocks, offsets = mine[at // block_size].long().to(DEVICE), (at % block_size).to(DEVICE)
        for cache in (k, v):
            rows = torch.randn(lens[b], num_kv_heads, head_dim, device=DEVICE)
            cache[blocks, :, offsets] = rows.to(dtype)
    lens_tensor = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    return Cache(PagedKv(k, v), tables.to(DEVICE), lens_tensor)


def run_decode(q: Tensor, cache: Cache, window: int | None, max_len: int) -> Tensor:
    return attention_triton.decode_attention(
        q, cache.kv, cache.decode(max_len), SCALE, window, torch.empty_like(q)
    )


def run_prefill(q: Tensor, cache: Cache, lens: Sequence[int], window: int | None) -> Tensor:
    return attention_triton.prefill_attention(
        q, cache.kv, cache.prefill(lens), SCALE, window, torch.empty_like(q)
    )


def check_decode(dtype: torch.dtype) -> Triples:
    lens = [1, 15, 16, 17, 63, 257, 500]
    for group, num_kv_heads, dim, block_size, window in ATTENTION_SHAPES:
        cache = make_cache(lens, num_kv_heads, dim, block_size, dtype)
        q = torch.randn(len(lens), group * num_kv_heads, dim, device=DEVICE).to(dtype)
        expected = attention_torch.attention_reference(
            q, cache.kv, cache.prefill([1] * len(lens)), scale=SCALE, window=window
        )
        case = f"group {group} dim {dim} block {block_size} window {window}"
        yield case, run_decode(q, cache, window, max(lens)), expected


def check_prefill(dtype: torch.dtype) -> Triples:
    lens, chunks = [1, 16, 17, 63, 200], [1, 15, 17, 40, 33]
    for group, num_kv_heads, dim, block_size, window in ATTENTION_SHAPES:
        cache = make_cache(lens, num_kv_heads, dim, block_size, dtype)
        q = torch.randn(sum(chunks), group * num_kv_heads, dim, device=DEVICE).to(dtype)
        expected = attention_torch.attention_reference(
            q, cache.kv, cache.prefill(chunks), scale=SCALE, window=window
        )
        case = f"group {group} dim {dim} block {block_size} window {window}"
        yield case, run_prefill(q, cache, chunks, window), expected


def check_far_blocks(dtype: torch.dtype) -> Triples:
    """Block offsets past 2^31 elements: a 32-bit product would wrap around."""
    if not CUDA or dtype == torch.float32 or torch.cuda.mem_get_info()[0] < 8 << 30:
        return
    num_layers, block_size, dim = 64, 16, 64
    blocks = (2**31 + 2**28) // (num_layers * 2 * block_size * dim)
    cache = make_cache([33, 20], 1, dim, block_size, dtype, num_layers, blocks)
    q = torch.randn(2, 4, dim, device=DEVICE).to(dtype)
    expected = attention_torch.attention_reference(q, cache.kv, cache.prefill([1, 1]), scale=SCALE)
    yield "decode", run_decode(q, cache, None, 33), expected
    yield "prefill", run_prefill(q, cache, [1, 1], None), expected


def check_write_kv(dtype: torch.dtype) -> Triples:
    for num_kv_heads, dim, block_size in ((3, 20, 4), (8, 128, 16), (1, 64, 1)):
        qkv = torch.randn(33, 3 * num_kv_heads, dim, device=DEVICE).to(dtype)
        k, v = qkv[:, num_kv_heads : 2 * num_kv_heads], qkv[:, 2 * num_kv_heads :]
        slots = torch.randperm(40 * block_size, device=DEVICE)[:33]
        slots[::5] = -1
        arena = torch.zeros(40, 3, 2, num_kv_heads, block_size, dim, device=DEVICE).to(dtype)
        expected = arena.clone()
        attention_triton.write_kv(k, v, PagedKv(arena[:, 1, 0], arena[:, 1, 1]), slots)
        kept = slots >= 0
        blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
        expected[:, 1, 0][blocks, :, offsets] = k[kept]
        expected[:, 1, 1][blocks, :, offsets] = v[kept]
        yield f"heads {num_kv_heads} dim {dim} block {block_size}", arena, expected


CHECKS: Checks = {
    "write_kv": check_write_kv,
    "decode_attention": check_decode,
    "prefill_attention": check_prefill,
    "past 2^31 elements": check_far_blocks,
}


def works(tiny: bool) -> Iterator[Work]:
    """Shapes of Llama-3-8B (32 heads, 8 kv heads of 128) and Llama-2-7B (32 of 32)."""
    dim, shrink = 128, 64 if tiny else 1
    for kv_heads, batch, context in ((8, 1, 4096), (8, 64, 2048), (8, 8, 32768), (32, 32, 2048)):
        batch, context = max(1, batch // shrink), context // shrink
        cache = make_cache([context] * batch, kv_heads, dim, 16, HALF, num_layers=1)
        q = torch.randn(batch, 32, dim, device=DEVICE, dtype=HALF)
        yield Work(
            "decode_attention",
            f"batch {batch} context {context} kv heads {kv_heads}",
            partial(run_decode, q, cache, None, context),
            2 * batch * context * kv_heads * dim * 2,
            4 * batch * context * 32 * dim,
        )
    for batch, chunk, context in ((1, 4096, 4096), (8, 1024, 1024), (1, 512, 16384)):
        batch, chunk, context = max(1, batch // shrink), chunk // shrink, context // shrink
        cache = make_cache([context] * batch, 8, dim, 16, HALF, num_layers=1)
        q = torch.randn(batch * chunk, 32, dim, device=DEVICE, dtype=HALF)
        pairs = batch * chunk * (context - chunk / 2)
        yield Work(
            "prefill_attention",
            f"batch {batch} chunk {chunk} context {context}",
            partial(run_prefill, q, cache, [chunk] * batch, None),
            2 * 2 * batch * context * 8 * dim + 2 * 2 * q.numel(),
            4 * pairs * 32 * dim,
        )
    for rows in (64 // shrink, 8192 // shrink):
        kv = torch.randn(rows, 16, dim, device=DEVICE).to(HALF)
        cache = make_cache([rows], 8, dim, 16, HALF, num_layers=1)
        slots = torch.randperm(rows, device=DEVICE)
        yield Work(
            "write_kv",
            f"{rows} tokens, 8 heads",
            partial(_write_halves, kv, cache, slots),
            2 * 2 * kv.numel(),
        )


def _write_halves(kv: Tensor, cache: Cache, slots: Tensor) -> None:
    """The first 8 heads of `kv` [T, 16, D] are K, the others V."""
    attention_triton.write_kv(kv[:, :8], kv[:, 8:], cache.kv, slots)
