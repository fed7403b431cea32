"""Columns of a matrix from several processes of one machine, put together in shared memory.

On a CPU only: by the native library, which can repeat the call in a recorded pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.cpu import native
from penstock.kernels.cpu.arguments import GATHER

COUNTER_BYTES = 64  # of a rank: a cache line


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """Where the ranks of a group wait for one another. All of them make the same calls."""

    # int64 [ranks * 8], shared and zeroed: of each rank, the calls that it has arrived at, the ns
    # for which it waited in them, and the bytes of other ranks' columns that it copied.
    arrived: Tensor
    calls: Tensor  # int64 [1], of this process, zeroed
    rank: int
    num_ranks: int


def gather(own: Tensor, shared: Tensor, first: int, out: Tensor | None, meeting: Meeting) -> None:
    """Columns [first, first + own.shape[1]) of all ranks' rows are `own` [T, w].

    `shared` [T, columns of all], dense and shared, not the one of the call before. `out` of that
    shape receives the whole rows, and may overlap `own`; None: they are not wanted. Returns once
    all ranks have made the call.
    """
    assert own.stride(1) == 1 and shared.is_contiguous() and own.dtype == shared.dtype
    assert out is None or (out.stride(1) == 1 and out.shape == shared.shape)
    size = own.element_size()
    native.bound.library.pk_gather(GATHER.pack(
        own.data_ptr(), own.stride(0) * size, own.shape[1] * size, shared.data_ptr(), first * size,
        shared.shape[1] * size, 0 if out is None else out.data_ptr(),
        0 if out is None else out.stride(0) * size, own.shape[0], meeting.arrived.data_ptr(),
        meeting.calls.data_ptr(), meeting.rank, meeting.num_ranks,
    ))  # fmt: skip


def counters(num_ranks: int, memory: Tensor) -> Tensor:
    """The counters of a group in `memory`, uint8, zeroed [num_ranks * COUNTER_BYTES]."""
    return memory[: num_ranks * COUNTER_BYTES].view(torch.int64)
