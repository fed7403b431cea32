"""What a layer's router decided, and the interface of experts that are not all in device memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.kernels.moe import Expert, Visit


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """Which of how many experts each token goes through: the layer's own, or those and others that
    stand in for them; and how to come by them."""

    ids: Tensor  # int64 [T, k]
    num_experts: int
    experts: Sequence[Expert] | Visit


class ExpertSource(Protocol):
    """Experts that are not all in device memory."""

    def route(self, ids: Tensor, x: Tensor, state: Callable[[], Tensor]) -> LayerRouting:
        """For the routing `ids` int64 [T, k] of normed states `x` [T, hidden]; `state` gives the
        residual stream [T, hidden], with all that is known of this layer's output."""
