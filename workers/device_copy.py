"""Between host and device without waiting: what is launched next goes on beside a copy.

On a CPU there is nothing to copy, and everything is there at once. Knows tensors; nothing of steps.
The CUDA side has not yet been run on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values`, which lie on the host, on `device`; the host waits for nothing."""
    if device.type != "cuda":
        return values
    if not values.numel():  # nothing to wait for, and nothing to pin
        return values.to(device)
    # From memory that is not pinned, the driver may wait until all that was launched is done.
    return values.pin_memory().to(device, non_blocking=True)


def copy_in(values: Tensor, out: Tensor) -> None:
    """`values`, which lie on the host, into `out`; the host waits for nothing."""
    out.copy_(values.pin_memory() if out.is_cuda else values, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """`values` on the host, good once a `Mark` that is made later was waited for."""
    if values.device.type != "cuda":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


class Mark:
    """A place in the order of what the device was given."""

    def __init__(self, device: torch.device):
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    @property
    def is_waited_for(self) -> bool:
        """Whether `wait` takes time: False where the host computes, and so has waited already."""
        return self._event is not None

    def wait(self) -> None:
        """Until the device has done all that it was given before."""
        if self._event is not None:
            self._event.synchronize()
