"""Which rank of a group this process is, and the memory that it shares with the others."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.workers.model_config import ModelConfig
from penstock.workers.models.shards.exchange import Exchange, ExchangeSizes, mapped


@dataclass(frozen=True, slots=True)
class Rank:
    """One of a group. `descriptor` is of shared memory, of `sizes` for the group's model."""

    number: int
    num_ranks: int
    descriptor: int
    sizes: ExchangeSizes

    def exchange_for(self, config: ModelConfig) -> Exchange:
        """`config`: the whole model's."""
        memory = mapped(self.descriptor, self.sizes.bytes_of(config, self.num_ranks))
        return Exchange(memory, self.sizes, config, self.number, self.num_ranks)
