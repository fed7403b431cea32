"""How a rank hands its rows to the next stage: by PyTorch's point-to-point operations.

NCCL on GPUs, gloo on CPUs, on one machine and over several. What is sent is not waited for, so a
stage goes on with its next part. NCCL has not yet run here on several GPUs.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.workers.models.shards.world import World


class StageLink:
    """One rank's link to the same rank of the stages before and after; the last has the first after
    it."""

    def __init__(self, world: World, ranks_a_stage: int):
        self._world = world
        self._before = (world.rank - ranks_a_stage) % world.size
        self._after = (world.rank + ranks_a_stage) % world.size
        self._sent: list[dist.Work] = []
        self.num_received, self.waited_s, self.received_bytes = 0, 0.0, 0

    def connect(self, interface: str) -> None:
        self._world.connect(interface)

    def close(self) -> None:
        self._world.close()

    def send(self, rows: Tensor) -> None:
        """`rows` [T, hidden], dense, which stay as they are until `finish`."""
        work = dist.isend(_bytes(rows), self._after)
        assert work is not None
        self._sent.append(work)

    def receive(self, rows: Tensor) -> None:
        """Wait for `rows` [T, hidden], dense."""
        began_s = time.perf_counter()
        dist.recv(_bytes(rows), self._before)
        self.num_received += 1
        self.received_bytes += rows.nbytes
        self.waited_s += time.perf_counter() - began_s

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for work in self._sent:
            work.wait()
        self._sent.clear()


def _bytes(rows: Tensor) -> Tensor:
    return rows.view(-1).view(torch.uint8)
