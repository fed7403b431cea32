"""Which rank of a group this process is, and how it is connected to the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.workers.model_config import ModelConfig
from penstock.workers.models.shards.collective import CollectiveExchange
from penstock.workers.models.shards.exchange import Exchange
from penstock.workers.models.shards.memory import ExchangeSizes, MemoryExchange, mapped

MEMORY = "memory"  # the transport of CPUs; others are backends of torch.distributed


@dataclass(frozen=True, slots=True)
class Rank:
    """One of a group. `descriptor`: of shared memory, of `sizes` for the group's model, or -1;
    `meeting`: where the ranks of other transports find one another, file:// or tcp://."""

    number: int
    num_ranks: int
    transport: str  # MEMORY, nccl or gloo
    sizes: ExchangeSizes
    descriptor: int = -1
    meeting: str = ""

    def exchange_for(self, config: ModelConfig, device: torch.device) -> Exchange:
        """`config`: the whole model's."""
        if self.transport != MEMORY:
            return CollectiveExchange(
                config, self.number, self.num_ranks, self.sizes.max_tokens, device,
                self.transport, self.meeting,
            )  # fmt: skip
        memory = mapped(self.descriptor, self.sizes.bytes_of(config, self.num_ranks))
        return MemoryExchange(memory, self.sizes, config, self.number, self.num_ranks)
