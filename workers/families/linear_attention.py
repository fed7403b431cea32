"""The shape of a model's linear-attention layers, where it has some."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.workers.errors import ConfigError

MAX_TAPS = 16  # as kernels/delta_types.py has it


@dataclass(frozen=True, slots=True)
class LinearAttentionConfig:
    """Gated DeltaNet (arXiv 2412.06464), of which each value head has a state of fixed size."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int  # tokens that the convolution before it sees, the newest included

    def __post_init__(self) -> None:
        for name in ("num_key_heads", "num_value_heads", "key_dim", "value_dim", "taps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"linear_attention.{name} must be positive")
        if self.taps > MAX_TAPS:
            raise ConfigError(f"linear_conv_kernel_dim must be at most {MAX_TAPS}; got {self.taps}")
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"linear_num_value_heads ({self.num_value_heads}) is not a multiple of "
                f"linear_num_key_heads ({self.num_key_heads})"
            )

    @property
    def keys(self) -> int:
        """Channels of q, and of k, of all heads."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of v, and of the gate z, of all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Inputs of the convolution: q, k and v."""
        return 2 * self.keys + self.values

    @property
    def state_elements(self) -> int:
        """Of the matrices of one sequence in one layer."""
        return self.values * self.key_dim

    @property
    def kept_elements(self) -> int:
        """Of the newest inputs of the convolution, likewise."""
        return (self.taps - 1) * self.channels
