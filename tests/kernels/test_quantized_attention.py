"""Attention over caches of int8 and fp8: the stored bits are those of `quantize_kv`, and what is
read is what was stored. Against dense oracles, blind to poison, and row by row the same.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels import attention
from penstock.kernels.quant import quantize_kv
from penstock.kernels.rowwise import rope_
from penstock.kernels.types import KvScales, PagedKv
from tests.kernels.kernel_cases import Paged, assert_close, dense_attention, paged
from tests.kernels.rolled_cases import Roll, RolledPaged, dense_rolled_attention, rolled_paged

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
SCALE = 0.125
CONTEXTS = [1, 15, 16, 17, 63, 500]

# cache, group (0: the head), dtype of q, query heads a kv head, kv heads, head_dim, block_size
SHAPES = [
    (INT8, 8, FP32, 1, 2, 64, 16),
    (INT8, 8, BF16, 7, 1, 40, 16),  # a tail of one group
    (INT8, 32, FP32, 7, 2, 64, 16),
    (INT8, 64, BF16, 16, 1, 128, 32),
    (INT8, 0, FP32, 3, 2, 80, 1),
    (INT8, 0, FP32, 9, 1, 20, 5),
    # Codes in integers: bf16, groups of 16 and more.
    (INT8, 32, BF16, 3, 3, 64, 16),
    (INT8, 16, BF16, 5, 2, 48, 5),
    (INT8, 32, BF16, 2, 2, 96, 128),
    (INT8, 0, BF16, 1, 2, 20, 16),
    (INT8, 0, BF16, 4, 2, 80, 1),
    (FP8, 8, FP32, 4, 1, 24, 4),
    (FP8, 32, BF16, 2, 2, 96, 128),
    (FP8, 64, FP32, 1, 2, 64, 16),
    (FP8, 0, BF16, 5, 1, 72, 16),
]


def shape_id(shape: tuple) -> str:
    kv, group, dtype, heads, num_kv_heads, head_dim, block_size = shape
    names = [str(each).removeprefix("torch.") for each in (kv, dtype)]
    return f"{names[0]}-{group}-{names[1]}-g{heads}-kv{num_kv_heads}-d{head_dim}-b{block_size}"


def build(shape: tuple, lens: list[int], **options) -> tuple[Paged, int]:
    kv, group, dtype, heads, num_kv_heads, head_dim, block_size = shape
    case = paged(
        lens,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        kv=kv,
        group=group,
        **options,
    )
    return case, heads * num_kv_heads


def decode(q: Tensor, case: Paged, rows: slice = slice(None), **options) -> Tensor:
    return attention.decode_attention(
        q[rows],
        case.kv,
        case.decode(rows),
        scale=SCALE,
        **options,
    )


def prefill(q: Tensor, case: Paged, query_lens: list[int], **options) -> Tensor:
    return attention.prefill_attention(
        q,
        case.kv,
        case.prefill(query_lens, options.pop("lens", None)),
        scale=SCALE,
        **options,
    )


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.parametrize("window", [None, 20])
def test_the_dense_result(cpu_path, shape, window):
    query_lens = [1, 15, 1, 16, 40, 70]
    oldest = None
    if window is not None:
        oldest = [max(0, n - m - window + 1) for n, m in zip(CONTEXTS, query_lens, strict=True)]
    case, num_heads = build(shape, CONTEXTS, oldest=oldest)
    q = torch.randn(len(CONTEXTS), num_heads, case.k_cache.shape[3]).to(shape[2])
    ones = [1] * len(CONTEXTS)
    assert_close(decode(q, case, window=window), dense_attention(q, case, ones, SCALE, window))
    q = torch.randn(sum(query_lens), num_heads, case.k_cache.shape[3]).to(shape[2])
    y = prefill(q, case, query_lens, window=window)
    assert_close(y, dense_attention(q, case, query_lens, SCALE, window))


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_rolled_contexts_and_scratch(cpu_path, shape):
    kv, group, dtype, heads, num_kv_heads, head_dim, block_size = shape
    for query_lens in ([1, 1, 1, 1], [60, 3, 1, 40]):
        lens = [300, 17, 401, 90]
        rolls = [Roll(4, 100, 16), Roll(1, 33, 1), None, Roll(16, 64, 64)]
        case = rolled_paged(
            lens, query_lens, rolls, num_heads=heads * num_kv_heads, num_kv_heads=num_kv_heads,
            head_dim=head_dim, block_size=block_size, dtype=dtype, num_scratch=2, kv=kv,
            group=group,
        )  # fmt: skip
        q = torch.randn(sum(query_lens), heads * num_kv_heads, head_dim).to(dtype)
        expected = dense_rolled_attention(q, case, SCALE)
        assert_close(prefill(q, case, query_lens, rolling=case.rolling), expected)
        if max(query_lens) == 1:
            assert_close(decode(q, case, rolling=case.rolling), expected)
            assert isinstance(case, RolledPaged)


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_rows_do_not_depend_on_batch_chunks_or_threads(native_path, shape):
    lens = [700, *torch.randint(1, 600, (10,)).tolist()]
    case, num_heads = build(shape, lens)
    q = torch.randn(len(lens), num_heads, case.k_cache.shape[3]).to(shape[2])
    together = decode(q, case)
    torch.set_num_threads(2)
    assert torch.equal(decode(q, case), together)
    for b in range(len(lens)):
        assert torch.equal(decode(q, case, slice(b, b + 1))[0], together[b])
    case, num_heads = build(shape, [200, 33])
    q = torch.randn(233, num_heads, case.k_cache.shape[3]).to(shape[2])
    together = prefill(q, case, [200, 33])
    torch.set_num_threads(1)
    assert torch.equal(prefill(q, case, [200, 33]), together)
    for chunk in (1, 7, 64):
        for first in range(0, 200, chunk):
            last = min(200, first + chunk)
            lens_now = torch.tensor([last], dtype=torch.int32)
            alone = prefill(q[first:last], case, [last - first], lens=lens_now)
            assert torch.equal(alone, together[first:last]), (chunk, first)


def extremes(shape: tuple[int, ...]) -> Tensor:
    """Ordinary values of many sizes, and groups of what a quantiser trips over."""
    x = (
        torch.randn(shape)
        * torch.tensor([1e-6, 1e-3, 1.0, 30.0, 1e4]).repeat(shape[0])[: shape[0], None, None]
    )
    x[0] = 0.0
    x[1, 0] = -0.0
    x[2, 0, 0], x[3, 0, 0], x[4, 0, 1] = float("nan"), float("inf"), -float("inf")
    x[5] = 3e38
    x[6] = torch.arange(x[6].numel()).view(x[6].shape) - 63.5  # ties, at a scale of 1
    x[6, :, ::8] = 127.0
    x[7] = x[6] * (448 / 127)
    return x


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(("kv", "group", "head_dim"), [
    (INT8, 8, 40), (INT8, 32, 64), (INT8, 0, 20), (FP8, 8, 24), (FP8, 64, 128), (FP8, 0, 36),
])  # fmt: skip
def test_written_are_the_bits_of_the_reference(cpu_path, dtype, kv, group, head_dim):
    """Codes and scales, at their slots and nowhere else, in the pool and in scratch."""
    num_blocks, num_kv_heads, size, group = 4, 3, 4, group or head_dim
    num_groups = head_dim // group
    shape = (num_blocks + 2, 2, num_kv_heads, size)
    codes = torch.full((*shape, head_dim), 0x55, dtype=torch.uint8)
    each = torch.full((*shape, num_groups), 7.0, dtype=FP16)
    cache, more = codes[:num_blocks].view(kv), codes[num_blocks:].view(kv)
    halves = (each[:num_blocks], each[num_blocks:])
    fused = extremes((10, 3 * num_kv_heads, head_dim)).to(dtype)
    k, v = fused[:, num_kv_heads : 2 * num_kv_heads], fused[:, 2 * num_kv_heads :]
    slots = torch.tensor([7, 0, -1, 13, 15, 16, 23, 4, -5, 18])
    of_blocks, of_more = (KvScales(half[:, 0], half[:, 1]) for half in halves)
    scratch = PagedKv(more[:, 0], more[:, 1], of_more)
    attention.write_kv(k, v, PagedKv(cache[:, 0], cache[:, 1], of_blocks, scratch), slots)
    want_codes, want_each = torch.full_like(codes, 0x55), torch.full_like(each, 7.0)
    for side, rows in enumerate((k, v)):
        made, scales = quantize_kv(rows, kv, group)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                at = (slot // size, side, slice(None), slot % size)
                want_codes[at], want_each[at] = made.view(torch.uint8)[token], scales[token]
    torch.testing.assert_close(codes, want_codes, rtol=0, atol=0)
    torch.testing.assert_close(each, want_each, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("kv", [None, INT8, FP8])
def test_rope_and_write_in_one_pass(cpu_path, dtype, kv):
    """The bits of rope_ and then write_kv."""
    qkv = torch.randn(9, 8, 40).to(dtype)  # 4 query heads, 2 kv heads
    angles = torch.randn(9, 16)  # 32 of 40 dimensions turn
    slots = torch.tensor([3, -1, 8, 9, 10, 0, 31, 17, 5])
    made = []
    for one_pass in (False, True):
        x = qkv.clone()
        q, k, v = x.split_with_sizes([4, 2, 2], dim=1)
        cache = torch.zeros(8, 2, 2, 4, 40, dtype=torch.uint8 if kv else dtype)
        each = torch.zeros(8, 2, 2, 4, 5, dtype=FP16)
        views = cache.view(kv) if kv else cache
        scales = KvScales(each[:, 0], each[:, 1]) if kv else None
        layer = PagedKv(views[:, 0], views[:, 1], scales)
        if one_pass:
            attention.rope_write_kv(q, k, v, angles.cos(), angles.sin(), layer, slots)
        else:
            rope_(q, k, angles.cos(), angles.sin())
            attention.write_kv(k, v, layer, slots)
        made.append((q, cache, each))
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other)


def test_a_group_that_the_library_does_not_know_falls_back():
    case, num_heads = build((INT8, 5, FP32, 2, 1, 20, 4), [40])
    q = torch.randn(1, num_heads, 20)
    assert_close(decode(q, case), dense_attention(q, case, [1], SCALE, None))


def test_a_cache_of_codes_needs_scales():
    case, num_heads = build(SHAPES[0], [5])
    with pytest.raises(AssertionError):
        attention.decode_attention(
            torch.randn(1, num_heads, 64),
            replace(case.kv, scales=None),
            case.decode(),
            scale=1.0,
        )


@pytest.mark.parametrize(
    "shape", [each for each in SHAPES if each[:3:2] == (INT8, BF16)], ids=shape_id
)
@pytest.mark.parametrize("peaks", [False, True], ids=["even", "peaks"])
def test_rounding_queries_and_weights_costs_nothing(native_path, shape, peaks):
    """bf16 queries over int8 codes, by integers (code_tiles.h): the error is that of bf16 results.

    With `peaks` one weight of a row is near 1 and the others are thousands of times smaller.
    """
    lens = [64, 200, 333, 500]
    case, num_heads = build(shape, lens)
    q = torch.randn(len(lens), num_heads, case.k_cache.shape[3]).mul(8 if peaks else 1).to(BF16)
    ones = [1] * len(lens)
    exact = dense_attention(q.float(), case, ones, SCALE, None)
    in_fp32 = decode(q.float(), case)
    assert_close(in_fp32, exact)
    rounded = (in_fp32.bfloat16().float() - exact).abs()
    error = (decode(q, case).float() - exact).abs()
    assert error.mean() <= 1.02 * rounded.mean()
    assert error.max() <= 1.02 * rounded.max()
