"""The CPU paths of attention: against the reference, blind to poison, and row by row the same."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels import attention
from penstock.kernels.cpu import native
from penstock.kernels.reference import attention as attention_torch
from penstock.kernels.types import DecodeBatch, PagedKv, PrefillBatch
from tests.kernels.kernel_cases import assert_close, dense_attention, paged, starts_of

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CONTEXTS = [1, 15, 16, 17, 63, 500]

# dtype, query heads a kv head, kv heads, head_dim, block_size, window
SHAPES = [
    (FP32, 1, 2, 64, 16, None),
    (FP32, 7, 2, 64, 16, None),
    (FP32, 8, 1, 128, 32, 100),
    (FP32, 2, 2, 80, 1, 16),
    (FP32, 9, 1, 20, 5, 1),
    (FP32, 3, 2, 256, 128, 64),
    (BF16, 7, 2, 64, 16, None),
    (BF16, 1, 2, 16, 128, 100),
    (BF16, 2, 1, 80, 16, 16),
    (BF16, 4, 2, 96, 4, 1),
    (BF16, 16, 1, 24, 16, None),
]


def shape_id(shape: tuple) -> str:
    dtype, group, num_kv_heads, head_dim, block_size, window = shape
    name = str(dtype).removeprefix("torch.")
    return f"{name}-g{group}-kv{num_kv_heads}-d{head_dim}-b{block_size}-w{window}"


def decode(q: torch.Tensor, case, **options) -> torch.Tensor:
    return attention.decode_attention(
        q,
        case.kv,
        case.decode(),
        scale=0.125,
        **options,
    )


def prefill(q: torch.Tensor, case, query_lens: list[int], **options) -> torch.Tensor:
    return attention.prefill_attention(
        q,
        case.kv,
        case.prefill(query_lens),
        scale=0.125,
        **options,
    )


@pytest.mark.parametrize("window", [None, 1, 16, 100])
def test_the_reference_is_right(window):
    query_lens = [1, 15, 1, 17, 40, 3]
    case = paged(CONTEXTS, head_dim=16)
    q = torch.randn(sum(query_lens), 6, 16)
    y = attention_torch.attention_reference(
        q,
        case.kv,
        case.prefill(query_lens),
        scale=0.125,
        window=window,
    )
    assert_close(y, dense_attention(q, case, query_lens, 0.125, window))


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_decode_is_the_dense_result(cpu_path, shape):
    dtype, group, num_kv_heads, head_dim, block_size, window = shape
    case = paged(
        CONTEXTS,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        oldest=None if window is None else [max(0, n - window) for n in CONTEXTS],
    )
    q = torch.randn(len(CONTEXTS), group * num_kv_heads, head_dim).to(dtype)
    y = decode(q, case, window=window)
    assert_close(y, dense_attention(q, case, [1] * len(CONTEXTS), 0.125, window))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_scores_under_a_soft_cap(cpu_path, dtype, window):
    """A cap of 0.7 holds most scores back; decode rows and chunks agree to the bit as ever."""
    query_lens = [1, 15, 1, 16, 40, 70]
    case = paged(CONTEXTS, num_kv_heads=2, head_dim=64, dtype=dtype)
    q = (3 * torch.randn(sum(query_lens), 6, 64)).to(dtype)
    y = prefill(q, case, query_lens, window=window, softcap=0.7)
    assert_close(y, dense_attention(q, case, query_lens, 0.125, window, softcap=0.7))
    assert (y - prefill(q, case, query_lens, window=window)).abs().max() > 0.1
    reference = attention_torch.attention_reference(
        q, case.kv, case.prefill(query_lens), scale=0.125, window=window, softcap=0.7
    )
    assert_close(y, reference)
    last = torch.tensor(query_lens).cumsum(0) - 1
    rows = decode(q[last], case, window=window, softcap=0.7)
    assert_close(rows, y[last])
    if attention.backend_name(q, case.kv) == "native":
        assert torch.equal(rows, y[last])


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_prefill_is_the_dense_result(cpu_path, shape):
    dtype, group, num_kv_heads, head_dim, block_size, window = shape
    query_lens = [1, 15, 1, 16, 40, 70]  # whole prompts and last chunks
    oldest = [max(0, n - m - (window or n) + 1) for n, m in zip(CONTEXTS, query_lens, strict=True)]
    case = paged(
        CONTEXTS,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        oldest=oldest,
    )
    q = torch.randn(sum(query_lens), group * num_kv_heads, head_dim).to(dtype)
    y = prefill(q, case, query_lens, window=window)
    assert_close(y, dense_attention(q, case, query_lens, 0.125, window))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("window", [None, 16])
def test_a_score_without_a_value(cpu_path, dtype, window):
    """gpt-oss's sinks: scores far below and far above those of the keys, a head each."""
    query_lens = [1, 15, 1, 16, 40, 70]
    case = paged(CONTEXTS, num_kv_heads=2, head_dim=24, dtype=dtype)
    sinks = torch.tensor([-100.0, -1.0, 0.0, 2.0, 8.0, 200.0])
    q = torch.randn(sum(query_lens), 6, 24).to(dtype)
    y = prefill(q, case, query_lens, window=window, sink_scores=sinks)
    assert_close(y, dense_attention(q, case, query_lens, 0.125, window, sink_scores=sinks))
    assert y[:, 5].abs().max() < 1e-30 < y[:, 0].abs().min()
    y = decode(q[:6], case, window=window, sink_scores=sinks)
    assert_close(y, dense_attention(q[:6], case, [1] * 6, 0.125, window, sink_scores=sinks))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_views_of_a_fused_projection_and_out(cpu_path, dtype):
    case = paged([40, 7], num_kv_heads=2, head_dim=16, dtype=dtype)
    qkv = torch.randn(9, 8, 16).to(dtype)
    q, out = qkv[:, :4], torch.full((9, 4, 16), float("nan"), dtype=dtype)
    assert prefill(q, case, [5, 4], out=out) is out
    assert_close(out, dense_attention(q, case, [5, 4], 0.125, None))
    assert decode(q[:2], case, out=out[3:5]).data_ptr() == out[3:5].data_ptr()
    assert_close(out[3:5], dense_attention(q[:2], case, [1, 1], 0.125, None))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_write_kv_writes_the_slots_and_nothing_else(cpu_path, dtype):
    case = paged([1], num_kv_heads=3, head_dim=20, block_size=4, dtype=dtype)
    case.k_cache.zero_(), case.v_cache.zero_()
    qkv = torch.randn(5, 9, 20).to(dtype)
    k, v = qkv[:, 3:6], qkv[:, 6:]
    slots = torch.tensor([7, -1, 0, 13, -5])
    attention.write_kv(k, v, case.kv, slots)
    for cache, rows in ((case.k_cache, k), (case.v_cache, v)):
        for token, slot in ((0, 7), (2, 0), (3, 13)):
            assert torch.equal(cache[slot // 4, :, slot % 4], rows[token])
        assert int(cache.count_nonzero()) == 3 * 3 * 20


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("heads", "window"), [((7, 1), None), ((4, 4), 100)])
def test_decode_rows_do_not_depend_on_the_batch_or_the_threads(native_path, dtype, heads, window):
    lens = torch.randint(1, 700, (33,)).tolist()
    case = paged(lens, num_kv_heads=heads[1], head_dim=64, dtype=dtype)
    q = torch.randn(33, heads[0] * heads[1], 64).to(dtype)
    together = decode(q, case, window=window)
    torch.set_num_threads(2)
    assert torch.equal(decode(q, case, window=window), together)
    for b in range(33):
        alone = attention.decode_attention(
            q[b : b + 1],
            case.kv,
            DecodeBatch(case.tables[b : b + 1], case.lens[b : b + 1], lens[b]),
            scale=0.125,
            window=window,
        )
        assert torch.equal(alone[0], together[b]), b


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("window", [None, 50])
def test_prefill_rows_do_not_depend_on_chunks_batch_or_threads(native_path, dtype, window):
    lens = [200, 33, 1]
    case = paged(lens, num_kv_heads=2, head_dim=64, dtype=dtype)
    q = torch.randn(sum(lens), 14, 64).to(dtype)
    together = prefill(q, case, lens, window=window)
    torch.set_num_threads(2)
    assert torch.equal(prefill(q, case, lens, window=window), together)
    for chunk in (1, 7, 64):
        for first in range(0, 200, chunk):
            last = min(200, first + chunk)
            alone = attention.prefill_attention(
                q[first:last],
                case.kv,
                case.prefill([last - first], torch.tensor([last], dtype=torch.int32)),
                scale=0.125,
                window=window,
            )
            assert torch.equal(alone, together[first:last]), (chunk, first)


def test_decode_and_prefill_agree(cpu_path):
    case = paged([300, 17], num_kv_heads=2, head_dim=64)
    q = torch.randn(2, 14, 64)
    assert_close(decode(q, case), prefill(q, case, [1, 1]))


def test_large_scores_neither_overflow_nor_vanish(cpu_path):
    case = paged([300], num_kv_heads=1, head_dim=64)
    q = 100 * torch.randn(1, 2, 64)  # scores of some +-500: exp of them alone would be infinite
    assert_close(decode(q, case), dense_attention(q, case, [1], 0.125, None))
    assert_close(prefill(q, case, [1]), dense_attention(q, case, [1], 0.125, None))


def test_blocks_past_two_to_the_31_elements(cpu_path):
    """A 32-bit offset would wrap around. Untouched pages cost no memory."""
    near = paged([50], num_kv_heads=2, head_dim=16, dtype=BF16)
    stride, size = 2**26, 2 * 16 * 16  # elements from block to block, and in one
    base = torch.empty(40 * stride, dtype=BF16)
    shape, strides = (40, 2, 16, 16), (stride, 16 * 16, 16, 1)
    kv = PagedKv(base.as_strided(shape, strides), base.as_strided(shape, strides, size))
    table = torch.tensor([[39, 33, 0, 38]], dtype=torch.int32)
    at = torch.arange(50)
    slots = table[0, at // 16].long() * 16 + at % 16
    attention.write_kv(near.keys[0], near.values[0], kv, slots)
    q = torch.randn(1, 4, 16).to(BF16)
    for y in (
        attention.decode_attention(q, kv, DecodeBatch(table, near.lens, 50), scale=0.125),
        attention.prefill_attention(
            q, kv, PrefillBatch(table, starts_of([1]), near.lens, 1), scale=0.125
        ),
    ):
        assert_close(y, dense_attention(q, near, [1], 0.125, None))


def test_fp16_falls_back_on_the_cpu():
    assert native.usable(torch.zeros(1, dtype=FP16)) is None
