"""Which rank of a group this process is, and how it is connected to the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from penstock.workers.experts.expert_file import ExpertShare
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.shards.alone import LoneExchange
from penstock.workers.models.shards.collective import CollectiveExchange
from penstock.workers.models.shards.exchange import Exchange
from penstock.workers.models.shards.memory import ExchangeSizes, MemoryExchange, mapped
from penstock.workers.models.shards.shard import Shard
from penstock.workers.models.shards.world import World
from penstock.workers.models.stages.link import StageLink
from penstock.workers.models.stages.stage import Stage

MEMORY = "memory"  # the transport of CPUs; others are backends of torch.distributed


@dataclass(frozen=True, slots=True)
class Rank:
    """One of a group of `num_stages` stages with `num_ranks` ranks each, which are numbered stage
    by stage. `descriptor`: of shared memory, of `sizes` for the group's model and each stage, or
    -1; `meeting`: where the ranks of other transports find one another, file:// or tcp://."""

    number: int
    num_ranks: int
    transport: str  # MEMORY, nccl or gloo
    sizes: ExchangeSizes
    descriptor: int = -1
    meeting: str = ""
    num_stages: int = 1
    whole_experts: bool = False

    @property
    def num_all(self) -> int:
        """Ranks of the group."""
        return self.num_ranks * self.num_stages

    def numbered(self, number: int) -> Rank:
        """Another rank of the group."""
        return replace(self, number=number)

    def shard_of(self, config: ModelConfig) -> Shard:
        """`config`: the whole model's. Raises ConfigError if it cannot be divided so."""
        return Shard(config, self.number % self.num_ranks, self.num_ranks, self.whole_experts)

    def stage_of(self, config: ModelConfig) -> Stage:
        """The same."""
        config.check_stages(self.num_stages)
        return Stage(self.number // self.num_ranks, self.num_stages, config.num_layers)

    def expert_share(self, config: ModelConfig) -> ExpertShare | None:
        """The routed experts of this rank, where they are whole; None: it has none."""
        layers, experts = self.stage_of(config).layers, self.shard_of(config).experts
        if not experts.size or not any(config.moe_layers[layers.start : layers.stop]):
            return None
        return ExpertShare(layers.start, layers.stop, experts.first, experts.end)

    def exchange_for(self, config: ModelConfig, device: torch.device) -> Exchange:
        """With the ranks of the same stage. `config`: the whole model's."""
        number, max_tokens = self.number % self.num_ranks, self.sizes.max_tokens
        if self.num_ranks == 1:
            return LoneExchange(config, number, max_tokens, device)
        if self.transport != MEMORY:
            return CollectiveExchange(
                config, number, self.num_ranks, max_tokens, device, self._world
            )
        num_bytes = self.sizes.bytes_of(config, self.num_ranks)
        memory = mapped(self.descriptor, num_bytes, self.number // self.num_ranks)
        return MemoryExchange(memory, self.sizes, config, number, self.num_ranks)

    def link(self) -> StageLink:
        """To the stages before and after."""
        return StageLink(self._world, self.num_ranks)

    @property
    def _world(self) -> World:
        backend = "gloo" if self.transport == MEMORY else self.transport
        return World(self.number, self.num_all, backend, self.meeting)
