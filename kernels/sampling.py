"""Sampling: logits to token ids, each row with its own temperature and filters.

A draw inverts the cumulative distribution in vocabulary order with one uniform number a row, so a
row's token depends on that row alone. Backends: on a GPU a Triton kernel that finds a filter's edge
by halving the interval in which it lies; on a CPU the native library by radix selection, without a
sort in either; else plain PyTorch.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.cpu import native
from penstock.kernels.cpu import sampling as native_sampling
from penstock.kernels.reference import sampling as reference
from penstock.kernels.types import SamplingRows


class SamplingBackend(Protocol):
    """What each backend implements. `sample` below checks the arguments before it calls it."""

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor: ...


def _backend(logits: Tensor) -> SamplingBackend:
    if logits.is_cuda:
        return _triton()
    is_native = native.usable(logits) is not None and logits.stride(1) == 1
    return native_sampling if is_native else reference


@functools.cache
def _triton() -> SamplingBackend:
    from penstock.kernels.triton import sampling  # Triton is not installed on every machine

    return sampling


def sample(logits: Tensor, rows: SamplingRows, *, is_fast: bool = True) -> Tensor:
    """One token id a row of `logits` fp32 [R, V]: int64 [R] on the same device.

    `is_fast`: False: by plain PyTorch, with a sort, for comparisons.
    -1 where a row holds NaN or +inf, or nothing but -inf. On a GPU the host does not wait.
    """
    assert logits.dtype == torch.float32 and logits.dim() == 2
    assert rows.uniform.dtype == torch.float64 and rows.uniform.shape[0] == logits.shape[0]
    return (_backend(logits) if is_fast else reference).sample(logits, rows)
