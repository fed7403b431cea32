"""What a group of devices shares out, and what it sends: as Penstock cuts a model.

Ranks: every linear is cut by its outputs, and whole rows are gathered (workers/models/shards/).
Stages: layers are divided, and rows handed on (workers/models/stages/). Of the uneven shares, the
largest counts: the other devices wait for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from penstock.workers.errors import ConfigError
from penstock.workers.families.linear_attention import LinearAttentionConfig
from penstock.workers.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Link:
    """How devices of a group exchange data: seconds a call, and bytes/s that each receives."""

    name: str
    call_s: float
    bandwidth: float
    source: str


# Estimates from public reports; none of them was measured here.
LEAST_ROWS = 256  # of a part of a step (models/stages/parts.py)
PARTS_A_STAGE = 4  # at most
COLUMNS = 16  # that stay together (models/shards/shard.py)
LINKS = {
    "nvlink": Link("nvlink", 10e-6, 366e9, "assumed: 10 us a call, 366 GB/s (4 H100 by NVLink)"),
    "pcie": Link("pcie", 25e-6, 22e9, "assumed: 25 us a call, 22 GB/s (PCIe 4)"),
    "memory": Link("memory", 10e-6, 10e9, "assumed: 10 us a call, 10 GB/s (one machine's memory)"),
}


@dataclass(frozen=True, slots=True)
class Group:
    """`stages` times `ranks` devices that share a model; one alone sends nothing."""

    ranks: int = 1
    link: Link = LINKS["nvlink"]
    stages: int = 1
    whole_experts: bool = False  # --enable-expert-parallel

    def check(self, model: ModelConfig) -> None:
        """Raises ConfigError if `model` cannot be cut so."""
        if not 1 <= self.ranks <= model.most_ranks:
            raise ConfigError(
                f"tensor_parallel_size must lie in [1, {model.most_ranks}], the model's attention "
                f"or value heads; got {self.ranks}"
            )
        if not 1 <= self.stages <= model.num_layers:
            raise ConfigError(
                f"pipeline_parallel_size must lie in [1, {model.num_layers}], the model's layers; "
                f"got {self.stages}"
            )
        model.check_stages(self.stages)

    @property
    def devices(self) -> int:
        return self.ranks * self.stages

    def layer_share(self, model: ModelConfig) -> float:
        """Of the layers, on the first stage."""
        return math.ceil(model.num_layers / self.stages) / model.num_layers

    def layers_of_a_kind(self, model: ModelConfig) -> tuple[int, int]:
        """With K and V, and with linear attention: each on the stage that has most."""
        kinds = model.linear_layers or (False,) * model.num_layers
        each, more = divmod(model.num_layers, self.stages)
        bounds = [i * each + min(i, more) for i in range(self.stages + 1)]
        of_stages = [kinds[first:end] for first, end in pairwise(bounds)]
        return max(each.count(False) for each in of_stages), max(map(sum, of_stages))

    def turns(self, rows: int) -> tuple[int, int]:
        """Into how many parts a step of `rows` is cut, and how many parts follow one another until
        the last one has left the last stage."""
        parts = max(1, min(self.stages * PARTS_A_STAGE, rows // LEAST_ROWS))
        parts = parts if self.stages > 1 else 1
        return parts, parts + self.stages - 1

    def kv_share(self, model: ModelConfig) -> float:
        """Of the heads, on the rank that has most."""
        return math.ceil(model.num_kv_heads / self.ranks) / model.num_kv_heads

    def cuts_experts(self, model: ModelConfig) -> bool:
        """Whether each rank has some columns of all routed experts."""
        blocks = math.ceil(model.moe_intermediate_size / COLUMNS)
        return not self.whole_experts and 1 < self.ranks <= blocks

    def linear_heads(self, shape: LinearAttentionConfig) -> tuple[int, int]:
        """Key heads and value heads of linear attention, likewise: whole key heads, or a part of
        the value heads of one."""
        each = shape.num_value_heads // shape.num_key_heads
        if self.ranks <= shape.num_key_heads:
            keys = math.ceil(shape.num_key_heads / self.ranks)
            return keys, keys * each
        return 1, math.ceil(each / (self.ranks // shape.num_key_heads))

    def routed_share(self, model: ModelConfig) -> float:
        """Of the routed experts, on the rank that has most: of each column, or whole ones."""
        parts = max(1, model.num_experts)
        if self.cuts_experts(model):
            parts = math.ceil(model.moe_intermediate_size / COLUMNS)
        return math.ceil(parts / self.ranks) / parts

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
        """Seconds of a step for its gathers, and for the rows that stages hand on."""
        return self._gather_s(model, rows, head_rows, item_bytes) + self._hand_on_s(
            model, rows, item_bytes
        )

    def _gather_s(self, model: ModelConfig, rows: int, head_rows: int, item_bytes: int) -> float:
        if self.ranks == 1:
            return 0.0
        parts, turns = self.turns(rows)
        sent = self.sent_bytes(model, rows, head_rows, item_bytes)
        calls = self.calls(model) * turns * self.layer_share(model)
        share = turns / parts * self.layer_share(model)
        return calls * self.link.call_s + sent * share / self.link.bandwidth

    def _hand_on_s(self, model: ModelConfig, rows: int, item_bytes: int) -> float:
        """From each stage to the next, and from the last to the first."""
        if self.stages == 1:
            return 0.0
        parts, turns = self.turns(rows)
        sent = rows / parts * model.hidden_size * item_bytes
        return (turns + 1) * (self.link.call_s + sent / self.link.bandwidth)

    def _widths(self, model: ModelConfig) -> list[list[int]]:
        """The columns that are gathered, by layer."""
        heads, hidden = model.num_heads * model.head_dim, model.hidden_size
        shape, found = model.linear_attention, []
        for layer, is_routed in enumerate(model.moe_layers):
            widths = [heads, hidden]
            if shape is not None and model.is_linear(layer):
                widths = [shape.values, hidden]
            if model.qk_norm == "full":
                widths += [heads, model.num_kv_heads * model.head_dim]
            if not is_routed:
                widths += [model.intermediate_size, hidden]
            else:
                chosen = model.num_experts_per_token
                if self.cuts_experts(model):
                    widths.append(chosen * model.moe_intermediate_size)
                widths.append(chosen * hidden)
                if model.shared_expert_intermediate_size:
                    widths += [model.shared_expert_intermediate_size, hidden]
            found.append(widths)
        return found
