"""What the ranks of a group put together, whatever it travels through.

memory.py has the shared memory of processes on one machine's CPUs, collective.py PyTorch's
collective operations, for GPUs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from penstock.workers.errors import InvariantError
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.shards.shard import Span

ITEM_BYTES = 4  # of the widest activations
Spans = Sequence[Span]  # of all ranks, in their order


class Exchange(ABC):
    """One rank's end. All ranks make the same calls, in the same order; none of them computes."""

    def __init__(self, config: ModelConfig, rank: int, max_tokens: int, device: torch.device):
        """`config`: the whole model's. `max_tokens`: of a step."""
        self.rank = rank
        # For norms over the heads of all ranks: q and k, of this rank alone.
        widths = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim)
        rows = max_tokens if config.qk_norm == "full" else 0
        self._heads = [
            torch.empty(rows * width * ITEM_BYTES, dtype=torch.uint8, device=device)
            for width in widths
        ]

    def connect(self, interface: str) -> None:
        """Called once, by all ranks at a time, when all have loaded. `interface`: the name of this
        machine's network interface to the others; lo, if all are on it."""
        return

    def close(self) -> None:
        """The others have ended."""
        return

    def counts(self) -> list[tuple[int, float, int]]:
        """Of each rank, how many calls it made, how long it waited in them, in seconds, and the
        bytes that it received; empty where that is not measured."""
        return []

    # Whether `share_ids` does something: elsewhere the first rank's host knows all ids.
    shares_ids = False

    def share_ids(self, token_ids: Tensor) -> None:
        """The first rank gives its `token_ids` int64 [T] to the others, who receive them here."""
        raise InvariantError("the ids of a step come with it")

    @abstractmethod
    def gather(self, own: Tensor, spans: Spans, out: Tensor) -> Tensor:
        """All columns of a step's rows in `out` [T, whole]; `own` [T, w] are this rank's, and may
        overlap it."""

    @abstractmethod
    def gather_logits(self, own: Tensor, spans: Spans, out: Tensor | None) -> None:
        """The same for logits, which the first rank alone has an `out` for."""

    @abstractmethod
    def offer(self, rows: Tensor, announce: Callable[[], None]) -> None:
        """The first rank gives `rows` [R, hidden] to the others, who `announce` tells of it."""

    @abstractmethod
    def offered(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """The rows that the first rank offers, on another rank."""

    def gather_rows(self, rows: Tensor, bounds: Sequence[int]) -> None:
        """`rows` [R, w], dense, of which each rank has computed those from its bound to the next,
        from all ranks."""
        width, own = rows.shape[1], rows[bounds[self.rank] : bounds[self.rank + 1]]
        spans = [Span(first * width, end * width, rows.numel()) for first, end in pairwise(bounds)]
        self.gather(own.view(1, own.numel()), spans, rows.view(1, -1))

    def heads(self, which: int, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Memory for q (0) or k (1) of all ranks, [num_rows, width]."""
        size = num_rows * width * dtype.itemsize
        return self._heads[which][:size].view(dtype).view(num_rows, width)
