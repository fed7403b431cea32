"""Types of the gated DeltaNet operator and of all its backends: a layer's weights, its states in
slots, and which states the rows of a batch begin with and leave behind.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_TAPS = 16  # tokens that a convolution sees: as the native library has it


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights:
    """What a gated DeltaNet layer has besides its projections, all fp32.

    `conv` [taps, channels], the tap of the newest token last; channels are q and k of all key heads
    and v of all value heads. `decay` = -exp(A_log) and `dt_bias` [value heads]; `norm` [value_dim].
    """

    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    num_key_heads: int
    key_dim: int

    @property
    def num_value_heads(self) -> int:
        return self.decay.numel()

    @property
    def value_dim(self) -> int:
        return self.norm.numel()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.conv, self.decay, self.dt_bias, self.norm

    def check(self) -> None:
        """What every backend relies on. Raises AssertionError."""
        assert all(each.dtype == torch.float32 and each.is_contiguous() for each in self.tensors)
        assert self.num_value_heads % self.num_key_heads == 0
        assert self.conv.shape[0] <= MAX_TAPS
        keys = 2 * self.num_key_heads * self.key_dim
        assert self.conv.shape[1] == keys + self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True, eq=False)
class DeltaState:
    """The states of one layer, each in a slot; views with any stride over the slots.

    `last` [slots, taps - 1, channels] in the model's dtype: the inputs of the convolution for the
    newest tokens, the newest last, zeros before the first. `matrix` fp32 [slots, value heads,
    key_dim, value_dim]. A slot that was never written may hold anything: it is never read.
    """

    last: Tensor
    matrix: Tensor

    def check(self, weights: DeltaWeights, dtype: torch.dtype) -> None:
        """What every backend relies on. Raises AssertionError."""
        taps, channels = weights.conv.shape
        assert self.last.dtype == dtype and self.last.shape[1:] == (taps - 1, channels)
        assert self.last[0].is_contiguous() and self.matrix[0].is_contiguous()
        heads = weights.num_value_heads, weights.key_dim, weights.value_dim
        assert self.matrix.dtype == torch.float32 and self.matrix.shape[1:] == heads


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """The sequences of a batch, all int32: sequence i is rows [starts[i], starts[i + 1]).

    It begins with the state in slot `sources[i]`; -1: with none, all zeros. Its writes are those
    from `write_starts[i]` on: after `write_after` of its rows, in ascending order, the state goes
    to slot `write_slots`. No slot is read and written, or written twice, in one batch.
    """

    starts: Tensor  # [N + 1]
    sources: Tensor  # [N]
    write_starts: Tensor  # [N + 1]
    write_after: Tensor  # [at least write_starts[N]]
    write_slots: Tensor

    def __post_init__(self) -> None:
        tensors = self.starts, self.sources, self.write_starts, self.write_after, self.write_slots
        assert all(each.dtype == torch.int32 and each.is_contiguous() for each in tensors)
        assert self.starts.numel() == self.write_starts.numel() == self.sources.numel() + 1
        assert self.write_after.numel() == self.write_slots.numel()
