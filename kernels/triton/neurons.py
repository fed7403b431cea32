"""The Triton kernels of `kernels/neurons.py`: the MLP over chosen neurons of a pool.

Imported only where it runs: on a GPU, or in Triton's interpreter on CPU tensors. One program adds
up a block of a token's neurons, then the blocks are added in order: a token's result depends
neither on where rows lie nor on other tokens.
"""

# Parameters of a kernel are pointers and constants, which Python types do not tell apart.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.types import PartialSums

BLOCK = 16  # neurons of a program
TILE = 128  # numbers of each row that it looks at together
PLAIN, INT8, INT4 = 0, 1, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def suits(pool: Tensor, format: str, dim: int) -> bool:
    """Whether scales lie where numbers of their dtype may lie."""
    return format != "int8" or (dim % 4 == 0 and pool.shape[1] % 4 == 0)


def neuron_mlp(
    x: Tensor, pool: Tensor, format: str, places: Tensor, counts: Sequence[int],
    partial: PartialSums | None, out: Tensor,
) -> Tensor:  # fmt: skip
    """`places` int32 on any device; else as kernels/neurons.py. `pool` must suit."""
    num_tokens, dim = x.shape
    num_blocks = [triton.cdiv(count, BLOCK) for count in counts]
    ends = list(accumulate(counts))
    # By block: its token, its first place and the end of the token's; then the first block of each.
    table = [
        (token, first, end)
        for token, (count, end) in enumerate(zip(counts, ends))
        for first in range(end - count, end, BLOCK)
    ]
    starts = [0, *accumulate(num_blocks)]
    flat = [value for row in table for value in row] + starts
    index = torch.tensor(flat, dtype=torch.int32).to(x.device, non_blocking=True)
    places = places.to(x.device, non_blocking=True)
    sums = torch.empty(len(table), dim, dtype=torch.float32, device=x.device)
    numbers, scales, kind, scale_first = _views(pool, format, dim)
    if table:
        _blocks_kernel[(len(table),)](
            x, numbers, scales, places, index, sums,
            x.stride(0), numbers.shape[1], scales.shape[1], scale_first,
            DIM=dim, FORMAT=kind, NEURONS=BLOCK, TILE=TILE,
        )  # fmt: skip
    begins, is_last = (True, True) if partial is None else (partial.begins, partial.is_last)
    _sum_kernel[(num_tokens, triton.cdiv(dim, TILE))](
        sums, index, sums if partial is None else partial.so_far, out, out.stride(0),
        3 * len(table), DIM=dim, TILE=TILE, HAS_MORE=not is_last, HAS_SOME=not begins,
    )  # fmt: skip
    return out


def _views(pool: Tensor, format: str, dim: int) -> tuple[Tensor, Tensor, int, int]:
    """The rows as numbers or codes, and as scales; the kind; where a row's scales begin."""
    if format == "int8":
        return pool.view(torch.int8), pool.view(torch.float32), INT8, 3 * dim // 4
    if format == "int4":
        return pool, pool.view(torch.bfloat16), INT4, 3 * triton.cdiv(dim, 32) * 8
    numbers = pool.view(DTYPES[format])
    return numbers, numbers, PLAIN, 0


@triton.jit
def _numbers(
    rows_ptr, scales_ptr, at, scales_at, keep, d, PART: tl.constexpr, DIM: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """fp32 [neurons, len(d)]: numbers `d` of one part of the rows that begin at `at`."""
    inside = keep[:, None] & (d < DIM)[None, :]
    if FORMAT == 0:
        found = tl.load(rows_ptr + at[:, None] + PART * DIM + d[None, :], mask=inside, other=0.0)
        return found.to(tl.float32)
    if FORMAT == 1:
        group = PART * tl.cdiv(DIM, 64) + d // 64
        codes = tl.load(rows_ptr + at[:, None] + PART * DIM + d[None, :], mask=inside, other=0)
        found = codes.to(tl.float32)
    else:
        group = PART * tl.cdiv(DIM, 32) + d // 32
        byte = group * 16 + d % 16
        both = tl.load(rows_ptr + at[:, None] + byte[None, :], mask=inside, other=0).to(tl.int32)
        found = (((both >> (d % 32 // 16 * 4)[None, :]) & 15) - 8).to(tl.float32)
    scales = tl.load(scales_ptr + scales_at[:, None] + group[None, :], mask=inside, other=0.0)
    return found * scales.to(tl.float32)


@triton.jit
def _blocks_kernel(
    x_ptr, rows_ptr, scales_ptr, places_ptr, index_ptr, sums_ptr,
    x_stride, row_size, scale_row, scale_first,
    DIM: tl.constexpr, FORMAT: tl.constexpr, NEURONS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """sum_j silu(gate_j) * up_j * down_j over a block of one token's neurons."""
    block = tl.program_id(0).to(tl.int64)
    token = tl.load(index_ptr + 3 * block).to(tl.int64)
    first, end = tl.load(index_ptr + 3 * block + 1), tl.load(index_ptr + 3 * block + 2)
    n = first + tl.arange(0, NEURONS)
    keep = n < end
    place = tl.load(places_ptr + n, mask=keep, other=0).to(tl.int64)
    at, scales_at = place * row_size, place * scale_row + scale_first
    gate = tl.zeros([NEURONS], tl.float32)
    up = tl.zeros([NEURONS], tl.float32)
    for start in range(0, DIM, TILE):
        d = start + tl.arange(0, TILE)
        x = tl.load(x_ptr + token * x_stride + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        of_gate = _numbers(rows_ptr, scales_ptr, at, scales_at, keep, d, 0, DIM, FORMAT)
        of_up = _numbers(rows_ptr, scales_ptr, at, scales_at, keep, d, 1, DIM, FORMAT)
        gate += tl.sum(x * of_gate, 1)
        up += tl.sum(x * of_up, 1)
    state = (gate * tl.sigmoid(gate) * up)[:, None]
    for start in range(0, DIM, TILE):
        d = start + tl.arange(0, TILE)
        down = _numbers(rows_ptr, scales_ptr, at, scales_at, keep, d, 2, DIM, FORMAT)
        tl.store(sums_ptr + block * DIM + d, tl.sum(state * down, 0), mask=d < DIM)


@triton.jit
def _sum_kernel(
    sums_ptr, index_ptr, so_far_ptr, out_ptr, out_stride, starts_first,
    DIM: tl.constexpr, TILE: tl.constexpr, HAS_MORE: tl.constexpr, HAS_SOME: tl.constexpr,
):  # fmt: skip
    """The blocks of one token, in order, after the sum of earlier calls if it HAS_SOME; the result
    is such a sum if it HAS_MORE."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * TILE + tl.arange(0, TILE)
    first = tl.load(index_ptr + starts_first + token)
    count = tl.load(index_ptr + starts_first + token + 1) - first
    rows_ptr = sums_ptr + first.to(tl.int64) * DIM + d
    so_far_ptr += token * DIM + d
    total = tl.zeros([TILE], tl.float32)
    if HAS_SOME:
        total = tl.load(so_far_ptr, mask=d < DIM, other=0.0)
    for block in range(count):
        total += tl.load(rows_ptr + block * DIM, mask=d < DIM, other=0.0)
    if HAS_MORE:
        tl.store(so_far_ptr, total, mask=d < DIM)
    else:
        dtype = out_ptr.dtype.element_ty
        tl.store(out_ptr + token * out_stride + d, total.to(dtype), mask=d < DIM)
