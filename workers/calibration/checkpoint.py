"""Calibrates a checkpoint on text and writes it: `penstock quantize --calibrate`.

The layers' new tensors wait on the disk, in a hidden folder beside the new one, until all are
there; then the checkpoint is written as without calibration.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.workers.calibration.grids import GridSpec
from penstock.workers.calibration.layers import ExpertCounts, LayerCalibrator
from penstock.workers.calibration.layout import parts_for, spec_for, stated_config
from penstock.workers.calibration.rounding import Recipe, Rounder
from penstock.workers.calibration.spool import Spool
from penstock.workers.calibration.tensors import ReplacedWeights
from penstock.workers.calibration.windows import WindowRunner
from penstock.workers.model_config import ModelConfig
from penstock.workers.weights.checkpoint import open_checkpoint
from penstock.workers.weights.quantize import (
    QuantizePlan,
    check_room,
    plan_quantize,
    write_quantized,
)
from penstock.workers.weights.sources import CheckpointWeights


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """What will be written, and the grid of each module that becomes 4-bit."""

    written: QuantizePlan
    specs: Mapping[str, GridSpec]
    recipe: Recipe

    @property
    def num_weights(self) -> int:
        """Of all modules that are quantised."""
        return sum(math.prod(entry.stored.shape) for entry in self._quantized())

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of a quantised weight, scales and zero points included."""
        num_bytes = sum(
            part.num_bytes
            for entry in self._quantized()
            for part in entry.parts
            if part.name != "weight_shape"
        )
        return 8 * num_bytes / max(1, self.num_weights)

    def _quantized(self):
        for shard in self.written.shards:
            yield from (entry for entry in shard.entries if entry.format is not None)


def plan_calibrated(
    source: Path, recipe: Recipe, *, quantize_o: bool = True, quantize_lm_head: bool = False
) -> CalibrationPlan:
    """Read the headers of `source`. Raises ConfigError and LoadError as `plan_quantize` does."""
    plan = plan_quantize(
        source, "int4", quantize_o=quantize_o, quantize_lm_head=quantize_lm_head
    )
    specs: dict[str, GridSpec] = {}
    for shard in plan.shards:
        for i, entry in enumerate(shard.entries):
            if entry.format is None:
                continue
            num_rows, width = entry.stored.shape
            spec = spec_for(width, recipe.group, recipe.zero_points, plan.dtype)
            assert spec is not None, "plan_quantize found a group"
            specs[entry.name] = spec
            parts = parts_for(num_rows, width, spec)
            shard.entries[i] = dataclasses.replace(entry, parts=parts)
    stated = stated_config(specs, (), plan.ignored)
    return CalibrationPlan(dataclasses.replace(plan, stated=stated), specs, recipe)


def calibrate_into(
    plan: CalibrationPlan,
    windows: Sequence[Sequence[int]],
    out: Path,
    on_weights: Callable[[int], object] = lambda _: None,
) -> ExpertCounts:
    """Round the weights of `plan` for the texts `windows`, token ids of one length each, and write
    the checkpoint into the new folder `out`; how many experts saw too little of the text.

    `on_weights` is called with the number of weights that are done, after each matrix. Raises
    ConfigError and LoadError; on any error nothing is left of it. The same plan and text give the
    same bytes on the same machine with as many threads.
    """
    check_room(out, 2 * plan.written.num_bytes)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.calibration.", dir=out.parent))
    try:
        spool = Spool(folder / "tensors")
        experts = calibrate(plan, windows, spool, on_weights)
        write_quantized(
            plan.written,
            out,
            lambda _: None,
            lambda name: spool.take(name) if name in spool else None,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return experts


@torch.inference_mode()
def calibrate(
    plan: CalibrationPlan,
    windows: Sequence[Sequence[int]],
    spool: Spool,
    on_weights: Callable[[int], object] = lambda _: None,
) -> ExpertCounts:
    """The first half of `calibrate_into`: every tensor that differs from the source, in `spool`."""
    source = plan.written.source
    config = dataclasses.replace(ModelConfig.from_pretrained(source), dtype="fp32")
    weights = CheckpointWeights(source, open_checkpoint(source), "fp32", "cpu", lambda _: None)
    tensors = ReplacedWeights(weights)
    rounder = Rounder(plan.recipe, plan.specs, frozenset(), tensors, spool, on_weights)
    runner = WindowRunner(config, len(windows[0]))
    calibrator = LayerCalibrator(config, rounder, runner)
    states = _embedded(tensors, config, windows)
    for index in range(config.num_layers):
        calibrator.layer(index, states)
    if "lm_head" in plan.specs:
        calibrator.head(states)
    return calibrator.experts


def _embedded(
    tensors: ReplacedWeights, config: ModelConfig, windows: Sequence[Sequence[int]]
) -> list[Tensor]:
    name = "model.embed_tokens.weight"
    if name not in tensors:  # a tied table may be stored as the head
        name = "lm_head.weight"
    table = tensors.take(name, config.vocab_size, config.hidden_size)
    return [table[torch.tensor(list(ids))] for ids in windows]
