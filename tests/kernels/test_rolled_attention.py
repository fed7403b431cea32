"""Attention over rolled contexts and scratch blocks: StreamingLLM, against oracles, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels import attention
from penstock.kernels.reference import attention as attention_torch
from penstock.kernels.types import DecodeBatch, PagedKv, Rolling
from tests.kernels.kernel_cases import assert_close, dense_attention, paged
from tests.kernels.rolled_cases import (
    INT32,
    Roll,
    RolledPaged,
    dense_rolled_attention,
    rolled_paged,
)

FP32, BF16 = torch.float32, torch.bfloat16
SCALE = 0.125

# dtype, query heads a kv head, kv heads, head_dim, block_size, sinks, window, roll, scratch blocks
SHAPES = [
    (FP32, 1, 2, 64, 16, 4, 100, 16, 0),
    (FP32, 7, 2, 64, 16, 16, 128, 128, 2),
    (FP32, 8, 1, 128, 64, 4, 130, 64, 1),
    (FP32, 3, 1, 20, 1, 1, 33, 1, 5),
    (FP32, 2, 2, 80, 8, 16, 150, 128, 0),
    (FP32, 4, 1, 8, 8, 4, 40, 8, 3),
    (FP32, 2, 1, 16, 16, 1, 300, 1, 1),
    (FP32, 1, 1, 24, 64, 16, 128, 128, 0),
    (BF16, 7, 2, 64, 16, 4, 100, 16, 2),
    (BF16, 2, 1, 80, 1, 16, 128, 128, 1),
    (BF16, 5, 2, 96, 8, 1, 64, 1, 0),
    (BF16, 8, 1, 128, 64, 4, 200, 128, 1),
]


def shape_id(shape: tuple) -> str:
    dtype, group, num_kv_heads, head_dim, block_size, sinks, window, roll, num_scratch = shape
    name = str(dtype).removeprefix("torch.")
    return (
        f"{name}-g{group}-kv{num_kv_heads}-d{head_dim}-b{block_size}"
        f"-s{sinks}-w{window}-r{roll}-x{num_scratch}"
    )


def build(shape: tuple, lens: list[int], query_lens: list[int], full: set[int]) -> RolledPaged:
    dtype, group, num_kv_heads, head_dim, block_size, sinks, window, roll, num_scratch = shape
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
    )


def queries(case: RolledPaged) -> Tensor:
    return torch.randn(case.rolling.q_sink.shape).to(case.k_cache.dtype)


def decode(q: Tensor, case: RolledPaged, **options) -> Tensor:
    options = {"rolling": case.rolling} | options
    return attention.decode_attention(
        q,
        case.kv,
        case.decode(),
        scale=SCALE,
        **options,
    )


def prefill(q: Tensor, case: RolledPaged, **options) -> Tensor:
    options = {"rolling": case.rolling} | options
    return attention.prefill_attention(
        q,
        case.kv,
        case.prefill(case.query_lens),
        scale=SCALE,
        **options,
    )


def sequences(case: RolledPaged, first: int, last: int) -> RolledPaged:
    """The case of sequences [first, last) alone."""
    bounds = [0, *torch.tensor(case.query_lens).cumsum(0).tolist()]
    rows, some, old = slice(bounds[first], bounds[last]), slice(first, last), case.rolling
    rolling = replace(
        old,
        q_sink=old.q_sink[rows],
        sink_ends=old.sink_ends[rows],
        window_starts=old.window_starts[rows],
        sink_blocks=old.sink_blocks[some],
        bases=old.bases[some],
    )
    return replace(
        case,
        tables=case.tables[some],
        lens=case.lens[some],
        keys=case.keys[some],
        values=case.values[some],
        rolling=rolling,
        query_lens=case.query_lens[some],
    )


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_decode_is_the_dense_result(cpu_path, shape):
    """Not yet rolled (a sink alone, a sink block not full), just rolled, long rolled, and full."""
    head = -(-shape[5] // shape[4]) * shape[4]
    edge = head + shape[6]  # the last length before the first roll
    lens = [1, 1, head, head + 1, edge, edge + 1, 17, edge + shape[7], edge + shape[7] + 1, 600]
    case = build(shape, lens, [1] * len(lens), full={0, 6})
    q = queries(case)
    assert_close(decode(q, case), dense_rolled_attention(q, case, SCALE))


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_prefill_is_the_dense_result(cpu_path, shape):
    """Whole prompts over several rolls, chunks that end or begin at a roll, and full sequences."""
    head = -(-shape[5] // shape[4]) * shape[4]
    edge = head + shape[6]
    lens = [1, 300, edge + 1, 40, edge + 9, 700, 33]
    case = build(shape, lens, [1, 300, 1, 25, 30, 70, 33], full={3})
    q = queries(case)
    assert_close(prefill(q, case), dense_rolled_attention(q, case, SCALE))


def test_the_reference_is_right():
    shape = (FP32, 2, 2, 16, 8, 4, 40, 16, 2)
    case = build(shape, [1, 100, 57, 200], [1, 60, 20, 1], full={2})
    q = queries(case)
    for window in (None, 30):
        y = attention_torch.attention_reference(
            q,
            case.kv,
            case.prefill(case.query_lens),
            scale=SCALE,
            window=window,
            rolling=case.rolling,
        )
        assert_close(y, dense_rolled_attention(q, case, SCALE, window))


@pytest.mark.parametrize("window", [1, 30])
def test_the_window_of_a_layer_limits_the_window_and_not_the_sinks(cpu_path, window):
    shape = (FP32, 2, 2, 32, 8, 4, 90, 16, 1)
    case = build(shape, [1, 95, 200, 300], [1, 40, 120, 5], full={1})
    q = queries(case)
    y = prefill(q, case, window=window)
    assert_close(y, dense_rolled_attention(q, case, SCALE, window))
    case = build(shape, [1, 95, 200, 300], [1] * 4, full={1})
    q = queries(case)
    assert_close(decode(q, case, window=window), dense_rolled_attention(q, case, SCALE, window))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_full_row_has_the_bits_that_it_has_without_rolling(cpu_path, dtype):
    shape = (dtype, 7, 2, 64, 16, 4, 100, 16, 1)
    lens, full = [500, 300, 17, 600], {1, 2}
    for query_lens, run in (([1] * 4, decode), ([70, 40, 17, 1], prefill)):
        case = build(shape, lens, query_lens, full)
        q = queries(case)
        mixed = run(q, case)
        rows = slice(query_lens[0], query_lens[0] + query_lens[1] + query_lens[2])
        alone = run(q[rows], sequences(case, 1, 3), rolling=None)
        assert torch.equal(alone, mixed[rows])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_decode_rows_do_not_depend_on_the_batch_or_the_threads(native_path, dtype):
    lens = torch.randint(1, 900, (20,)).tolist()
    case = build((dtype, 4, 2, 64, 16, 4, 260, 128, 1), lens, [1] * 20, full={3, 11})
    q = queries(case)
    together = decode(q, case)
    torch.set_num_threads(2)
    assert torch.equal(decode(q, case), together)
    for b in range(20):
        assert torch.equal(decode(q[b : b + 1], sequences(case, b, b + 1))[0], together[b]), b


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("roll", [1, 16, 128])
def test_prefill_rows_do_not_depend_on_chunks_batch_or_threads(native_path, dtype, roll):
    """Chunks as the engine runs them: a later chunk finds fewer blocks in its table."""
    policy, length = Roll(4, 128, roll), 290
    case = build((dtype, 3, 2, 32, 16, 4, 128, roll, 0), [length, 33], [length, 33], full={1})
    q = queries(case)
    together = prefill(q, case)
    torch.set_num_threads(2)
    assert torch.equal(prefill(q, case), together)
    for chunk in (1, 7, 64):
        for first in range(0, length, chunk):
            last = min(length, first + chunk)
            part = sequences(case, 0, 1)
            base = policy.edges(first, 16)[1] // 16 - 1
            table = torch.cat((part.tables[:, :1], part.tables[:, 1 + base :]), 1)
            old = part.rolling
            part = replace(
                part,
                tables=table,
                lens=torch.tensor([last], dtype=INT32),
                query_lens=[last - first],
                rolling=replace(
                    old,
                    q_sink=old.q_sink[first:last],
                    sink_ends=old.sink_ends[first:last],
                    window_starts=old.window_starts[first:last],
                    bases=torch.tensor([base], dtype=INT32),
                ),
            )
            assert torch.equal(prefill(q[first:last], part), together[first:last]), (chunk, first)


def test_decode_and_prefill_agree(cpu_path):
    case = build((FP32, 3, 2, 64, 16, 4, 260, 16, 2), [700, 17, 300], [1, 1, 1], full={1})
    q = queries(case)
    assert_close(decode(q, case), prefill(q, case))


@pytest.mark.parametrize("position", [1_000_000, 2**31 - 1000])
def test_an_endless_sequence_costs_its_visible_keys(cpu_path, position):
    """At a million tokens the table has 12 entries: a walk over the context would leave it."""
    sinks, block_size, visible = 4, 16, 150
    start = position + 1 - visible
    page = start // block_size
    near = paged([visible + start % block_size + block_size], num_kv_heads=2, head_dim=32)
    rolling = Rolling(
        q_sink=torch.randn(1, 6, 32),
        sink_ends=torch.tensor([sinks], dtype=INT32),
        window_starts=torch.tensor([start], dtype=INT32),
        sink_blocks=torch.tensor([1], dtype=INT32),
        bases=torch.tensor([page - 1], dtype=INT32),
        max_visible_len=visible,
    )
    lens = torch.tensor([position + 1], dtype=INT32)
    q = torch.randn(1, 6, 32)
    # Its keys, as an ordinary sequence that has only them: the sinks' with their own query.
    keys = torch.cat((near.keys[0][:sinks], near.keys[0][-visible:])).double()
    values = torch.cat((near.values[0][:sinks], near.values[0][-visible:])).double()
    queries = torch.cat((rolling.q_sink.expand(sinks, -1, -1), q.expand(visible, -1, -1))).double()
    wide = keys.repeat_interleave(3, 1)
    weights = ((queries * wide).sum(-1) * SCALE).softmax(0)[..., None]
    expected = (weights * values.repeat_interleave(3, 1)).sum(0, keepdim=True).float()
    decoded = DecodeBatch(near.tables, lens, position + 1)
    y = attention.decode_attention(q, near.kv, decoded, scale=SCALE, rolling=rolling)
    assert_close(y, expected)
    chunk = near.prefill([1], lens)
    y = attention.prefill_attention(q, near.kv, chunk, scale=SCALE, rolling=rolling)
    assert_close(y, expected)


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
def test_write_kv_finds_scratch(cpu_path, dtype):
    case = paged([1], num_kv_heads=3, head_dim=20, block_size=4, dtype=dtype)
    more = torch.zeros(3, 2, 3, 4, 20, dtype=dtype)
    case.k_cache.zero_(), case.v_cache.zero_()
    qkv = torch.randn(5, 9, 20).to(dtype)
    k, v = qkv[:, 3:6], qkv[:, 6:]
    end = 4 * len(case.k_cache)
    slots = torch.tensor([end + 11, -1, end - 1, end, 5])
    attention.write_kv(k, v, case.kv.with_scratch(PagedKv(more[:, 0], more[:, 1])), slots)
    for cache, apart, rows in ((case.k_cache, more[:, 0], k), (case.v_cache, more[:, 1], v)):
        assert torch.equal(apart[2, :, 3], rows[0])
        assert torch.equal(apart[0, :, 0], rows[3])
        assert torch.equal(cache[-1, :, 3], rows[2])
        assert torch.equal(cache[1, :, 1], rows[4])
        assert int(apart.count_nonzero()) == int(cache.count_nonzero()) == 2 * 3 * 20


def test_full_sequences_with_their_tail_in_scratch(cpu_path):
    """Deferred commit without rolling: pending tokens lie in scratch blocks."""
    shape = (FP32, 3, 2, 64, 16, 4, 100, 16, 2)
    case = build(shape, [100, 5, 300], [20, 5, 33], full={0, 1, 2})
    q = queries(case)
    y = prefill(q, case, rolling=None)
    assert_close(y, dense_attention(q, case, case.query_lens, SCALE, None))
