"""A matrix product for Triton's interpreter: an element depends on its row, its column and the
order of the inputs alone, as a tensor core's does within one instruction.

The interpreter's own is NumPy's, whose library chooses another order for other shapes: with it,
equal bits would be luck, and unequal ones no fault of a kernel. On a GPU nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.cases import CUDA


@contextmanager
def dot_by_elements() -> Iterator[None]:
    """Inputs are added one after the other, products rounded to fp32. bf16 is multiplied, too."""
    if CUDA:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    before = builder.create_dot

    def widened(handle: Any) -> NDArray[np.float32]:
        data = handle.data
        if handle.dtype == tl.bfloat16:
            return (data.astype(np.uint32) << 16).view(np.float32)
        if handle.dtype.primitive_bitwidth == 8:
            half = interpreter._convert_float(data, handle.dtype, tl.float16, None)
            data = half.view(np.float16)
        return np.asarray(data, np.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if d.data.dtype != np.float32:
            return before(self, a, b, d, *precision)  # integers
        columns, rows = np.ascontiguousarray(widened(a).T), np.ascontiguousarray(widened(b))
        total = np.array(d.data)
        product = np.empty_like(total)
        for column, row in zip(columns, rows, strict=True):
            np.multiply(column[:, None], row[None, :], out=product)
            total += product
        return interpreter.TensorHandle(total, d.dtype.scalar)

    builder.create_dot = create_dot
    try:
        yield
    finally:
        builder.create_dot = before
