"""A query has the same bits as a decode row, in a whole prompt and in chunks of any length.

On the native path of the CPU, for every format of the cache; memory that no row may read is NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels import attention
from penstock.kernels.types import DecodeBatch, Rolling
from tests.kernels.kernel_cases import Paged, paged
from tests.kernels.rolled_cases import INT32, Roll, RolledPaged, rolled_paged

FP32, BF16 = torch.float32, torch.bfloat16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
SCALE = 0.3
LENGTH = 600
# Positions at the edges of vectors, of tiles of 64 keys and of pieces of 256, and inside them.
POSITIONS = [
    *(0, 1, 6, 7, 8, 15, 16, 62, 63, 64, 65, 127, 128, 200, 254, 255, 256, 257, 319, 320),
    *(511, 512, 513, 598, 599),
]
CHUNKS = [(0, 7), (60, 65), (63, 64), (199, 263), (255, 256), (250, 300), (312, 512), (500, 600)]

# query heads a kv head, kv heads, head_dim, block_size, window
SHAPES = [
    (1, 2, 64, 16, None),
    (2, 1, 8, 16, None),
    (3, 3, 64, 16, None),
    (4, 1, 128, 32, 100),
    (5, 1, 24, 5, 1),
    (6, 1, 40, 1, 300),
    (7, 2, 64, 16, 64),
    (8, 1, 80, 128, 257),
    (9, 1, 96, 7, None),
    (20, 1, 16, 16, 33),
]
# dtype, cache, group (0: the head)
FORMATS = [
    (FP32, None, 0),
    (BF16, None, 0),
    (FP32, INT8, 8),
    (BF16, INT8, 0),
    (FP32, FP8, 0),
    (BF16, FP8, 8),
]


def whole_prompt(q: Tensor, case: Paged, window: int | None, **options: Any) -> Tensor:
    return attention.prefill_attention(
        q, case.kv, case.prefill([LENGTH]), scale=SCALE, window=window, **options
    )


def chunk(q: Tensor, case: Paged, first: int, last: int, window: int | None) -> Tensor:
    batch = case.prefill([last - first], torch.tensor([last], dtype=INT32))
    return attention.prefill_attention(q[first:last], case.kv, batch, scale=SCALE, window=window)


def decode_rows(
    q: Tensor, case: Paged, positions: list[int], window: int | None, **options: Any
) -> Tensor:
    lens = torch.tensor(positions, dtype=INT32) + 1
    tables = case.tables.expand(len(positions), -1).contiguous()
    batch = DecodeBatch(tables, lens, int(lens.max()))
    return attention.decode_attention(
        q[positions], case.kv, batch, scale=SCALE, window=window, **options
    )


# Every shape with two formats, and one shape with all.
CASES = [(shape, FORMATS[(i + j) % 6]) for i, shape in enumerate(SHAPES) for j in (0, 3)]
CASES += [(SHAPES[2], format) for format in FORMATS if (SHAPES[2], format) not in CASES]
# Every shape with codes by integers (code_tiles.h), in groups of each size.
INTEGERS = [(shape, (BF16, INT8, g)) for shape in SHAPES for g in (0, 16, 32, 64)]
CASES += [
    (shape, format)
    for shape, format in INTEGERS
    if shape[2] % (format[2] or 1) == 0 and (shape, format) not in CASES
]


@pytest.mark.parametrize(("shape", "format"), CASES, ids=str)
def test_a_decode_row_has_the_bits_of_a_prompts_row(native_path, shape, format):
    group, num_kv_heads, head_dim, block_size, window = shape
    dtype, kv, kv_group = format
    case = paged([LENGTH], num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
                 dtype=dtype, kv=kv, group=kv_group)  # fmt: skip
    q = torch.randn(LENGTH, group * num_kv_heads, head_dim).to(dtype)
    together = whole_prompt(q, case, window)
    alone = decode_rows(q, case, POSITIONS, window)
    assert torch.equal(alone, together[POSITIONS])
    for first, last in CHUNKS:
        assert torch.equal(chunk(q, case, first, last, window), together[first:last]), first
    sinks = {"sink_scores": torch.randn(q.shape[1])}
    with_sinks = whole_prompt(q, case, window, **sinks)
    assert torch.equal(decode_rows(q, case, POSITIONS, window, **sinks), with_sinks[POSITIONS])
    assert not torch.equal(with_sinks, together)
    torch.set_num_threads(2)
    assert torch.equal(whole_prompt(q, case, window), together)
    assert torch.equal(decode_rows(q, case, POSITIONS, window), alone)


@pytest.mark.parametrize(("dtype", "kv"), [(FP32, None), (FP32, INT8), (BF16, INT8)], ids=str)
@pytest.mark.parametrize("window", [None, 40, 1000])
def test_a_long_context_whose_queries_are_taken_many_at_a_time(native_path, dtype, kv, window):
    """The longer the context, the more queries read its keys together (`cut_into_items`)."""
    length, positions = 3300, [0, 63, 64, 255, 1000, 3070, 3071, 3072, 3298, 3299]
    case = paged([length], num_kv_heads=1, head_dim=64, dtype=dtype, kv=kv, group=32 if kv else 0)
    q = torch.randn(length, 3, 64).to(dtype)
    together = attention.prefill_attention(
        q, case.kv, case.prefill([length]), scale=SCALE, window=window
    )
    assert torch.equal(decode_rows(q, case, positions, window), together[positions])
    for first, last in ((0, 300), (900, 1500), (3000, 3300), (3290, 3300)):
        assert torch.equal(chunk(q, case, first, last, window), together[first:last]), first
    torch.set_num_threads(2)
    assert torch.equal(chunk(q, case, 2900, 3300, window), together[2900:3300])


@pytest.mark.parametrize(
    ("dtype", "kv"), [(FP32, None), (FP32, INT8), (BF16, INT8), (FP32, FP8)], ids=str
)
@pytest.mark.parametrize("num_scratch", [0, 2])
@pytest.mark.parametrize("window", [None, 70])
def test_rows_of_a_rolled_context(native_path, dtype, kv, num_scratch, window):
    """Sinks and a window, with blocks freed between them, and the newest blocks in scratch."""
    for sinks, visible, roll, num_queries in ((4, 100, 16, 60), (16, 300, 128, 90), (1, 33, 1, 40)):
        case = rolled_paged([500], [num_queries], [Roll(sinks, visible, roll)], num_heads=6,
                            dtype=dtype, kv=kv, group=32 if kv else 0,
                            num_scratch=num_scratch)  # fmt: skip
        q = torch.randn(case.rolling.q_sink.shape).to(dtype)
        together = attention.prefill_attention(
            q, case.kv, case.prefill([num_queries]), scale=SCALE, window=window,
            rolling=case.rolling,
        )  # fmt: skip
        alone = attention.decode_attention(
            q, case.kv, as_decode(case, num_queries), scale=SCALE, window=window,
            rolling=as_rows(case, num_queries),
        )  # fmt: skip
        assert torch.equal(alone, together)


def as_decode(case: RolledPaged, num_rows: int) -> DecodeBatch:
    """The queries of the case's one sequence as decode rows."""
    lens = case.lens - num_rows + 1 + torch.arange(num_rows, dtype=INT32)
    return DecodeBatch(case.tables.expand(num_rows, -1).contiguous(), lens, int(lens[-1]))


def as_rows(case: RolledPaged, num_rows: int) -> Rolling:
    old = case.rolling
    return replace(
        old,
        sink_blocks=old.sink_blocks.expand(num_rows).contiguous(),
        bases=old.bases.expand(num_rows).contiguous(),
    )


def test_what_lies_behind_a_row_changes_no_bit(native_path):
    """A prompt's later keys are in the cache already; a decode row's slots after it hold NaN."""
    case = paged([LENGTH], num_kv_heads=1, head_dim=64)
    q = torch.randn(LENGTH, 3, 64)
    together = whole_prompt(q, case, None)
    for position in (300, 130, 63):
        at = torch.arange(position + 1, LENGTH)
        blocks, offsets = case.tables[0, at // 16].long(), at % 16
        case.k_cache[blocks, :, offsets] = float("nan")
        case.v_cache[blocks, :, offsets] = float("nan")
        assert torch.equal(decode_rows(q, case, [position], None)[0], together[position])
        assert torch.equal(chunk(q, case, position - 5, position + 1, None)[-1], together[position])
