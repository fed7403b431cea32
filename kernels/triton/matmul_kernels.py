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
def _nibble_values(nibble, zero, table_ptr, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """What 4-bit codes stand for, before the scale: int4's exact integers, or nf4's table.

    The bits of 2^n + nibble are those of 2^n with the nibble put in: no conversion is needed.
    """
    if FORMAT == "nf4":
        value = tl.load(table_ptr + nibble.to(tl.int32))
    elif dtype == tl.float16:
        wide = (nibble.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
        value = wide - (zero + 1024.0).to(tl.float16)
    elif dtype == tl.bfloat16:
        wide = (nibble.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
        value = wide - (zero + 128.0).to(tl.bfloat16)
    else:
        value = nibble.to(tl.float32) - zero
    return value


@triton.jit
def _byte_values(codes, FORMAT: tl.constexpr):
    """8-bit codes as the tensor cores take them."""
    if FORMAT == "fp8":
        codes = codes.to(tl.float8e4nv, bitcast=True)
    elif FORMAT == "fp8_upcast":  # sign, then 4 + 3 bits at the place of fp16's 5 + 10
        wide = codes.to(tl.uint16)
        codes = (((wide & 128) << 8) | ((wide & 127) << 7)).to(tl.float16, bitcast=True)
    return codes


@triton.jit
def _sum_whole(
    acc, x_ptr, x_rows, seen, codes_ptr, n, codes_stride, first, end, num_inputs,
    FORMAT: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """acc + W x^T over the inputs [first, end), for formats of one code an element."""
    for k in range(first, end, STEP):
        at = k + tl.arange(0, STEP)
        w_at, x_at = n[:, None] * codes_stride + at[None, :], x_rows[None, :] + at[:, None]
        if EVEN:
            w = tl.load(codes_ptr + w_at)
            x = tl.load(x_ptr + x_at, mask=seen[None, :], other=0)
        else:
            w = tl.load(codes_ptr + w_at, mask=(at < num_inputs)[None, :], other=0)
            x = tl.load(x_ptr + x_at, mask=seen[None, :] & (at < num_inputs)[:, None], other=0)
        w, x = _byte_values(w, FORMAT), _byte_values(x, FORMAT)
        if FORMAT == "fp8":  # Hopper sums FP8 in 14 bits; after 128 inputs the sum goes on in fp32
            acc = tl.dot(w, x, acc, max_num_imprecise_acc=128)
        else:
            acc = tl.dot(w, x, acc, input_precision="ieee", out_dtype=acc.dtype)
    return acc


@triton.jit
def _sum_nibbles(
    acc, x_ptr, x_rows, seen, codes_ptr, n, num_outputs, scales_ptr, zeros_ptr, table_ptr,
    first, end, num_inputs,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The same for int4 and nf4, whose codes lie in slabs [inputs / STEP, outputs, STEP / 2]: a
    byte's low nibble is input j of the slab, its high one input j + STEP / 2. A slab lies within
    one group, so its sum is scaled instead of its weights, which keeps these exact."""
    HALF: tl.constexpr = STEP // 2
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    j = tl.arange(0, HALF)
    for k in range(first, end, STEP):
        packed = tl.load(codes_ptr + (k // STEP * num_outputs + n)[:, None] * HALF + j[None, :])
        at = x_rows[None, :] + (k + j)[:, None]
        if EVEN:
            low_x = tl.load(x_ptr + at, mask=seen[None, :], other=0.0)
            high_x = tl.load(x_ptr + at + HALF, mask=seen[None, :], other=0.0)
        else:
            low_seen = seen[None, :] & (k + j < num_inputs)[:, None]
            high_seen = seen[None, :] & (k + HALF + j < num_inputs)[:, None]
            low_x = tl.load(x_ptr + at, mask=low_seen, other=0.0)
            high_x = tl.load(x_ptr + at + HALF, mask=high_seen, other=0.0)
        group = k // GROUP * num_outputs + n
        zero = 8.0
        if zeros_ptr is not None:  # noqa: SIM102 - Triton's `and` looks at both sides
            if zeros_ptr.dtype.element_ty != tl.float32:
                zero = tl.load(zeros_ptr + group).to(tl.float32)[:, None]
        low = _nibble_values(packed & 15, zero, table_ptr, FORMAT, dtype)
        high = _nibble_values(packed >> 4, zero, table_ptr, FORMAT, dtype)
        part = tl.dot(low, low_x, input_precision="ieee")
        part = tl.dot(high, high_x, part, input_precision="ieee")
        if zeros_ptr is not None:  # noqa: SIM102
            if zeros_ptr.dtype.element_ty == tl.float32:  # no code can be a real number less
                ones = tl.full(low.shape, 1.0, dtype)
                sums = tl.dot(ones, low_x, input_precision="ieee")  # in the order of a product
                sums = tl.dot(ones, high_x, sums, input_precision="ieee")
                part = tl.fma(sums, 8.0 - tl.load(zeros_ptr + group)[:, None], part)
        acc = tl.fma(part, tl.load(scales_ptr + group)[:, None], acc)
    return acc


@triton.jit
def _sum_grouped(
    acc, x_ptr, x_rows, seen, codes_ptr, n, codes_stride, num_outputs, scales_ptr, zeros_ptr,
    first, end, num_inputs,
    GROUP: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The same for 8-bit codes with scales of groups, which are exact in every dtype of x. A step
    lies within one group. Not yet run on a GPU."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    for k in range(first, end, STEP):
        at = k + tl.arange(0, STEP)
        w = tl.load(codes_ptr + n[:, None] * codes_stride + at[None, :]).to(dtype)
        mask = seen[None, :] if EVEN else seen[None, :] & (at < num_inputs)[:, None]
        x = tl.load(x_ptr + x_rows[None, :] + at[:, None], mask=mask, other=0.0)
        group = k // GROUP * num_outputs + n
        part = tl.dot(w, x, input_precision="ieee")
        if zeros_ptr is not None:
            sums = tl.dot(tl.full(w.shape, 1.0, dtype), x, input_precision="ieee")
            part = tl.fma(sums, -tl.load(zeros_ptr + group)[:, None], part)
        acc = tl.fma(part, tl.load(scales_ptr + group)[:, None], acc)
    return acc


@triton.jit
def _sum_piece(
    acc, piece, inputs_a_piece, x_ptr, x_rows, seen, codes_ptr, n, codes_stride,
    num_outputs, scales_ptr, zeros_ptr, table_ptr, num_inputs,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """acc + W x^T [outputs, rows] over the inputs of one piece."""
    first = piece * inputs_a_piece
    end = tl.minimum(first + inputs_a_piece, num_inputs)
    if FORMAT == "int4" or FORMAT == "nf4":
        acc = _sum_nibbles(
            acc, x_ptr, x_rows, seen, codes_ptr, n, num_outputs, scales_ptr, zeros_ptr, table_ptr,
            first, end, num_inputs, FORMAT, GROUP, STEP, EVEN,
        )  # fmt: skip
    elif FORMAT == "int8g":
        acc = _sum_grouped(
            acc, x_ptr, x_rows, seen, codes_ptr, n, codes_stride, num_outputs, scales_ptr,
            zeros_ptr, first, end, num_inputs, GROUP, STEP, EVEN,
        )  # fmt: skip
    else:
        acc = _sum_whole(
            acc, x_ptr, x_rows, seen, codes_ptr, n, codes_stride, first, end, num_inputs,
            FORMAT, STEP, EVEN,
        )  # fmt: skip
    return acc


@triton.jit
def _finished(total, x_scales_ptr, rows, seen, scales_ptr, bias_ptr, n, FORMAT: tl.constexpr):
    """Sums [outputs, rows] -> y in fp32: the scales that are not yet in it, and the bias."""
    y = total.to(tl.float32)
    if x_scales_ptr is not None:  # both operands are codes
        x_scales = tl.load(x_scales_ptr + rows, mask=seen, other=0.0)
        if FORMAT == "fp8_upcast":
            y *= UPCAST
        y = y * tl.load(scales_ptr + n)[:, None] * x_scales[None, :]
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

    Not yet run on a GPU.
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
            acc, split, inputs_a_piece, x_ptr, x_rows, seen, codes_ptr, n, codes_stride,
            num_outputs, scales_ptr, zeros_ptr, table_ptr, num_inputs, FORMAT, GROUP, STEP, EVEN,
        )  # fmt: skip
    else:
        for piece in range(PIECES):
            acc += _sum_piece(
                tl.zeros_like(acc), piece, inputs_a_piece, x_ptr, x_rows, seen, codes_ptr, n,
                codes_stride, num_outputs, scales_ptr, zeros_ptr, table_ptr, num_inputs,
                FORMAT, GROUP, STEP, EVEN,
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
    """One program a tile of one row: its pieces, in their order. Not yet run on a GPU."""
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
