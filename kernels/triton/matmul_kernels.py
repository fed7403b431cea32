"""The Triton kernels that `matmul.py` and `moe.py` launch: one product of rows with a
weight in any number format, plain or by routed expert, and the sum of its splits.

Parameters that a call does not have are None: the compiler then omits the code that uses them. The
weight is the left operand, y^T = W x^T: Hopper's tensor cores take the left one from registers,
where codes are unpacked, and few rows waste little of a tile.

A sum is one order at any number of rows: the inputs are cut into pieces, a matter of their number
alone; a piece is summed step by step, and the pieces in their order, by the program that has them
all or by `_reduce_kernel`. Multiply-adds are spelt out, and compiled without contraction.
"""

# Parameters of a kernel are pointers and constants, which Python types do not tell apart.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.matmul_sums import (
    sum_grouped,
    sum_int4_steps,
    sum_int8_groups,
    sum_nibbles,
    sum_whole,
)

SWIZZLE = tl.constexpr(8)  # row tiles that share a weight tile while it is in the L2 cache
# fp16 holds an E4M3 code's bits at 2^-8 of its value, exactly; a product of two is off by 2^-16.
UPCAST = tl.constexpr(65536.0)


@triton.jit
def _span(starts_ptr, e, row_first, num_rows, num_experts):
    """Rows of expert `e` among the `num_rows` from `row_first` on: from, to. Beyond: none."""
    low = tl.load(starts_ptr + e, mask=e < num_experts, other=2**31 - 1)
    high = tl.load(starts_ptr + e + 1, mask=e < num_experts, other=2**31 - 1)
    low = tl.minimum(tl.maximum(low - row_first, 0), num_rows)
    return low, tl.minimum(tl.maximum(high - row_first, 0), num_rows)


