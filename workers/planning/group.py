"""What a group of devices shares out, and what it sends: tensor parallelism as Penstock cuts it.

Every linear is cut by its outputs, and whole rows are gathered (workers/models/shards/). Of the
uneven shares, the largest counts: the other ranks wait for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.workers.errors import ConfigError
from penstock.workers.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Link:
    """How devices of a group exchange data: seconds a call, and bytes/s that each receives."""

    name: str
    call_s: float
    bandwidth: float
    source: str


# Estimates from public reports; none of them was measured here.
LINKS = {
    "nvlink": Link("nvlink", 10e-6, 366e9, "assumed: 10 us a call, 366 GB/s (4 H100 by NVLink)"),
    "pcie": Link("pcie", 25e-6, 22e9, "assumed: 25 us a call, 22 GB/s (PCIe 4)"),
    "memory": Link("memory", 10e-6, 10e9, "assumed: 10 us a call, 10 GB/s (one machine's memory)"),
}


@dataclass(frozen=True, slots=True)
class Group:
    """`ranks` devices that share a model; one alone sends nothing."""

    ranks: int = 1
    link: Link = LINKS["nvlink"]

    def check(self, model: ModelConfig) -> None:
        """Raises ConfigError if `model` cannot be cut so."""
        if not 1 <= self.ranks <= model.num_kv_heads:
            raise ConfigError(
                f"tensor_parallel_size must lie in [1, {model.num_kv_heads}], the model's KV "
                f"heads; got {self.ranks}"
            )

    def kv_share(self, model: ModelConfig) -> float:
        """Of the heads, on the rank that has most."""
        return math.ceil(model.num_kv_heads / self.ranks) / model.num_kv_heads

    def routed_share(self, model: ModelConfig) -> float:
        """Of the routed experts, likewise."""
        experts = max(1, model.num_experts)
        return math.ceil(experts / self.ranks) / experts

    def calls(self, model: ModelConfig) -> int:
        """Gathers of a step, its logits included."""
        if self.ranks == 1:
            return 0
        return sum(map(len, self._widths(model))) + 1

    def sent_bytes(self, model: ModelConfig, rows: int, head_rows: int, item_bytes: int) -> float:
        """Bytes that a rank receives in a step of `rows`, of which `head_rows` need logits."""
        per_row = sum(sum(widths) for widths in self._widths(model))
        elements = rows * per_row + head_rows * model.vocab_size
        return elements * item_bytes * (self.ranks - 1) / self.ranks

    def exchange_s(self, model: ModelConfig, rows: int, head_rows: int, item_bytes: int) -> float:
        """Seconds of a step for its gathers."""
        if self.ranks == 1:
            return 0.0
        sent = self.sent_bytes(model, rows, head_rows, item_bytes)
        return self.calls(model) * self.link.call_s + sent / self.link.bandwidth

    def _widths(self, model: ModelConfig) -> list[list[int]]:
        """The columns that are gathered, by layer."""
        heads, hidden = model.num_heads * model.head_dim, model.hidden_size
        found = []
        for is_routed in model.moe_layers:
            widths = [heads, hidden]
            if model.qk_norm == "full":
                widths += [heads, model.num_kv_heads * model.head_dim]
            if not is_routed:
                widths += [model.intermediate_size, hidden]
            else:
                widths.append(model.num_experts_per_token * hidden)
                if model.shared_expert_intermediate_size:
                    widths += [model.shared_expert_intermediate_size, hidden]
            found.append(widths)
        return found
