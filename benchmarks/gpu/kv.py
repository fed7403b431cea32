"""Checks and timings for check.py of caches other than a whole one of the model's own
dtype: quantised, rolled (sinks and a window), and partly in scratch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.attention import SCALE, Cache, make_cache
from benchmarks.gpu.cases import DEVICE, HALF, Checks, Triples, Work
from penstock.kernels import quant
from penstock.kernels.reference import attention as attention_torch
from penstock.kernels.reference.rowwise import rope_reference
from penstock.kernels.triton import attention as attention_triton
from penstock.kernels.triton import kv_write as kv_triton
from penstock.kernels.types import KvScales, PagedKv, Rolling

INT8, FP8 = torch.int8, torch.float8_e4m3fn
NAMES = {INT8: "int8", FP8: "fp8"}
# format, values a scale, query heads a kv head, kv heads, head_dim, block_size, window
SHAPES = [
    (INT8, 8, 2, 2, 128, 16, None),
    (INT8, 64, 7, 1, 64, 16, 40),
    (INT8, 80, 1, 2, 80, 32, None),
    (FP8, 32, 4, 1, 128, 16, None),
    (FP8, 128, 1, 2, 128, 16, 100),
]
SINKS, PAGE = 4, 16


def quantise(cache: Cache, dtype: torch.dtype, group: int) -> Cache:
    """The cache as codes and scales; both are NaN (127, in int8) in slots never written."""
    sides = []
    for x in (cache.kv.k, cache.kv.v):
        codes, scales = quant.quantize_kv(x, dtype, group)
        lost = scales.isnan().repeat_interleave(group, -1)
        sides.append((codes.view(INT8).masked_fill_(lost, 127).view(dtype), scales))
    (k, k_scales), (v, v_scales) = sides
    return replace(cache, kv=PagedKv(k, v, KvScales(k_scales, v_scales)))


def run(
    q: Tensor, cache: Cache, query_lens: Sequence[int], max_len: int, window: int | None,
    rolling: Rolling | None = None,
) -> Tensor:  # fmt: skip
    """Decode where each sequence has one query, else prefill."""
    out = torch.empty_like(q)
    if max(query_lens) == 1:
        return attention_triton.decode_attention(
            q, cache.kv, cache.decode(max_len), SCALE, window, out, rolling
        )
    return attention_triton.prefill_attention(
        q, cache.kv, cache.prefill(query_lens), SCALE, window, out, rolling
    )


def check(
    case: str, q: Tensor, cache: Cache, query_lens: Sequence[int], window: int | None,
    rolling: Rolling | None = None,
) -> Triples:  # fmt: skip
    kv = cache.kv
    if kv.scales is not None:  # at once: the reference would do so for each query and key again
        k, v = quant.dequantize_kv(kv.k, kv.scales.k), quant.dequantize_kv(kv.v, kv.scales.v)
        kv = PagedKv(k, v)
    expected = attention_torch.attention_reference(
        q, kv, cache.prefill(query_lens), scale=SCALE, window=window, rolling=rolling
    )
    yield case, run(q, cache, query_lens, int(cache.lens.max()), window, rolling), expected


def check_quantised(dtype: torch.dtype) -> Triples:
    for lens, chunks in (([1, 17, 300], [1] * 3), ([1, 70], [1, 20])):
        for stored, group, heads, kv_heads, dim, block_size, window in SHAPES:
            cache = quantise(make_cache(lens, kv_heads, dim, block_size, dtype), stored, group)
            q = torch.randn(sum(chunks), heads * kv_heads, dim, device=DEVICE).to(dtype)
            kind = "decode" if max(chunks) == 1 else "prefill"
            case = f"{kind} {NAMES[stored]} by {group}, dim {dim} window {window}"
            yield from check(case, q, cache, chunks, window)


def roll(q: Tensor, lens: Sequence[int], query_lens: Sequence[int], window: int) -> Rolling:
    """A table that keeps one page of sinks and the last pages of each sequence.

    Every query sees SINKS tokens and those from the start of the first kept page on.
    """
    starts, bases = [], []
    for length, count in zip(lens, query_lens, strict=True):
        start = max(PAGE, (length - count + 1 - window) // PAGE * PAGE)
        starts += [start] * count
        bases.append(start // PAGE - 1)

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    return Rolling(
        q_sink=torch.randn(q.shape, device=DEVICE).to(q.dtype),
        sink_ends=ints([SINKS] * len(starts)),
        window_starts=ints(starts),
        sink_blocks=ints([1] * len(lens)),
        bases=ints(bases),
        max_visible_len=max(lens) - min(starts),
    )


def roll_cache(
    lens: Sequence[int], kv_heads: int, dim: int, dtype: torch.dtype, q: Tensor,
    query_lens: Sequence[int], window: int,
) -> tuple[Cache, Rolling]:  # fmt: skip
    """Sequences of `lens` tokens, of which the cache holds what is left."""
    rolling = roll(q, lens, query_lens, window)
    bases = rolling.bases.tolist()
    kept = [length - PAGE * base for length, base in zip(lens, bases, strict=True)]
    cache = make_cache(kept, kv_heads, dim, PAGE, dtype)
    return replace(cache, lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE)), rolling


def with_scratch(cache: Cache) -> Cache:
    """The last block of each sequence moves to scratch; its old place holds NaN."""
    k, v = cache.kv.k, cache.kv.v
    pages = (cache.lens - 1) // k.shape[2]
    rows = torch.arange(len(pages), device=DEVICE)
    blocks = cache.tables[rows, pages.long()].long()
    more = torch.stack((k[blocks], v[blocks]), 1)
    tables = cache.tables.clone()
    tables[rows, pages.long()] = (len(k) + rows).to(torch.int32)
    k[blocks] = v[blocks] = float("nan")
    scratch = PagedKv(more[:, 0], more[:, 1])
    return replace(cache, tables=tables, kv=cache.kv.with_scratch(scratch))


def check_rolled(dtype: torch.dtype) -> Triples:
    for lens, chunks in (([30, 400], [1] * 2), ([50, 200], [9, 20])):
        for heads, kv_heads, dim in ((2, 2, 128), (7, 1, 64)):
            q = torch.randn(sum(chunks), heads * kv_heads, dim, device=DEVICE).to(dtype)
            cache, rolling = roll_cache(lens, kv_heads, dim, dtype, q, chunks, window=50)
            kind = "decode" if max(chunks) == 1 else "prefill"
            case = f"{kind} sinks {SINKS} window 50, group {heads}"
            yield from check(case, q, cache, chunks, None, rolling)
            yield from check(f"{case} int8", q, quantise(cache, INT8, 8), chunks, None, rolling)


def check_scratch(dtype: torch.dtype) -> Triples:
    for lens, chunks in (([1, 16, 100], [1] * 3), ([40, 70], [20, 17])):
        q = torch.randn(sum(chunks), 8, 128, device=DEVICE).to(dtype)
        cache = with_scratch(make_cache(lens, 2, 128, 16, dtype))
        kind = "decode" if max(chunks) == 1 else "prefill"
        yield from check(f"{kind} last block apart", q, cache, chunks, None)


def check_write(dtype: torch.dtype) -> Triples:
    """Through the rotary embedding, too. Codes may differ by one where a GPU fuses a product and a
    sum before the rounding, so the values that are stored are compared."""
    for stored, group, _, kv_heads, dim, block_size, _ in SHAPES:
        qkv = torch.randn(33, 3 * kv_heads, dim, device=DEVICE).to(dtype)
        q, k, v = qkv.split(kv_heads, 1)
        angle = torch.randn(33, dim // 2, device=DEVICE)
        cos, sin = angle.cos(), angle.sin()
        slots = torch.randperm(40 * block_size, device=DEVICE)[:33]
        cache = make_cache([1], kv_heads, dim, block_size, dtype, spare_blocks=39)
        small = quantise(cache, stored, group)
        turned = [rope_reference(x, cos, sin) for x in (q, k)]
        kv_triton.rope_write_kv(q, k, v, cos, sin, small.kv, slots)
        scales = small.kv.scales
        assert scales is not None
        name = f"{NAMES[stored]} by {group}, dim {dim}"
        yield f"{name}: q", q, turned[0]
        blocks, offsets = slots // block_size, slots % block_size
        for side, codes, sizes, rows in (
            ("k", small.kv.k, scales.k, turned[1]), ("v", small.kv.v, scales.v, v)
        ):  # fmt: skip
            held = codes.view(INT8)[blocks, :, offsets].view(stored)
            got = quant.dequantize_kv(held, sizes[blocks, :, offsets])
            error = (got - rows.float()).abs().unflatten(-1, (-1, group))
            # Half a code, and the rounding of the scale; fp8 has 3 bits of mantissa.
            largest = rows.float().abs().unflatten(-1, (-1, group)).amax(-1, keepdim=True)
            allowed = largest * (0.51 / 127 if stored == INT8 else 0.51 / 8)
            yield f"{name}: {side}", (error > allowed + 1e-4).float(), torch.zeros_like(error)


CHECKS: Checks = {
    "quantised KV": check_quantised,
    "quantising write": check_write,
    "rolled KV": check_rolled,
    "scratch KV": check_scratch,
}


def key_bytes(dim: int, stored: torch.dtype | None, group: int) -> float:
    """Of K and V of one key and kv head."""
    return 2 * (dim * 2 if stored is None else dim + 2 * dim / group)


def works(tiny: bool) -> Iterator[Work]:
    """Shapes of Llama-3-8B: 32 heads, 8 kv heads of 128."""
    formats: list[tuple[str, torch.dtype | None, int]] = [
        ("16 bit", None, 1), ("int8 by 8", INT8, 8), ("int8 by 64", INT8, 64),
        ("int8 by 128", INT8, 128), ("fp8 by 64", FP8, 64),
    ]  # fmt: skip
    shapes = [(1, 8192), (16, 4096), (64, 2048), (256, 1024)]
    for batch, context in [(1, 40), (2, 20)] if tiny else shapes:
        whole = make_cache([context] * batch, 8, 128, 16, HALF, num_layers=1)
        q = torch.randn(batch, 32, 128, device=DEVICE, dtype=HALF)
        for name, stored, group in formats:
            cache = whole if stored is None else quantise(whole, stored, group)
            yield Work(
                "decode_attention",
                f"{name}, batch {batch} context {context}",
                partial(run, q, cache, [1] * batch, context, None),
                batch * context * 8 * key_bytes(128, stored, group),
                4 * batch * context * 32 * 128,
            )
    yield from _prefills(formats, tiny)
    yield from _rolled_works(tiny)
    yield from _writes(formats, tiny)


def _prefills(formats: Sequence[tuple[str, torch.dtype | None, int]], tiny: bool) -> Iterator[Work]:
    for batch, chunk, context in [(1, 17, 40)] if tiny else [(1, 4096, 4096), (8, 512, 8192)]:
        whole = make_cache([context] * batch, 8, 128, 16, HALF, num_layers=1)
        q = torch.randn(batch * chunk, 32, 128, device=DEVICE, dtype=HALF)
        for name, stored, group in formats:
            cache = whole if stored is None else quantise(whole, stored, group)
            yield Work(
                "prefill_attention",
                f"{name}, batch {batch} chunk {chunk} context {context}",
                partial(run, q, cache, [chunk] * batch, context, None),
                batch * context * 8 * key_bytes(128, stored, group) + 2 * 2 * q.numel(),
                4 * batch * chunk * (context - chunk / 2) * 32 * 128,
            )


def _rolled_works(tiny: bool) -> Iterator[Work]:
    """A million tokens long, of which 4 and the last 2048 are seen; and blocks in scratch."""
    batch, length, window = (2, 200, 32) if tiny else (64, 1_000_000, 2048)
    q = torch.randn(batch, 32, 128, device=DEVICE, dtype=HALF)
    cache, rolling = roll_cache([length] * batch, 8, 128, HALF, q, [1] * batch, window)
    seen = SINKS + rolling.max_visible_len
    yield Work(
        "decode_attention",
        f"rolled, batch {batch} window {window}",
        lambda: run(q, cache, [1] * batch, length, None, rolling),
        batch * seen * 8 * key_bytes(128, None, 1),
        4 * batch * seen * 32 * 128,
    )
    whole = with_scratch(make_cache([window] * batch, 8, 128, 16, HALF, num_layers=1))
    yield Work(
        "decode_attention",
        f"scratch, batch {batch} context {window}",
        lambda: run(q, whole, [1] * batch, window, None),
        batch * window * 8 * key_bytes(128, None, 1),
        4 * batch * window * 32 * 128,
    )


def _writes(formats: Sequence[tuple[str, torch.dtype | None, int]], tiny: bool) -> Iterator[Work]:
    for rows in (5,) if tiny else (64, 8192):
        qkv = torch.randn(rows, 48, 128, device=DEVICE).to(HALF)
        angle = torch.randn(rows, 64, device=DEVICE)
        cos, sin, slots = angle.cos(), angle.sin(), torch.randperm(rows, device=DEVICE)
        whole = make_cache([rows], 8, 128, 16, HALF, num_layers=1)
        for name, stored, group in formats:
            cache = whole if stored is None else quantise(whole, stored, group)
            yield Work(
                "rope_write_kv",
                f"{name}, {rows} tokens",
                partial(_rope_write, qkv, cos, sin, cache, slots),
                2 * 2 * rows * 32 * 128
                + rows * 8 * (2 * 2 * 128 + key_bytes(128, stored, group))
                + 2 * 4 * cos.numel(),
            )


def _rope_write(qkv: Tensor, cos: Tensor, sin: Tensor, cache: Cache, slots: Tensor) -> None:
    """`qkv` [T, 48, D]: 32 heads of Q, 8 of K, 8 of V."""
    q, k, v = qkv.split((32, 8, 8), 1)
    kv_triton.rope_write_kv(q, k, v, cos, sin, cache.kv, slots)
