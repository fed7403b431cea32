"""The time of one step, by what takes it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTime:
    """The parts of one step, each at the device's peak, in seconds."""

    weights_s: float  # reading weights
    linear_s: float  # the products with them
    kv_s: float  # reading K and V
    attention_s: float  # the products with those
    other_s: float = 0.0  # of a measured device: all besides
    exchange_s: float = 0.0  # of a group: what its devices send one another
    overlaps: bool = True  # reads and products of the same layer, fully

    @property
    def seconds(self) -> float:
        """Linear layers and attention run one after another; within each, reads overlap. Where
        they do in part, the corner of the roof is rounded: the root of the sum of squares."""
        joined = max if self.overlaps else math.hypot
        linear_s = joined(self.weights_s, self.linear_s)
        return linear_s + joined(self.kv_s, self.attention_s) + self.other_s + self.exchange_s

    @property
    def memory_s(self) -> float:
        """Seconds of reading."""
        return self.weights_s + self.kv_s

    @property
    def compute_s(self) -> float:
        """Seconds of computing."""
        return self.linear_s + self.attention_s
