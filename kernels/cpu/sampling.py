"""Sampling on the CPU by the native library: packs the arguments of its function."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.cpu import native
from penstock.kernels.cpu.arguments import SAMPLE
from penstock.kernels.types import SamplingRows


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """`kernels/sampling.sample`, for contiguous rows that the library supports."""
    num_rows, vocab = logits.shape
    threads = min(torch.get_num_threads(), num_rows)
    scratch = torch.empty(threads, vocab)
    ids = torch.empty(num_rows, dtype=torch.int64)
    native.bound.library.pk_sample(SAMPLE.pack(
        native.DTYPES[logits.dtype], logits.data_ptr(), logits.stride(0), num_rows, vocab,
        rows.inverse_temperature.data_ptr(), rows.top_k.data_ptr(), rows.top_p.data_ptr(),
        rows.min_p.data_ptr(), rows.uniform.data_ptr(), scratch.data_ptr(), ids.data_ptr(), threads,
    ))  # fmt: skip
    return ids
