"""A checkpoint's tensors in fp32, where some have been replaced: a source for the loader."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.workers.weights.sources import CheckpointWeights


class ReplacedWeights:
    """A WeightSource: `replaced`, by name, stands in for what the checkpoint holds."""

    def __init__(self, source: CheckpointWeights):
        self.source = source
        self.replaced: dict[str, Tensor] = {}

    @property
    def device(self) -> str:
        return self.source.device

    def __contains__(self, name: str) -> bool:
        return name in self.source

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        found = self.replaced.get(name)
        return self.source.take(name, *shape, dtype=dtype) if found is None else found

    def has_linear(self, module: str) -> bool:
        return self.source.has_linear(module)

    def take_linear(self, module: str, *shape: int) -> Tensor:
        return self.take(f"{module}.weight", *shape)

    def take_expert(
        self, name: str, expert: int, count: int, shape: tuple[int, int], *, transposed: bool
    ) -> Tensor:
        found = self.source.take_expert(name, expert, count, shape, transposed=transposed)
        assert isinstance(found, Tensor), "a quantised checkpoint is not calibrated"
        return found

    def stored(self, name: str) -> Tensor:
        """The tensor `name` as it is now, in fp32, of whatever shape the checkpoint has."""
        return self.take(name, *self.source.tensors[name].shape)
