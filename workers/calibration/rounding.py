"""Rounds the linear layers of one input together, and keeps what was made of them.

Linear layers that read the same input (q, k and v; gate and up) share its moments and its channel
scales, so each set is handled at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock.kernels.quant import HADAMARD_BLOCK, dequantize_weight, quantize_weight
from penstock.kernels.rowwise import hadamard
from penstock.workers.calibration.gptq import (
    DAMPING,
    Inputs,
    compensate,
    compensate_in_order,
    corrected,
    inverse_factor,
)
from penstock.workers.calibration.scaling import choose_scales, fold
from penstock.workers.calibration.spool import Spool
from penstock.workers.calibration.tensors import ReplacedWeights
from penstock.workers.errors import LoadError
from penstock.workers.weights.checkpoint import FLOAT_DTYPES
from penstock.workers.weights.grids import Codes, Grid, GridSpec, round_weight
from penstock.workers.weights.int4_layout import GROUP, stored_codes

Method = Literal["gptq", "awq", "awq-gptq", "nearest"]
METHODS: tuple[Method, ...] = ("gptq", "awq", "awq-gptq", "nearest")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How weights are rounded. `nearest` uses no inputs; `act_order`, `damping`: of GPTQ."""

    method: Method = "gptq"
    group: int = GROUP
    grid: Grid = "zero-points"
    act_order: bool = False
    damping: float = DAMPING
    hadamard: bool = False  # weights are transformed: with a grid of steps, and no channel scales

    @property
    def scales_channels(self) -> bool:
        return self.method in ("awq", "awq-gptq")

    @property
    def compensates(self) -> bool:
        return self.method in ("gptq", "awq-gptq")


class Rounder:
    """Rounds weights of `tensors` by `recipe` into `spool`; `specs`: the grid of each module whose
    weight becomes 4-bit, `wide`: modules whose weight becomes 8-bit. All others stay."""

    def __init__(
        self,
        recipe: Recipe,
        specs: Mapping[str, GridSpec],
        wide: frozenset[str],
        tensors: ReplacedWeights,
        spool: Spool,
        on_weights: Callable[[int], object],
    ):
        self.recipe = recipe
        self.specs = specs
        self.wide = wide
        self.tensors = tensors
        self.spool = spool
        self.on_weights = on_weights

    @property
    def needs_exact(self) -> bool:
        return self.recipe.compensates

    def needs_inputs(self, modules: Sequence[str]) -> bool:
        return self.recipe.method != "nearest" and any(module in self.specs for module in modules)

    def round_all(
        self,
        modules: Sequence[str],
        inputs: Inputs | None,
        *,
        norm: str | None = None,
    ) -> None:
        """Round the weights of `modules`, which share `inputs` (None: nothing is known of them).

        `norm`: the norm that makes the inputs, and makes them for these modules alone. Where the
        recipe scales channels, it is divided by their scales.
        """
        raw = {module: self._weight(module) for module in modules if module in self.specs}
        for module in modules:
            if module in self.wide:
                self._round_wide(module)
        if raw and inputs is not None:
            codes = self._rounded(raw, inputs, norm if len(raw) == len(modules) else None)
        else:
            codes = {m: round_weight(weight, None, self.specs[m]) for m, weight in raw.items()}
        for module, each in codes.items():
            self.tensors.replaced[f"{module}.weight"] = each.values()
            self.spool.put(module, *stored_codes(each))
        for module in modules:
            if module in self.specs or module in self.wide:
                self.on_weights(self.tensors.stored(f"{module}.weight").numel())

    def _weight(self, module: str) -> Tensor:
        weight = self.tensors.stored(f"{module}.weight")
        if not bool(weight.isfinite().all()):
            raise LoadError(f"the weight of {module!r} holds NaN or inf")
        return weight

    def _rounded(
        self, raw: Mapping[str, Tensor], inputs: Inputs, norm: str | None
    ) -> dict[str, Codes]:
        """All rows at once: they share the scales and the walk over the columns."""
        recipe, spec = self.recipe, self.specs[next(iter(raw))]
        weight, factor = torch.cat(list(raw.values())), None
        seen = inputs.transformed() if spec.hadamard else inputs  # as the codes multiply them
        squares = seen.moments.diagonal().float()
        if recipe.compensates:
            factor = inverse_factor(seen.moments, recipe.damping)
        if recipe.scales_channels and norm is not None:
            # What an error of a column costs; with GPTQ, what later columns cannot make up for.
            costs = squares if factor is None else factor.diagonal().float().pow(-2)
            scales = choose_scales(weight, squares.sqrt(), costs, spec)
            if scales is not None:
                dtype = FLOAT_DTYPES[self.tensors.source.tensors[norm].dtype]
                divided, scales = fold(self.tensors.stored(norm), scales, dtype)
                self.tensors.replaced[norm] = divided.float()
                self.spool.put(norm, divided)
                weight = weight * scales
                seen = inputs = inputs.scaled(scales)
                squares = squares / scales.square()
                factor = None if factor is None else factor * scales
        if factor is None:
            whole = round_weight(weight, squares, spec)
        else:
            weight = corrected(weight, inputs, recipe.damping)
            if recipe.act_order:
                whole = compensate_in_order(weight, seen.moments, spec, recipe.damping)
            else:
                whole = compensate(weight, factor, spec)
        return whole.split([len(each) for each in raw.values()], raw)

    def _round_wide(self, module: str) -> None:
        weight = self._weight(module)
        turned = self.recipe.hadamard and weight.shape[1] % HADAMARD_BLOCK == 0
        found = quantize_weight(weight, "int8", hadamard=hadamard if turned else None)
        self.tensors.replaced[f"{module}.weight"] = dequantize_weight(found)
        self.spool.put(module, found.codes, found.scales[:, None])
