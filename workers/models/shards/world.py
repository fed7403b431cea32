"""All ranks of a group, as PyTorch connects them: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch.distributed as dist

CONNECT_S = 120  # to find one another; gloo, for each call, too


@dataclass(frozen=True, slots=True)
class World:
    """PyTorch's default group in this process, which is its `rank`. `meeting`: where the ranks find
    one another: file:// and a path that does not exist, for those of one machine, or tcp:// and a
    free port of the first."""

    rank: int
    size: int
    backend: str
    meeting: str

    def connect(self, interface: str) -> None:
        """Called by all ranks at a time; a second call does nothing. `interface`: the name of this
        machine's network interface to the others."""
        if dist.is_initialized():
            return
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):  # an operator's own setting holds
            os.environ.setdefault(name, interface)
        dist.init_process_group(
            self.backend,
            init_method=self.meeting,
            rank=self.rank,
            world_size=self.size,
            timeout=datetime.timedelta(seconds=CONNECT_S),
        )

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
