"""Memory for packed weights and for KV, in huge pages where the system has them.

A decode step on a CPU reads every weight once, in order, and with pages of 4 KiB the walk over
their table costs it a tenth to a fifth of the memory's speed (Intel Xeon at 2.5 GHz: 17.1 GB/s
instead of 20.3 with two threads that multiply int8 as they read). KV is read in pieces of a few
KiB that lie far apart, for which the walk costs more yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading
import weakref

import torch
from torch import Tensor

SLAB_BYTES = 64 * 2**20  # shared by weights, which seldom are whole huge pages
SMALL_BYTES = 64 * 2**10  # below it a weight stays in the cache anyway
ALIGN_BYTES = 256

_lock = threading.Lock()


class _Slab:
    """A mapping that is handed out piece by piece, and unmapped when the last piece is freed."""

    def __init__(self, num_bytes: int):
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them: small pages do as well
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self._mapping = weakref.ref(mapping)  # the pieces keep it
        self.memory: Tensor | None = torch.frombuffer(mapping, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> Tensor | None:
        """The next piece; None if it does not fit, or if all earlier pieces have been freed."""
        mapping, start = self._mapping(), self._used
        if mapping is None or start + num_bytes > len(mapping):
            return None
        self._used = -(-(start + num_bytes) // ALIGN_BYTES) * ALIGN_BYTES
        memory = (
            torch.frombuffer(mapping, dtype=torch.uint8) if self.memory is None else self.memory
        )
        self.memory = None
        return memory[start : start + num_bytes]


_current: _Slab | None = None


def return_freed() -> None:
    """Give the system back what tensors had in the heap that are freed.

    glibc keeps it for what may come: after a bf16 model, six tenths of its bytes
    (tests/workers/models/test_loader.py). Does nothing where the C library has no such call.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def empty(shape: tuple[int, ...], dtype: torch.dtype, *, alone: bool = False) -> Tensor:
    """A new tensor on the CPU, whose contents are arbitrary, to be read more often than written.

    `alone`: in a mapping that is unmapped with it, for what does not live as long as weights do.
    """
    global _current
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < SMALL_BYTES:
        return torch.empty(shape, dtype=dtype)
    if alone:
        whole = _Slab(num_bytes).take(num_bytes)
        assert whole is not None
        return whole.view(dtype).view(shape)
    with _lock:
        piece = None if _current is None else _current.take(num_bytes)
        if piece is None:
            slab = _Slab(max(SLAB_BYTES, num_bytes))
            piece = slab.take(num_bytes)
            assert piece is not None
            if num_bytes < SLAB_BYTES:  # a larger one is a slab of its own
                _current = slab
    return piece.view(dtype).view(shape)
