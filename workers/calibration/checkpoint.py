"""Calibrates a checkpoint on text and writes it: `penstock quantize --calibrate`.

The layers' new tensors wait on the disk, in a hidden folder beside the new one, until all are
there; then the checkpoint is written as without calibration.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.workers.calibration.layers import (
    ExpertCounts,
    LayerCalibrator,
    Rounds,
    unsupported_reason,
)
from penstock.workers.calibration.rounding import Recipe, Rounder
from penstock.workers.calibration.spool import Spool
from penstock.workers.calibration.tensors import ReplacedWeights
from penstock.workers.calibration.widths import ErrorMeter, choose_wide
from penstock.workers.calibration.windows import WindowRunner
from penstock.workers.errors import ConfigError
from penstock.workers.gguf.config import FLOAT_TYPES
from penstock.workers.gguf.header import find_gguf, read_header
from penstock.workers.model_config import ModelConfig
from penstock.workers.weights.checkpoint import open_checkpoint
from penstock.workers.weights.grids import GridSpec
from penstock.workers.weights.int4_layout import stated_config
from penstock.workers.weights.quantize import (
    OutputTensor,
    QuantizePlan,
    check_room,
    plan_quantize,
    write_quantized,
)
from penstock.workers.weights.quantized_layout import parts_of
from penstock.workers.weights.sources import CheckpointWeights


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """What will be written, and the grid of each module that becomes 4-bit."""

    written: QuantizePlan
    specs: Mapping[str, GridSpec]
    recipe: Recipe
    wide: frozenset[str] = frozenset()  # modules that become 8-bit instead

    @property
    def num_weights(self) -> int:
        """Of all modules that are quantised."""
        return sum(math.prod(entry.stored.shape) for entry in self._quantized())

    @property
    def num_modules(self) -> int:
        return len(self.specs) + len(self.wide)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of a quantised weight, scales and zero points included; of a grid of steps,
        bits in memory, since the file has 8."""
        return sum(map(_num_bits, self._quantized())) / max(1, self.num_weights)

    def _quantized(self) -> Iterator[OutputTensor]:
        for shard in self.written.shards:
            yield from (entry for entry in shard.entries if entry.format is not None)


def _num_bits(entry: OutputTensor) -> float:
    if entry.spec is not None and entry.spec.kind == "steps":
        return entry.spec.bits(entry.stored.shape[1]) * math.prod(entry.stored.shape)
    return 8 * sum(part.num_bytes for part in entry.parts if part.name != "weight_shape")


def plan_calibrated(
    source: Path, recipe: Recipe, *, quantize_o: bool = True, quantize_lm_head: bool = False
) -> CalibrationPlan:
    """Read the headers of `source`. Raises ConfigError and LoadError as `plan_quantize` does."""
    if recipe.hadamard and recipe.scales_channels:
        raise ConfigError(
            f"--hadamard does not go with channel scales: --method {recipe.method}; leave one out"
        )
    if (gguf := find_gguf(source)) is not None:
        types = {info.type.name for info in read_header(gguf).tensors.values()}
        found = ", ".join(sorted(types - set(FLOAT_TYPES)))
        held = f"holds codes already ({found})" if found else "is not read for calibration"
        raise ConfigError(
            f"{gguf} is a GGUF file and {held}: give the folder of the original checkpoint, in "
            "safetensors"
        )
    if (reason := unsupported_reason(ModelConfig.from_pretrained(source))) is not None:
        raise ConfigError(
            f"{source} cannot be calibrated: {reason}; leave --calibrate out, and its weights are "
            "rounded to the nearest codes"
        )
    plan = plan_quantize(
        source,
        "int4",
        quantize_o=quantize_o,
        quantize_lm_head=quantize_lm_head,
        group=recipe.group,
        grid=recipe.grid,
        hadamard=recipe.hadamard,
    )
    entries = [entry for shard in plan.shards for entry in shard.entries]
    specs = {entry.name: entry.spec for entry in entries if entry.spec is not None}
    wide = {entry.name for entry in entries if entry.format == "int8"}
    return CalibrationPlan(plan, specs, recipe, frozenset(wide))


def _with_widths(plan: CalibrationPlan, wide: frozenset[str]) -> CalibrationPlan:
    """The same with the modules `wide` in 8 bits."""
    written, shards = plan.written, []
    specs = {name: spec for name, spec in plan.specs.items() if name not in wide}
    for shard in written.shards:
        entries = []
        for entry in shard.entries:
            if entry.format is not None:
                num_rows, width = entry.stored.shape
                if entry.name in wide:
                    parts = tuple(parts_of("int8", num_rows, width, written.dtype))
                    entry = dataclasses.replace(entry, parts=parts, spec=None)
            entries.append(entry)
        shards.append(dataclasses.replace(shard, entries=entries))
    stated = stated_config(specs, sorted(wide), written.ignored)
    before = written.stated["quantization_config"]
    if "transform_config" in before:
        stated["quantization_config"]["transform_config"] = before["transform_config"]
    written = dataclasses.replace(written, shards=tuple(shards), stated=stated)
    return CalibrationPlan(written, specs, plan.recipe, wide)


@torch.inference_mode()
def widened(
    plan: CalibrationPlan,
    windows: Sequence[Sequence[int]],
    bits_per_weight: float,
    on_weights: Callable[[int], object] = lambda _: None,
) -> CalibrationPlan:
    """`plan` with as many 8-bit linear layers as `bits_per_weight` has room for, those that gain
    most: one run over the text. Raises ConfigError for bits that cannot be."""
    choose_wide((), plan.num_weights, plan.bits_per_weight, bits_per_weight)  # before the run
    meter = ErrorMeter(plan.specs, ReplacedWeights(_opened(plan)), on_weights)
    _run(meter, plan, windows)
    wide = choose_wide(meter.found, plan.num_weights, plan.bits_per_weight, bits_per_weight)
    return _with_widths(plan, wide | plan.wide)


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
    tensors = ReplacedWeights(_opened(plan))
    rounder = Rounder(plan.recipe, plan.specs, plan.wide, tensors, spool, on_weights)
    return _run(rounder, plan, windows)


def _run(rounds: Rounds, plan: CalibrationPlan, windows: Sequence[Sequence[int]]) -> ExpertCounts:
    config = ModelConfig.from_pretrained(plan.written.source)
    config = dataclasses.replace(config, dtype="fp32")
    states = _embedded(rounds.tensors, config, windows)
    runner = WindowRunner(config, len(windows[0]))
    calibrator = LayerCalibrator(config, rounds, runner, states)
    for index in range(config.num_layers):
        calibrator.layer(index)
    if "lm_head" in plan.wide:
        calibrator.head()
    return calibrator.experts


def _opened(plan: CalibrationPlan) -> CheckpointWeights:
    source = plan.written.source
    return CheckpointWeights(source, open_checkpoint(source), "fp32", "cpu", lambda _: None)


def _embedded(
    tensors: ReplacedWeights, config: ModelConfig, windows: Sequence[Sequence[int]]
) -> list[Tensor]:
    name = "model.embed_tokens.weight"
    if name not in tensors:  # a tied table may be stored as the head
        name = "lm_head.weight"
    highest = max(max(ids) for ids in windows)
    if highest >= config.vocab_size:
        raise ConfigError(
            f"the tokenizer gives token id {highest}, and the model has {config.vocab_size}: the "
            "tokenizer is not this model's"
        )
    table = tensors.take(name, config.vocab_size, config.hidden_size)
    return [table[torch.tensor(list(ids))] for ids in windows]
