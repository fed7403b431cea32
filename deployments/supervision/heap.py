"""How the C library manages memory: one heap in a process, which an ingress grows in large steps.

By default glibc gives threads up to eight heaps a core, and no thread uses what another one has
freed in its own: an ingress, with its 45 threads, came to hold as much freed memory as memory in
use (docs/benchmarks/results.md). Python's lock serialises most allocations anyway.

The number of heaps has to be in a process's environment: Ray's threads have as many heaps as they
may have before any code of ours runs, and `mallopt` is then too late.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD = -1, -2  # malloc.h
GROWS_BY_BYTES = 1 << 20  # glibc's own step is 128 KiB, each a system call
KEEPS_FREE_BYTES = 16 << 20  # at the end of the heap, before it shrinks


def one_heap() -> dict[str, str]:
    """Environment variables of a process whose threads share one heap. Other C libraries than glibc
    ignore them."""
    return {"MALLOC_ARENA_MAX": "1"}


def grow_in_large_steps() -> bool:
    """Let this process's heap grow and shrink in large steps; false where the C library cannot.

    For the ingress, which allocates little at a time. glibc then no longer adapts the size from
    which an allocation gets pages of its own, which the tensors of a worker profit from.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl, macOS
        return False
    grows = mallopt(M_TOP_PAD, GROWS_BY_BYTES) == 1
    return mallopt(M_TRIM_THRESHOLD, KEEPS_FREE_BYTES) == 1 and grows
