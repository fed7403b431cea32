"""The Triton attention kernels over rolled contexts and scratch blocks. Run by test_triton.py, in a
process of its own like checks.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels.triton import attention as attention_triton
from penstock.kernels.types import DecodeBatch, PagedKv, Rolling
from tests.kernels.kernel_cases import assert_close, paged
from tests.kernels.rolled_cases import (
    INT32,
    Roll,
    RolledPaged,
    dense_rolled_attention,
    rolled_paged,
)
from tests.kernels.triton.interpreter import DEVICE, HALF

FP32 = torch.float32
SCALE = 0.125

# dtype, query heads a kv head, kv heads, head_dim, block_size, sinks, window, roll, scratch blocks,
# window of the layer
SHAPES = [
    (FP32, 1, 2, 64, 16, 4, 100, 16, 0, None),
    (FP32, 3, 1, 64, 16, 16, 128, 128, 2, None),
    (FP32, 3, 1, 20, 1, 1, 33, 1, 5, None),
    (FP32, 2, 2, 80, 8, 16, 200, 128, 0, 40),
    (HALF, 8, 1, 128, 32, 4, 130, 64, 1, None),
]


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch):
    monkeypatch.setattr(attention_triton, "SPLIT", 128)


def build(shape: tuple, lens: list[int], query_lens: list[int], full: set[int]) -> RolledPaged:
    dtype, group, num_kv_heads, head_dim, block_size, sinks, window, roll, num_scratch, _ = shape
    return rolled_paged(
        lens,
        query_lens,
        [None if b in full else Roll(sinks, window, roll) for b in range(len(lens))],
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        num_scratch=num_scratch,
        device=DEVICE,
    )


def queries(case: RolledPaged) -> Tensor:
    return torch.randn(case.rolling.q_sink.shape).to(DEVICE, case.k_cache.dtype)


def decode(q: Tensor, case: RolledPaged, window: int | None = None) -> Tensor:
    return attention_triton.decode_attention(
        q, case.kv, case.decode(), SCALE, window, torch.full_like(q, float("nan")), case.rolling
    )


def prefill(q: Tensor, case: RolledPaged, window: int | None = None) -> Tensor:
    return attention_triton.prefill_attention(
        q, case.kv, case.prefill(case.query_lens), SCALE, window,
        torch.full_like(q, float("nan")), case.rolling,
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_decode(shape):
    head = -(-shape[5] // shape[4]) * shape[4]
    edge = head + shape[6]
    lens = [1, 1, head, head + 1, edge, edge + 1, 150, 400]
    case = build(shape, lens, [1] * len(lens), full={0, 6})
    q = queries(case)
    y = decode(q, case, shape[-1])
    assert_close(y, dense_rolled_attention(q, case, SCALE, shape[-1]))


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill(shape):
    shape = (shape[0], min(shape[1], 3), *shape[2:])  # each head is a program here
    edge = -(-shape[5] // shape[4]) * shape[4] + shape[6]
    case = build(shape, [1, edge + 20, 40, 400], [1, 40, 17, 17], full={2})
    q = queries(case)
    y = prefill(q, case, shape[-1])
    assert_close(y, dense_rolled_attention(q, case, SCALE, shape[-1]))


def test_a_full_row_has_the_bits_that_it_has_without_rolling():
    for query_lens, run in (([1, 1], decode), ([20, 17], prefill)):
        case = build((FP32, 2, 1, 16, 16, 4, 100, 16, 1, None), [200, 290], query_lens, {1})
        q, first = queries(case), query_lens[0]
        alone = replace(
            case,
            rolling=None,  # type: ignore[arg-type]  # without, on purpose
            tables=case.tables[1:],
            lens=case.lens[1:],
            query_lens=query_lens[1:],
        )
        assert torch.equal(run(q[first:], alone), run(q, case)[first:])


def test_an_endless_sequence_costs_its_visible_keys():
    """`max_visible_len` sizes the launch: three programs, at a million tokens."""
    position, visible, sinks = 1_000_000, 70, 4
    start = position + 1 - visible
    base = start // 16 - 1
    case = paged([visible + start % 16 + 16], num_kv_heads=1, head_dim=32, device=DEVICE)
    sink_end, window_start, sink_blocks, dropped = (
        torch.tensor([i], dtype=INT32, device=DEVICE) for i in (sinks, start, 1, base)
    )
    q, q_sink = torch.randn(2, 1, 3, 32).to(DEVICE)
    rolling = Rolling(q_sink, sink_end, window_start, sink_blocks, dropped, visible)
    assert attention_triton._num_splits(position + 1, None, rolling) == 3
    assert attention_triton._num_splits(position + 1, 20, rolling) == 3
    assert attention_triton._num_splits(position + 1, 20, None) == 2
    lens = torch.tensor([position + 1], dtype=INT32, device=DEVICE)
    keys, values = ((x[0][:sinks], x[0][-visible:]) for x in (case.keys, case.values))
    near, plain = (
        torch.einsum("qhd,skd->hs", a, k) for a, k in zip((q_sink, q), keys, strict=True)
    )
    weights = (torch.cat((near, plain), -1) * SCALE).softmax(-1)
    expected = (weights @ torch.cat(values)[:, 0])[None]
    decoded, nan = DecodeBatch(case.tables, lens, position + 1), torch.full_like(q, float("nan"))
    y = attention_triton.decode_attention(q, case.kv, decoded, SCALE, None, nan.clone(), rolling)
    assert_close(y, expected)
    y = attention_triton.prefill_attention(
        q, case.kv, case.prefill([1], lens), SCALE, None, nan, rolling
    )
    assert_close(y, expected)


@pytest.mark.parametrize("dtype", [FP32, HALF])
def test_write_kv_finds_scratch(dtype):
    case = paged([1], num_kv_heads=3, head_dim=20, block_size=4, dtype=dtype, device=DEVICE)
    more = torch.zeros(3, 2, 3, 4, 20, dtype=dtype, device=DEVICE)
    case.k_cache.zero_(), case.v_cache.zero_()
    k, v = torch.randn(2, 4, 3, 20).to(DEVICE, dtype)
    end = 4 * len(case.k_cache)
    slots = torch.tensor([end + 11, -1, end - 1, end], device=DEVICE)
    scratch = (more[:, 0], more[:, 1])
    attention_triton.write_kv(k, v, case.kv.with_scratch(PagedKv(*scratch)), slots)
    for cache, apart, rows in zip((case.k_cache, case.v_cache), scratch, (k, v), strict=True):
        assert torch.equal(apart[2, :, 3], rows[0])
        assert torch.equal(apart[0, :, 0], rows[3])
        assert torch.equal(cache[-1, :, 3], rows[2])
        assert int(apart.count_nonzero()) == 2 * 3 * 20
        assert int(cache.count_nonzero()) == 3 * 20
