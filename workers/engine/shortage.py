"""Says what to do where the memory does not suffice while a model is loaded."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from penstock.workers.errors import LoadError

_TORCH_ON_CPU = "DefaultCPUAllocator: can't allocate memory"
_REMEDY = (
    "use a smaller format (--weights int8 or int4), a smaller KV cache (--kv-cache-gb), or divide "
    "the model among more processes with memory of their own (--tensor-parallel-size)"
)


@contextmanager
def named_shortages(model: str, device: str) -> Iterator[None]:
    """Raises LoadError in place of what says that an allocation failed, on a CPU or a GPU."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, RuntimeError, OSError) as error:
        if not _is_shortage(error):
            raise
        place = "this process may use" if device == "cpu" else "of the GPU"
        raise LoadError(f"the memory {place} does not suffice for {model}: {_REMEDY}") from error


def _is_shortage(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return _TORCH_ON_CPU in str(error)
