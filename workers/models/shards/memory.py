"""Ranks on the CPUs of one machine: they copy into memory that they share.

Two buffers take turns between the layers. A pass that can be recorded, which has no routed experts,
has an even number of calls, and finds the buffers as they were. A model and its draft model, whose
passes follow one another, share one exchange, with its turns and its count of calls. The logits
have a buffer of their own, and so have the hidden rows that the first rank asks logits for.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.gather import COUNTER_BYTES, Meeting, counters, gather
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.shards.exchange import ITEM_BYTES, Exchange, Spans

ALIGN_BYTES = 256


@dataclass(frozen=True, slots=True)
class ExchangeSizes:
    """Of a group's memory, in numbers that all ranks know before they load."""

    max_tokens: int  # of a step
    max_logits: int  # rows at a time

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
            config.num_heads * config.head_dim,
            config.intermediate_size,
            config.hidden_size,
            config.shared_expert_intermediate_size,
            config.num_experts_per_token * max(config.hidden_size, config.moe_intermediate_size),
            0 if config.linear_attention is None else config.linear_attention.values,
        )
        step = self.max_tokens * widest * ITEM_BYTES
        logits = self.max_logits * config.vocab_size * ITEM_BYTES
        rows = self.max_logits * config.hidden_size * ITEM_BYTES
        sizes = {"counters": num_ranks * COUNTER_BYTES, "even": step, "odd": step}
        sizes |= {"logits": logits, "rows": rows}
        return [(name, -(-size // ALIGN_BYTES) * ALIGN_BYTES) for name, size in sizes.items()]


class MemoryExchange(Exchange):
    """By the native library's `gather`, which a recorded pass repeats."""

    def __init__(
        self, memory: Tensor, sizes: ExchangeSizes, config: ModelConfig, rank: int, num_ranks: int
    ):
        """`memory`: uint8, shared, zeroed before any rank uses it."""
        super().__init__(config, rank, sizes.max_tokens, torch.device("cpu"))
        parts = sizes.parts(config, num_ranks, memory)
        arrived = counters(num_ranks, parts["counters"])
        self._of_ranks = arrived.view(num_ranks, -1)
        self._meeting = Meeting(arrived, torch.zeros(1, dtype=torch.int64), rank, num_ranks)
        self._turns = parts["even"], parts["odd"]
        self._logits, self._rows = parts["logits"], parts["rows"]
        self._turn = 0

    def counts(self) -> list[tuple[int, float, int]]:
        numbers = self._of_ranks.tolist()
        return [(calls, waited_ns / 1e9, received) for calls, waited_ns, received, *_ in numbers]

    def gather(self, own: Tensor, spans: Spans, out: Tensor) -> Tensor:
        shared = self._turns[self._turn]
        self._turn = 1 - self._turn
        self._gather(shared, own, spans, out)
        return out

    def gather_logits(self, own: Tensor, spans: Spans, out: Tensor | None) -> None:
        self._gather(self._logits, own, spans, out)

    def offer(self, rows: Tensor, announce: Callable[[], None]) -> None:
        self.offered(len(rows), rows.shape[1], rows.dtype).copy_(rows)
        announce()

    def offered(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        size = num_rows * hidden * dtype.itemsize
        return self._rows[:size].view(dtype).view(num_rows, hidden)

    def _gather(self, memory: Tensor, own: Tensor, spans: Spans, out: Tensor | None) -> None:
        span = spans[self.rank]
        size = own.shape[0] * span.whole * own.element_size()
        shared = memory[:size].view(own.dtype).view(own.shape[0], span.whole)
        gather(own, shared, span.first, out, self._meeting)


def mapped(descriptor: int, num_bytes: int, part: int = 0) -> Tensor:
    """Part `part` of shared memory, whose parts have `num_bytes` each, as a tensor, uint8."""
    first, end = part * num_bytes, (part + 1) * num_bytes
    memory = mmap.mmap(descriptor, end, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))[first:]
