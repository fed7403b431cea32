"""Which linear layers get 8 bits instead of 4, within a number of bits a weight.

A first run over the text, with the weights as they are, measures what 4 bits cost the outputs of
each part of a layer. The parts that gain the most for each byte become int8: all linear layers of
one input together, because the engine multiplies them as one. Experts stay 4-bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.kernels.rowwise import hadamard
from penstock.workers.calibration.gptq import Inputs, inverse_factor
from penstock.workers.calibration.scaling import rounding_error
from penstock.workers.calibration.tensors import ReplacedWeights
from penstock.workers.errors import ConfigError
from penstock.workers.weights.grids import GridSpec

WIDE_BITS = 8
SCALE_BITS = 32  # of a row of 8-bit weights


@dataclass(frozen=True, slots=True)
class PartError:
    """Linear layers of one input. `error`: squared error of their outputs with 4 bits, as a share
    of the squared outputs; `more_bits`: what 8 bits, with a scale for each row, take more."""

    modules: tuple[str, ...]
    error: float
    more_bits: float

    @property
    def gain(self) -> float:
        """Error saved for each bit more."""
        return self.error / self.more_bits


class ErrorMeter:
    """Stands where a Rounder does, rounds nothing, and measures."""

    needs_exact = False  # nothing is rounded before

    def __init__(
        self,
        specs: Mapping[str, GridSpec],
        tensors: ReplacedWeights,
        on_weights: Callable[[int], object],
    ):
        self.specs = specs
        self.tensors = tensors
        self.on_weights = on_weights
        self.found: list[PartError] = []

    def needs_inputs(self, modules: Sequence[str]) -> bool:
        return all(module in self.specs and ".experts." not in module for module in modules)

    def round_all(
        self, modules: Sequence[str], inputs: Inputs | None, *, norm: str | None = None
    ) -> None:
        weights = [self.tensors.stored(f"{module}.weight") for module in modules]
        self.on_weights(sum(w.numel() for m, w in zip(modules, weights) if m in self.specs))
        if inputs is None:
            return
        weight, spec = torch.cat(weights), self.specs[modules[0]]
        if spec.hadamard:
            weight, inputs = hadamard(weight), inputs.transformed()
        # Errors that GPTQ cannot make up for, as it would find them.
        costs = inverse_factor(inputs.moments).diagonal().float().pow(-2)
        error = rounding_error(weight, torch.ones_like(costs), costs, spec)
        outputs = float(((weight @ inputs.moments) * weight).sum())
        num_rows, width = weight.shape
        more_bits = num_rows * (width * (WIDE_BITS - spec.bits(width)) + SCALE_BITS)
        self.found.append(PartError(tuple(modules), error / max(outputs, 1e-30), more_bits))


def choose_wide(
    parts: Sequence[PartError], num_weights: int, bits: float, bits_per_weight: float
) -> frozenset[str]:
    """The modules that become 8-bit, of `num_weights` weights that have `bits` each on average.

    Raises ConfigError for a `bits_per_weight` below `bits` or above 8.
    """
    if not bits <= bits_per_weight <= WIDE_BITS:
        raise ConfigError(
            f"--bits-per-weight must lie between {bits:.3f}, which all weights in 4 bits take with "
            f"their scales, and {WIDE_BITS}; got {bits_per_weight:g}"
        )
    left = (bits_per_weight - bits) * num_weights
    wide: set[str] = set()
    for part in sorted(parts, key=lambda each: -each.gain):
        if part.more_bits <= left:
            left -= part.more_bits
            wide.update(part.modules)
    return frozenset(wide)
