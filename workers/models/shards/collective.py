"""Ranks that PyTorch connects: NCCL on GPUs, a GPU each; gloo where tests run it on CPUs.

They copy, and never add: what a library adds, and in which order, would depend on sizes. NCCL has
not yet run here on several GPUs.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.workers.model_config import ModelConfig
from penstock.workers.models.shards.exchange import Exchange, Spans

CONNECT_S = 120  # to find one another; gloo, for each call, too


class CollectiveExchange(Exchange):
    """One for a process: PyTorch's default group is that of the ranks."""

    def __init__(
        self, config: ModelConfig, rank: int, num_ranks: int, max_tokens: int,
        device: torch.device, backend: str, meeting: str,
    ):  # fmt: skip
        """`backend`: nccl or gloo. `meeting`: where the ranks find one another: file:// and a path
        that does not exist, for those of one machine, or tcp:// and a free port of the first."""
        super().__init__(config, rank, max_tokens, device)
        self.num_ranks, self._backend, self._meeting = num_ranks, backend, meeting
        self._num_calls = 0

    def connect(self, interface: str) -> None:
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):  # an operator's own setting holds
            os.environ.setdefault(name, interface)
        dist.init_process_group(
            self._backend,
            init_method=self._meeting,
            rank=self.rank,
            world_size=self.num_ranks,
            timeout=datetime.timedelta(seconds=CONNECT_S),
        )

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def waits(self) -> list[tuple[int, float]]:
        return [(self._num_calls, 0.0)] * self.num_ranks

    def gather(self, own: Tensor, spans: Spans, out: Tensor) -> Tensor:
        self._num_calls += 1
        num_rows, widest = own.shape[0], max(span.size for span in spans)
        sent = own
        if own.shape[1] < widest or not own.is_contiguous():  # all send as many bytes
            sent = own.new_empty(num_rows, widest)
            sent[:, : own.shape[1]] = own
        received = own.new_empty(self.num_ranks * num_rows, widest)
        dist.all_gather_into_tensor(received, sent)
        for span, part in zip(spans, received.view(self.num_ranks, num_rows, widest)):
            out[:, span.first : span.end] = part[:, : span.size]
        return out

    def gather_logits(self, own: Tensor, spans: Spans, out: Tensor | None) -> None:
        self.gather(own, spans, own.new_empty(len(own), spans[0].whole) if out is None else out)

    def offer(self, rows: Tensor, announce: Callable[[], None]) -> None:
        announce()
        dist.broadcast(rows.contiguous(), 0)

    def offered(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        rows = torch.empty(num_rows, hidden, dtype=dtype, device=self._heads[0].device)
        dist.broadcast(rows, 0)
        return rows
