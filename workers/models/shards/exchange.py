"""The memory that the ranks of a group share, and what they put together in it.

Two buffers take turns between the layers. A pass that can be recorded, which has no routed experts,
has an even number of calls, and finds the buffers as they were. The logits have a buffer of their
own, and so have the hidden rows that the first rank asks logits for.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.gather import COUNTER_BYTES, Meeting, counters, gather
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.shards.shard import Span

ALIGN_BYTES = 256


@dataclass(frozen=True, slots=True)
class ExchangeSizes:
    """Of a group's memory, in numbers that all ranks know before they load."""

    max_tokens: int  # of a step
    max_logits: int  # rows at a time
    item_bytes: int

    def bytes_of(self, config: ModelConfig, num_ranks: int) -> int:
        return sum(size for _, size in self._parts(config, num_ranks))

    def parts(self, config: ModelConfig, num_ranks: int, memory: Tensor) -> dict[str, Tensor]:
        found, at = {}, 0
        for name, size in self._parts(config, num_ranks):
            found[name] = memory[at : at + size]
            at += size
        return found

    def _parts(self, config: ModelConfig, num_ranks: int) -> list[tuple[str, int]]:
        widest = max(
            config.num_heads * config.head_dim, config.intermediate_size, config.hidden_size,
            config.shared_expert_intermediate_size,
            config.num_experts_per_token * config.hidden_size,
        )  # fmt: skip
        step = self.max_tokens * widest * self.item_bytes
        logits = self.max_logits * config.vocab_size * self.item_bytes
        rows = self.max_logits * config.hidden_size * self.item_bytes
        sizes = {"counters": num_ranks * COUNTER_BYTES, "even": step, "odd": step}
        sizes |= {"logits": logits, "rows": rows}
        return [(name, -(-size // ALIGN_BYTES) * ALIGN_BYTES) for name, size in sizes.items()]


class Exchange:
    """One rank's view of the group's memory."""

    def __init__(
        self, memory: Tensor, sizes: ExchangeSizes, config: ModelConfig, rank: int, num_ranks: int
    ):
        """`memory`: uint8, shared, zeroed before any rank uses it."""
        parts = sizes.parts(config, num_ranks, memory)
        self.sizes = sizes
        self.rank = rank
        arrived = counters(num_ranks, parts["counters"])
        self._of_ranks = arrived.view(num_ranks, -1)
        self._meeting = Meeting(arrived, torch.zeros(1, dtype=torch.int64), rank, num_ranks)
        self._turns = parts["even"], parts["odd"]
        self._logits, self._rows = parts["logits"], parts["rows"]
        self._turn = 0
        # For norms over the heads of all ranks: q and k, of this rank alone.
        widths = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim)
        rows = sizes.max_tokens if config.qk_norm == "full" else 0
        self._heads = [torch.empty(rows * width * sizes.item_bytes, dtype=torch.uint8)
                       for width in widths]  # fmt: skip

    def publish(self, which: int, value: int) -> None:
        """A number of this rank (kernels/gather.py) for the others to see."""
        self._of_ranks[self.rank, which] = value

    def published(self) -> list[list[int]]:
        """The numbers of each rank."""
        return self._of_ranks.tolist()

    def gather(self, own: Tensor, span: Span, out: Tensor) -> Tensor:
        """All columns of a step's rows, of which `span` are `own` [T, w], in `out` [T, whole]."""
        shared = self._turns[self._turn]
        self._turn = 1 - self._turn
        gather(own, _rows_in(shared, own, span), span.first, out, self._meeting)
        return out

    def gather_rows(self, rows: Tensor, first: int, end: int) -> None:
        """`rows` [R, w], dense, of which this rank has computed [first, end), from all ranks."""
        width = rows.shape[1]
        span = Span(first * width, end * width, rows.numel())
        self.gather(rows[first:end].view(1, span.size), span, rows.view(1, -1))

    def heads(self, which: int, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Memory for q (0) or k (1) of all ranks, [num_rows, width]."""
        size = num_rows * width * dtype.itemsize
        return self._heads[which][:size].view(dtype).view(num_rows, width)

    def gather_logits(self, own: Tensor, span: Span, out: Tensor | None) -> None:
        gather(own, _rows_in(self._logits, own, span), span.first, out, self._meeting)

    def hidden_rows(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """Where the first rank leaves the rows that logits are wanted of: [num_rows, hidden]."""
        size = num_rows * hidden * dtype.itemsize
        return self._rows[:size].view(dtype).view(num_rows, hidden)


def _rows_in(memory: Tensor, own: Tensor, span: Span) -> Tensor:
    size = own.shape[0] * span.whole * own.element_size()
    return memory[:size].view(own.dtype).view(own.shape[0], span.whole)


def mapped(descriptor: int, num_bytes: int) -> Tensor:
    """Shared memory as a tensor, uint8 [num_bytes]."""
    memory = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
