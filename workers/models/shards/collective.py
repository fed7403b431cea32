"""Ranks that PyTorch connects: NCCL on GPUs, a GPU each; gloo where tests run it on CPUs.

They copy, and never add: what a library adds, and in which order, would depend on sizes. NCCL has
not yet run here on several GPUs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.workers.model_config import ModelConfig
from penstock.workers.models.shards.exchange import Exchange, Spans
from penstock.workers.models.shards.world import World


class CollectiveExchange(Exchange):
    """One for a process: the ranks are PyTorch's default group, or those of one stage in it."""

    shares_ids = True

    def __init__(
        self, config: ModelConfig, rank: int, num_ranks: int, max_tokens: int,
        device: torch.device, world: World,
    ):  # fmt: skip
        super().__init__(config, rank, max_tokens, device)
        self.num_ranks, self._world = num_ranks, world
        self._first = world.rank - rank  # the first of them, in the default group
        self._group: dist.ProcessGroup | None = None  # None: the default one
        self._num_calls = self._received_bytes = 0

    def connect(self, interface: str) -> None:
        self._world.connect(interface)
        if self._world.size == self.num_ranks:
            return
        for first in range(0, self._world.size, self.num_ranks):  # all ranks make all groups
            group = dist.new_group(list(range(first, first + self.num_ranks)))
            self._group = group if first == self._first else self._group

    def close(self) -> None:
        self._world.close()

    def counts(self) -> list[tuple[int, float, int]]:
        return [(self._num_calls, 0.0, self._received_bytes)] * self.num_ranks

    def gather(self, own: Tensor, spans: Spans, out: Tensor) -> Tensor:
        self._num_calls += 1
        num_rows, widest = own.shape[0], max(span.size for span in spans)
        sent = own
        if own.shape[1] < widest or not own.is_contiguous():  # all send as many bytes
            sent = own.new_empty(num_rows, widest)
            sent[:, : own.shape[1]] = own
        received = own.new_empty(self.num_ranks * num_rows, widest)
        self._received_bytes += received.nbytes - sent.nbytes
        dist.all_gather_into_tensor(received, sent, group=self._group)
        for span, part in zip(spans, received.view(self.num_ranks, num_rows, widest)):
            out[:, span.first : span.end] = part[:, : span.size]
        return out

    def gather_logits(self, own: Tensor, spans: Spans, out: Tensor | None) -> None:
        self.gather(own, spans, own.new_empty(len(own), spans[0].whole) if out is None else out)

    def share_ids(self, token_ids: Tensor) -> None:
        dist.broadcast(token_ids, self._first, group=self._group)

    def offer(self, rows: Tensor, announce: Callable[[], None]) -> None:
        announce()
        dist.broadcast(rows.contiguous(), self._first, group=self._group)

    def offered(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        rows = torch.empty(num_rows, hidden, dtype=dtype, device=self._heads[0].device)
        dist.broadcast(rows, self._first, group=self._group)
        return rows
