"""The routing of a layer, and the interface of experts that are not all in device memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.kernels.moe.mlp import Expert, Visit


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """The experts of each token, and how to obtain them."""

    ids: Tensor  # int64 [T, k]; ids from the model's num_experts on are int8 copies
    num_experts: int  # int8 copies included
    experts: Sequence[Expert] | Visit  # all experts, or a function that yields those needed


class ExpertSource(Protocol):
    """Experts that are not all in device memory."""

    def route(self, ids: Tensor, x: Tensor, state: Callable[[], Tensor]) -> LayerRouting:
        """The routing for `ids` int64 [T, k] of normed states `x` [T, hidden]; `state` returns the
        residual stream [T, hidden], including the part of this layer's output that is known."""
