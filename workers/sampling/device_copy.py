"""Asynchronous copies between host and device: later launches overlap with them.

On a CPU nothing is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` from the host on `device`; the host does not wait."""
    if device.type != "cuda":
        return values
    if not values.numel():  # nothing to pin
        return values.to(device)
    # From memory that is not pinned, the driver may wait until all launched work is done.
    return values.pin_memory().to(device, non_blocking=True)


def copy_in(values: Tensor, out: Tensor) -> None:
    """Copy `values` from the host into `out`; the host does not wait."""
    out.copy_(values.pin_memory() if out.is_cuda else values, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """`values` on the host; valid once a `Mark` that was made later has been waited for."""
    if values.device.type != "cuda":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


class Mark:
    """A point in the device's queue (a CUDA event)."""

    def __init__(self, device: torch.device):
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    @property
    def is_waited_for(self) -> bool:
        """Whether `wait` may take time: False on a CPU, where all work is done already."""
        return self._event is not None

    def wait(self) -> None:
        """Wait until the device has done all work that was launched before."""
        if self._event is not None:
            self._event.synchronize()