@triton.jit
def _find_tile(
    starts_ptr, row_first, num_rows, num_experts, tile, ROWS: tl.constexpr, EXPERTS: tl.constexpr
):
    """Tile `tile` of all the experts' tiles: its expert, its first row, and that expert's end.

    The expert is at least `num_experts` where there is no such tile.
    """
    e = tl.arange(0, EXPERTS)
    low, high = _span(starts_ptr, e, row_first, num_rows, num_experts)
    tiles = (high - low + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    mine = e == expert
    nth = tile - tl.sum(tl.where(mine, ends - tiles, 0), 0)
    return expert, tl.sum(tl.where(mine, low, 0), 0) + nth * ROWS, tl.sum(tl.where(mine, high, 0))


@triton.jit
def _sum_piece(
    acc, piece, inputs_a_piece, x_ptr, x_scales_ptr, x_rows, sources, seen, codes_ptr, n,
    codes_stride, num_outputs, scales_ptr, zeros_ptr, table_ptr, num_inputs,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """acc + W x^T [outputs, rows] over the inputs of one piece."""
    first = piece * inputs_a_piece
    end = tl.minimum(first + inputs_a_piece, num_inputs)
    if FORMAT == "int4" or FORMAT == "nf4" or FORMAT == "mxfp4":
        acc = sum_nibbles(
            acc, x_ptr, x_rows, seen, codes_ptr, n, num_outputs, scales_ptr, zeros_ptr, table_ptr,
            first, end, num_inputs, FORMAT, GROUP, STEP, EVEN,
        )  # fmt: skip
    elif FORMAT == "int8_groups":
        acc = sum_int8_groups(
            acc, x_ptr, x_scales_ptr, x_rows, sources, seen, codes_ptr, n, codes_stride, first, end,
            num_inputs, GROUP, STEP, EVEN,
        )  # fmt: skip
    elif FORMAT == "int4_steps":
        acc = sum_int4_steps(
            acc, x_ptr, x_scales_ptr, x_rows, sources, seen, codes_ptr, n, num_outputs, zeros_ptr,
            first, end, num_inputs, GROUP, STEP, EVEN,
        )  # fmt: skip
    elif FORMAT == "int8g" or FORMAT == "fp8g":
        acc = sum_grouped(
            acc, x_ptr, x_rows, seen, codes_ptr, n, codes_stride, num_outputs, scales_ptr,
            zeros_ptr, first, end, num_inputs, FORMAT, GROUP, STEP, EVEN,
        )  # fmt: skip
    else:
        acc = sum_whole(
            acc, x_ptr, x_rows, seen, codes_ptr, n, codes_stride, first, end, num_inputs,
            FORMAT, STEP, EVEN,
        )  # fmt: skip
    return acc


@triton.jit
def _finished(total, x_scales_ptr, rows, seen, scales_ptr, bias_ptr, n, FORMAT: tl.constexpr):
    """Sums [outputs, rows] -> y in fp32: the scales that are not yet in it, and the bias."""
    y = total.to(tl.float32)
    BY_GROUP: tl.constexpr = FORMAT == "int8_groups" or FORMAT == "int4_steps"
    if not BY_GROUP and x_scales_ptr is not None:  # both operands are codes
        x_scales = tl.load(x_scales_ptr + rows, mask=seen, other=0.0)
        if FORMAT == "fp8_upcast":
            y *= UPCAST
        y = y * tl.load(scales_ptr + n)[:, None] * x_scales[None, :]
    if BY_GROUP:
        y = y * tl.load(scales_ptr + n)[:, None]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n)[:, None].to(tl.float32)
    return y


@triton.jit
def _linear_kernel(
    x_ptr, x_scales_ptr, codes_ptr, scales_ptr, zeros_ptr, table_ptr, bias_ptr, out_ptr,
    partial_ptr, row_ids_ptr, starts_ptr, offsets_ptr,
    x_stride, codes_stride, out_stride, num_rows, num_outputs, num_inputs, num_row_tiles,
    inputs_a_piece, row_first, num_experts,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, PIECES: tl.constexpr, EXPERTS: tl.constexpr, EVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """One program a (tile, PIECES of the inputs). With `starts`, row tile by row tile of each
    expert's rows.
    """
    num_tiles = tl.cdiv(num_outputs, OUTPUTS)
    # Eight row tiles at a time go through all outputs.
    band = tl.program_id(0) // (SWIZZLE * num_tiles)
    height = tl.minimum(num_row_tiles - band * SWIZZLE, SWIZZLE)
    place = tl.program_id(0) % (SWIZZLE * num_tiles)
    row_tile, split = band * SWIZZLE + place % height, tl.program_id(1)
    first_row, end_row = row_tile * ROWS, num_rows
    if starts_ptr is not None:
        expert, first_row, end_row = _find_tile(
            starts_ptr, row_first, num_rows, num_experts, row_tile, ROWS, EXPERTS
        )
        if expert >= num_experts:
            return
        codes_at = tl.load(offsets_ptr + expert)
        if ALIGNED:
            codes_at = tl.multiple_of(codes_at, 16)
        codes_ptr += codes_at
        if scales_ptr is not None:
            scales_ptr += tl.load(offsets_ptr + num_experts + expert)
        if zeros_ptr is not None:
            zeros_ptr += tl.load(offsets_ptr + 2 * num_experts + expert)
        if bias_ptr is not None:
            bias_ptr += tl.load(offsets_ptr + 3 * num_experts + expert)
    rows = (first_row + tl.arange(0, ROWS)).to(tl.int64)
    seen = rows < end_row
    sources = rows
    if row_ids_ptr is not None:
        sources = tl.load(row_ids_ptr + rows, mask=seen, other=0).to(tl.int64)
    outputs = place // height * OUTPUTS + tl.arange(0, OUTPUTS)
    n = tl.minimum(outputs, num_outputs - 1).to(tl.int64)  # what lies beyond is not stored
    x_rows = sources * x_stride
    acc = tl.zeros([OUTPUTS, ROWS], tl.int32 if FORMAT == "int8" else tl.float32)
    if PIECES == 1:
        acc = _sum_piece(
            acc, split, inputs_a_piece, x_ptr, x_scales_ptr, x_rows, sources, seen, codes_ptr, n,
            codes_stride, num_outputs, scales_ptr, zeros_ptr, table_ptr, num_inputs,
            FORMAT, GROUP, STEP, EVEN,
        )  # fmt: skip
    else:
        for piece in range(PIECES):
            acc += _sum_piece(
                tl.zeros_like(acc), piece, inputs_a_piece, x_ptr, x_scales_ptr, x_rows, sources,
                seen, codes_ptr, n, codes_stride, num_outputs, scales_ptr, zeros_ptr, table_ptr,
                num_inputs, FORMAT, GROUP, STEP, EVEN,
            )  # fmt: skip
    mask = (outputs < num_outputs)[:, None] & seen[None, :]
    if partial_ptr is not None:
        at = (split * num_rows + rows)[None, :] * num_outputs + n[:, None]
        tl.store(partial_ptr + at, acc, mask=mask)
    else:
        y = _finished(acc, x_scales_ptr, sources, seen, scales_ptr, bias_ptr, n, FORMAT)
        at = rows[None, :] * out_stride + n[:, None]
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _reduce_kernel(
    partial_ptr, x_scales_ptr, scales_ptr, bias_ptr, out_ptr, row_ids_ptr, starts_ptr, offsets_ptr,
    out_stride, num_rows, num_outputs, num_splits, row_first, num_experts,
    FORMAT: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program a tile of one row: its pieces, in their order."""
    row = tl.program_id(0).to(tl.int64)
    n = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    keep = n < num_outputs
    source = row
    if starts_ptr is not None:
        _, high = _span(starts_ptr, tl.arange(0, EXPERTS), row_first, num_rows, num_experts)
        expert = tl.sum((high <= row).to(tl.int32), 0)
        if expert >= num_experts:
            return
        if scales_ptr is not None:
            scales_ptr += tl.load(offsets_ptr + num_experts + expert)
        if bias_ptr is not None:
            bias_ptr += tl.load(offsets_ptr + 3 * num_experts + expert)
    if row_ids_ptr is not None:
        source = tl.load(row_ids_ptr + row).to(tl.int64)
    total = tl.zeros([TILE], partial_ptr.dtype.element_ty)
    for split in range(num_splits):
        at = (split * num_rows + row) * num_outputs + n
        total += tl.load(partial_ptr + at, mask=keep, other=0)
    one = source + tl.zeros([1], tl.int64)
    n = tl.minimum(n, num_outputs - 1)
    y = _finished(total[:, None], x_scales_ptr, one, one >= 0, scales_ptr, bias_ptr, n, FORMAT)
    at = (row * out_stride + n)[:, None]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=keep[:, None])
