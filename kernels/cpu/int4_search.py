"""The search of `kernels/int4_search.py` in the native library, on all threads."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.cpu import native
from penstock.kernels.cpu.arguments import SEARCH_INT4
from penstock.kernels.int4_search import search_int4 as search_by_torch


def search_int4(weight: Tensor, scales: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernels.int4_search.search_int4`, which it calls on a GPU and without the library. The
    library's sums may differ in their last bits, and so decide otherwise between equals."""
    if not weight.is_cpu or native.bound.library is None:
        return search_by_torch(weight, scales, group)
    weight, scales = weight.contiguous(), scales.contiguous()
    num_rows, depth = weight.shape
    codes = torch.empty(num_rows, depth, dtype=torch.uint8)
    steps = torch.empty(num_rows, -(-depth // group), dtype=torch.uint8)
    offsets = torch.empty(steps.shape, dtype=torch.int8)
    native.bound.library.pk_search_int4(SEARCH_INT4.pack(
        weight.data_ptr(), weight.stride(0), scales.data_ptr(), codes.data_ptr(), steps.data_ptr(),
        offsets.data_ptr(), num_rows, depth, group, torch.get_num_threads(),
    ))  # fmt: skip
    return codes, steps, offsets
