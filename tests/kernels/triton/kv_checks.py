"""The Triton kernels over quantised caches: what is written, bit for bit, and attention over it.

Run by test_triton.py, in a process of its own like checks.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from penstock.kernels import quant
from penstock.kernels.reference.rowwise import rope_reference
from penstock.kernels.triton import attention as attention_triton
from penstock.kernels.triton import kv_write as kv_triton
from penstock.kernels.types import KvScales, PagedKv
from tests.kernels.kernel_cases import Paged, assert_close, dense_attention, paged
from tests.kernels.rolled_cases import Roll, dense_rolled_attention, rolled_paged
from tests.kernels.triton.interpreter import DEVICE, HALF

Case = TypeVar("Case", bound=Paged)
FP32, INT8, FP8 = torch.float32, torch.int8, torch.float8_e4m3fn
SCALE = 0.125

# dtype, of the cache, values a scale, query heads a kv head, kv heads, head_dim, window
SHAPES = [
    (FP32, INT8, 8, 7, 2, 24, None),
    (HALF, INT8, 80, 4, 1, 80, 30),
    (FP32, FP8, 128, 1, 2, 128, None),
    (HALF, FP8, 32, 20, 1, 64, None),
    (FP32, INT8, 64, 4, 1, 64, None),
]


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch):
    monkeypatch.setattr(attention_triton, "SPLIT", 128)


def quantised(x: Tensor, dtype: torch.dtype, group: int) -> tuple[Tensor, Tensor]:
    """A cache, or scratch, as codes and scales in memory of their own, strides as in an arena.

    In slots never written (NaN) the codes are 127, which is NaN in fp8, and the scales NaN.
    """
    codes, scales = quant.quantize_kv(x, dtype, group)
    poison = scales.isnan().repeat_interleave(group, -1)
    bits = codes.view(INT8).masked_fill(poison, 127)
    wide = [torch.stack((y, y, y), 1).flip(1)[:, 1] for y in (bits, scales)]
    return wide[0].view(dtype), wide[1]


def quantise(case: Case, dtype: torch.dtype, group: int) -> Case:
    """The case with quantised caches, and with the keys and values that they stand for."""
    keys, values = (
        [quant.dequantize_kv(*quant.quantize_kv(x, dtype, group)) for x in rows]
        for rows in (case.keys, case.values)
    )
    kv, scratch = quantise_layer(case.kv, dtype, group), case.kv.scratch
    if scratch is not None:
        kv = kv.with_scratch(quantise_layer(scratch, dtype, group))
    return replace(case, kv=kv, keys=keys, values=values)


def quantise_layer(kv: PagedKv, dtype: torch.dtype, group: int) -> PagedKv:
    (k, k_scales), (v, v_scales) = (quantised(x, dtype, group) for x in (kv.k, kv.v))
    return PagedKv(k, v, KvScales(k_scales, v_scales))


def attend(q: Tensor, case: Paged, query_lens: list[int], window: int | None) -> Tensor:
    rest = (torch.full_like(q.contiguous(), float("nan")), getattr(case, "rolling", None))
    if max(query_lens) == 1:
        return attention_triton.decode_attention(q, case.kv, case.decode(), SCALE, window, *rest)
    chunks = case.prefill(query_lens)
    return attention_triton.prefill_attention(q, case.kv, chunks, SCALE, window, *rest)


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 9, 18]], ids=["decode", "prefill"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention(shape, query_lens, monkeypatch):
    dtype, stored, group, heads, num_kv_heads, head_dim, window = shape
    heads = heads if max(query_lens) == 1 else min(heads, 2)  # each is a program of prefill
    lens = [1, 17, 130]
    case = quantise(
        paged(lens, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, device=DEVICE),
        stored,
        group,
    )
    q = torch.randn(sum(query_lens), heads * num_kv_heads + 1, head_dim).to(DEVICE, dtype)[:, 1:]
    expected = dense_attention(q, case, query_lens, SCALE, window)
    y = attend(q, case, query_lens, window)
    assert_close(y, expected)
    if stored == FP8:  # the bits alone, as on a card without fp8
        monkeypatch.setattr(attention_triton, "_readable", lambda cache: cache.view(torch.uint8))
        assert torch.equal(attend(q, case, query_lens, window), y)


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [5, 3, 17]], ids=["decode", "prefill"])
@pytest.mark.parametrize(("stored", "group"), [(INT8, 8), (FP8, 40)])
def test_rolled_attention_and_scratch(stored, group, query_lens):
    case = quantise(
        rolled_paged(
            [30, 90, 200],
            query_lens,
            [None, Roll(4, 40, 16), Roll(16, 64, 32)],
            num_heads=3,
            num_kv_heads=1,
            head_dim=40,
            num_scratch=2,
            device=DEVICE,
        ),
        stored,
        group,
    )
    q = torch.randn(case.rolling.q_sink.shape).to(DEVICE)
    y = attend(q, case, query_lens, None)
    assert_close(y, dense_rolled_attention(q, case, SCALE))


def extreme_rows(num_tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """[T, KV, D]: all sizes, ties between two codes, zeros, and what is not finite."""
    x = torch.randn(num_tokens, num_kv_heads, head_dim)
    x[0] *= torch.logspace(-30, 4, head_dim)
    x[1] = torch.arange(head_dim) % 255 / 2 - 63.5  # halves of a scale of 1
    x[1, 0, 0], x[1, :, -1] = 127, -127
    x[2] = 0
    x[3, 0] *= 1e-5  # the least scale
    x[3, -1, 3], x[4, 0, 1], x[4, -1, 2] = float("nan"), float("inf"), -float("inf")
    x[5] *= 1e6 if dtype == FP32 else 1e4
    return x.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [FP32, HALF])
@pytest.mark.parametrize(
    ("stored", "group", "head_dim"), [(INT8, 8, 24), (INT8, 20, 20), (FP8, 8, 8), (FP8, 32, 64)]
)
def test_what_is_written(dtype, stored, group, head_dim):
    """Codes and scales are those of `quantize_kv`; nothing else is touched."""
    kv = torch.cat([extreme_rows(7, 3, head_dim, dtype) for _ in range(2)], 1)
    k, v = kv[:, :3], kv[:, 3:]
    codes = torch.full((9, 2, 3, 4, head_dim), 85, dtype=INT8, device=DEVICE).view(stored)
    sizes = torch.full((9, 2, 3, 4, head_dim // group), 85.0, dtype=torch.float16, device=DEVICE)
    slots = torch.tensor([7, 0, 22, 27, -1, 35, 30], device=DEVICE)  # of 6 blocks and 3 of scratch
    expected_codes, expected_sizes = codes.clone(), sizes.clone()
    for side, rows in enumerate((k, v)):
        made, scale = quant.quantize_kv(rows.cpu(), stored, group)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                at = (slot // 4, side, slice(None), slot % 4)
                expected_codes.view(INT8)[at] = made[token].view(INT8).to(DEVICE)
                expected_sizes[at] = scale[token].to(DEVICE)
    layer, scratch = (
        PagedKv(codes[part, 0], codes[part, 1], KvScales(sizes[part, 0], sizes[part, 1]))
        for part in (slice(6), slice(6, None))
    )
    kv_triton.write_kv(k, v, layer.with_scratch(scratch), slots)
    assert torch.equal(codes.view(INT8), expected_codes.view(INT8))
    torch.testing.assert_close(sizes, expected_sizes, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("stored", "group"), [(None, 0), (INT8, 8), (FP8, 80)])
def test_rope_write_kv(stored, group):
    """What `rope_` and `write_kv` do one after the other; k stays as it is."""
    qkv = torch.randn(5, 9, 80).to(DEVICE, HALF)
    angle = torch.randn(5, 16).to(DEVICE)
    cos, sin = angle.cos(), angle.sin()  # 32 dimensions of 80 turn
    slots = torch.tensor([3, -1, 0, 9, 4], device=DEVICE)
    cache = torch.zeros(3, 2, 2, 4, 80, dtype=HALF, device=DEVICE).to(stored or HALF)
    sizes = torch.zeros(3, 2, 2, 4, 80 // (group or 80), dtype=torch.float16, device=DEVICE)
    apart, sizes_apart, apart_qkv = cache.clone(), sizes.clone(), qkv.clone()
    for fused, row, home, sizes_home in (
        (True, qkv, cache, sizes),
        (False, apart_qkv, apart, sizes_apart),
    ):
        q, k, v = row[:, :5], row[:, 5:7], row[:, 7:]
        scales = KvScales(sizes_home[:, 0], sizes_home[:, 1]) if stored else None
        layer = PagedKv(home[:, 0], home[:, 1], scales)
        if fused:
            kv_triton.rope_write_kv(q, k, v, cos, sin, layer, slots)
        else:
            before = k.clone()
            q.copy_(rope_reference(q, cos, sin))
            k.copy_(rope_reference(k, cos, sin))
            kv_triton.write_kv(k, v, layer, slots)
            k.copy_(before)
    assert_close(qkv, apart_qkv)
    exact = DEVICE == "cpu"  # a GPU may fuse a product and a sum here, and there not
    assert_close(cache.float(), apart.float()) if not exact else None
    assert not exact or torch.equal(cache.view(torch.uint8), apart.view(torch.uint8))
    assert not exact or torch.equal(sizes, sizes_apart)


def test_a_lost_key_makes_no_number():
    """A group that was not finite has the scale NaN, and so has all that attends to it."""
    case = quantise(paged([20, 20], num_kv_heads=1, head_dim=16, device=DEVICE), INT8, 8)
    assert case.kv.scales is not None
    case.kv.scales.k[int(case.tables[1, 0]), 0, 5, 1] = float("nan")
    y = attend(torch.randn(2, 2, 16).to(DEVICE), case, [1, 1], None)
    assert y[0].isfinite().all() and y[1].isnan().all()
