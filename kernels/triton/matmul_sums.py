"""What the Triton kernels of `matmul_kernels.py` add up: W x^T over some inputs, step by step, in
each number format.

A step lies within one group; its products are exact or in fp32, and its sum is scaled, not its
weights.
"""

# Parameters of a kernel are pointers and constants, which Python types do not tell apart.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nibble_values(nibble, zero, table_ptr, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """What 4-bit codes stand for, before the scale: int4's exact integers, or a table's.

    The bits of 2^n + nibble are those of 2^n with the nibble put in: no conversion is needed.
    """
    if FORMAT == "nf4" or FORMAT == "mxfp4":
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
def byte_values(codes, FORMAT: tl.constexpr):
    """8-bit codes as the tensor cores take them."""
    if FORMAT == "fp8":
        codes = codes.to(tl.float8e4nv, bitcast=True)
    elif FORMAT == "fp8_upcast":  # sign, then 4 + 3 bits at the place of fp16's 5 + 10
        wide = codes.to(tl.uint16)
        codes = (((wide & 128) << 8) | ((wide & 127) << 7)).to(tl.float16, bitcast=True)
    return codes


@triton.jit
def sum_whole(
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
        w, x = byte_values(w, FORMAT), byte_values(x, FORMAT)
        if FORMAT == "fp8":  # Hopper sums FP8 in 14 bits; after 128 inputs the sum goes on in fp32
            acc = tl.dot(w, x, acc, max_num_imprecise_acc=128)
        else:
            acc = tl.dot(w, x, acc, input_precision="ieee", out_dtype=acc.dtype)
    return acc


@triton.jit
def sum_int8_groups(
    acc, x_ptr, x_scales_ptr, x_rows, sources, seen, codes_ptr, n, codes_stride, first, end,
    num_inputs,
    GROUP: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The same for int8 rows with scales of groups: a step lies within one group, its sum is exact,
    and scaled in fp32."""
    num_groups = tl.cdiv(num_inputs, GROUP)
    for k in range(first, end, STEP):
        at = k + tl.arange(0, STEP)
        w_at, x_at = n[:, None] * codes_stride + at[None, :], x_rows[None, :] + at[:, None]
        if EVEN:
            w = tl.load(codes_ptr + w_at)
            x = tl.load(x_ptr + x_at, mask=seen[None, :], other=0)
        else:
            w = tl.load(codes_ptr + w_at, mask=(at < num_inputs)[None, :], other=0)
            x = tl.load(x_ptr + x_at, mask=seen[None, :] & (at < num_inputs)[:, None], other=0)
        scales = tl.load(x_scales_ptr + sources * num_groups + k // GROUP, mask=seen, other=0.0)
        part = tl.dot(w, x, out_dtype=tl.int32).to(tl.float32)
        acc = tl.fma(part, tl.broadcast_to(scales[None, :], part.shape), acc)
    return acc


@triton.jit
def open_steps(nibbles, steps_ptr, n, num_outputs, k, num_inputs, GROUP: tl.constexpr):
    """int8 codes of nibbles [outputs, inputs from k on]: step * nibble + offset of each group, of
    which an int16 holds offset * 32 + step."""
    at = k + tl.arange(0, nibbles.shape[1])
    group = tl.minimum(at, num_inputs - 1) // GROUP * num_outputs
    both = tl.load(steps_ptr + group[None, :] + n[:, None])
    return (nibbles.to(tl.int16) * (both & 31) + (both >> 5)).to(tl.int8)


@triton.jit
def sum_int4_steps(
    acc, x_ptr, x_scales_ptr, x_rows, sources, seen, codes_ptr, n, num_outputs, steps_ptr,
    first, end, num_inputs,
    GROUP: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The same as `sum_int8_groups` for weights kept in 4 bits, in slabs as `sum_nibbles` has them,
    which are the groups of the rows: opened, then multiplied as int8."""
    HALF: tl.constexpr = STEP // 2
    num_groups = tl.cdiv(num_inputs, STEP)
    j = tl.arange(0, HALF)
    for k in range(first, end, STEP):
        packed = tl.load(codes_ptr + (k // STEP * num_outputs + n)[:, None] * HALF + j[None, :])
        at = x_rows[None, :] + (k + j)[:, None]
        low_seen, high_seen = seen[None, :], seen[None, :]
        if not EVEN:
            low_seen = low_seen & (k + j < num_inputs)[:, None]
            high_seen = high_seen & (k + HALF + j < num_inputs)[:, None]
        low_x = tl.load(x_ptr + at, mask=low_seen, other=0)
        high_x = tl.load(x_ptr + at + HALF, mask=high_seen, other=0)
        low = open_steps(packed & 15, steps_ptr, n, num_outputs, k, num_inputs, GROUP)
        high = open_steps(packed >> 4, steps_ptr, n, num_outputs, k + HALF, num_inputs, GROUP)
        part = tl.dot(low, low_x, out_dtype=tl.int32)
        part = tl.dot(high, high_x, part, out_dtype=tl.int32).to(tl.float32)
        scales = tl.load(x_scales_ptr + sources * num_groups + k // STEP, mask=seen, other=0.0)
        acc = tl.fma(part, tl.broadcast_to(scales[None, :], part.shape), acc)
    return acc


@triton.jit
def sum_nibbles(
    acc, x_ptr, x_rows, seen, codes_ptr, n, num_outputs, scales_ptr, zeros_ptr, table_ptr,
    first, end, num_inputs,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The same for int4, nf4 and mxfp4, whose codes lie in slabs [inputs / STEP, outputs, STEP /
    2]: a byte's low nibble is input j of the slab, its high one input j + STEP / 2. A slab lies
    within one group, so its sum is scaled instead of its weights, which keeps these exact."""
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
        low = nibble_values(packed & 15, zero, table_ptr, FORMAT, dtype)
        high = nibble_values(packed >> 4, zero, table_ptr, FORMAT, dtype)
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
def sum_grouped(
    acc, x_ptr, x_rows, seen, codes_ptr, n, codes_stride, num_outputs, scales_ptr, zeros_ptr,
    first, end, num_inputs,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The same for 8-bit codes with scales of groups, which are exact in every dtype of x: for
    integers, or fp8g's E4M3 at 2^-8 of its values. A step lies within one group. Not yet run on a
    GPU."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    for k in range(first, end, STEP):
        at = k + tl.arange(0, STEP)
        codes = tl.load(codes_ptr + n[:, None] * codes_stride + at[None, :])
        w = byte_values(codes, "fp8_upcast" if FORMAT == "fp8g" else FORMAT).to(dtype)
        mask = seen[None, :] if EVEN else seen[None, :] & (at < num_inputs)[:, None]
        x = tl.load(x_ptr + x_rows[None, :] + at[:, None], mask=mask, other=0.0)
        group = k // GROUP * num_outputs + n
        part = tl.dot(w, x, input_precision="ieee")
        if zeros_ptr is not None:
            sums = tl.dot(tl.full(w.shape, 1.0, dtype), x, input_precision="ieee")
            part = tl.fma(sums, -tl.load(zeros_ptr + group)[:, None], part)
        acc = tl.fma(part, tl.load(scales_ptr + group)[:, None], acc)
    return acc
