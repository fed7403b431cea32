"""What one stage of a group holds of a model: some layers, one after another.

The first stage also has the embedding, the final norm and the LM head: the last one hands its rows
back to it, since the process that samples is one of the first stage's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.workers.errors import ConfigError
from penstock.workers.model_config import ModelConfig
from penstock.workers.weights.checkpoint import StoredTensor

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `num_stages` equal shares of `num_layers` layers; the first ones have the larger."""

    number: int
    num_stages: int
    num_layers: int

    def __post_init__(self) -> None:
        if self.num_stages > self.num_layers:
            raise ConfigError(
                f"pipeline_parallel_size {self.num_stages} is more than the {self.num_layers} "
                f"layers of this model, and each stage needs one; set it to {self.num_layers} at "
                "most"
            )

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def layers(self) -> range:
        """By their numbers in the whole model."""
        each, more = divmod(self.num_layers, self.num_stages)
        first = self.number * each + min(self.number, more)
        return range(first, first + each + (self.number < more))

    def config_of(self, config: ModelConfig) -> ModelConfig:
        """`config`, the whole model's, for a model that has this stage's layers only."""
        own = slice(self.layers.start, self.layers.stop)
        return replace(
            config,
            num_layers=len(self.layers),
            sliding_window=config.sliding_window[own],
            moe_layers=config.moe_layers[own],
            linear_layers=config.linear_layers[own],
            layer_ropes=config.layer_ropes[own],
        )

    def own_part(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The tensors that this stage reads."""
        return {name: stored for name, stored in tensors.items() if self._has(name)}

    def _has(self, name: str) -> bool:
        found = _LAYER.match(name)
        if found is None:
            return self.is_first
        number = int(found[1])  # those after the last layer predict further tokens: ignored
        return number in self.layers or number >= self.num_layers
