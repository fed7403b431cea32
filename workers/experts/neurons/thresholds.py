"""Thresholds of neuron scores: computed from histograms, kept in a file, read for a keep fraction.

A threshold is a quantile of one expert's scores over the tokens that were routed to it, the same
for all its neurons, so that a share `keep` of them is kept on average (CATS, arXiv 2404.08763;
TEAL, arXiv 2408.14690). An expert that saw few tokens uses its layer's histogram.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.quant import WEIGHT_FORMATS, WeightFormat
from penstock.workers.config import MOE_SCORES
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.model_config import read_json

FILE_NAME = "neuron_thresholds.json"  # in the model's folder
KEEPS = tuple(i / 20 for i in range(21))  # the fractions that thresholds are stored for
MIN_TOKENS = 1000  # of an expert; with fewer, its layer's scores count
LOWEST, BINS_PER_OCTAVE, NUM_BINS = -24, 32, 40 * 32  # scores from 2^-24 to 2^16

Table = tuple[tuple[tuple[float, ...], ...], ...]  # [layers][experts][len(KEEPS)]


def thresholds_path(model: Path) -> Path:
    """Where a model's thresholds lie: in its folder, or in that of its GGUF file."""
    return (model.parent if model.is_file() else model) / FILE_NAME


class ScoreHistograms:
    """Histograms of each expert's scores, by kind of score and by index among the MoE layers.

    Bins are 1/32 octave wide; the lowest one also counts zeros.
    """

    def __init__(self, num_layers: int, num_experts: int):
        shape = num_layers, num_experts, NUM_BINS
        self._counts = {score: torch.zeros(shape, dtype=torch.int64) for score in MOE_SCORES}
        self.num_tokens = torch.zeros(num_layers, num_experts, dtype=torch.int64)

    def add(self, place: int, expert: int, scores: dict[str, Tensor]) -> None:
        """`scores`: of each kind, [tokens, neurons], none negative."""
        for kind, values in scores.items():
            bins = (values.float().reshape(-1).log2() - LOWEST).mul_(BINS_PER_OCTAVE)
            bins = bins.clamp_(0, NUM_BINS - 1).long().cpu()
            self._counts[kind][place, expert] += torch.bincount(bins, minlength=NUM_BINS)
        self.num_tokens[place, expert] += len(next(iter(scores.values())))

    def table(self, kind: str) -> Table:
        """Thresholds for each of KEEPS."""
        counts = self._counts[kind]
        rows = []
        for layer, tokens in zip(counts, self.num_tokens):
            pooled = layer.sum(0)
            chosen = (mine if n >= MIN_TOKENS else pooled for mine, n in zip(layer, tokens))
            rows.append(tuple(_thresholds(each) for each in chosen))
        return tuple(rows)


def _thresholds(counts: Tensor) -> tuple[float, ...]:
    """The scores that a share of each of KEEPS reaches, interpolated inside a bin."""
    total = int(counts.sum())
    if not total:
        return tuple(0.0 for _ in KEEPS)  # no token was routed here: keep all neurons
    above = counts.flip(0).cumsum(0).flip(0).double()  # scores in this bin or a higher one
    found = []
    for keep in KEEPS:
        if keep == 1:
            found.append(0.0)
            continue
        place = int((above >= keep * total).sum()) - 1  # the bin in which the share is reached
        if place <= 0:
            found.append(0.0)
            continue
        inside = (float(above[place]) - keep * total) / max(1, int(counts[place]))
        found.append(float(f"{2 ** (LOWEST + (place + min(1.0, inside)) / BINS_PER_OCTAVE):.6g}"))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The result of `penstock calibrate` for one model. Plain values: stored as a JSON file."""

    routers: str  # identifies the model: a digest of its routers
    format: WeightFormat  # of the low-bit copy that the scores came from
    text: str  # names the calibration text
    num_tokens: int
    layers: tuple[int, ...]  # those that have experts
    num_experts: int
    thresholds: dict[str, Table]  # by score

    @classmethod
    def of(
        cls, histograms: ScoreHistograms, *, routers: str, format: WeightFormat, text: str,
        num_tokens: int, layers: Sequence[int],
    ) -> Calibration:  # fmt: skip
        tables = {kind: histograms.table(kind) for kind in MOE_SCORES}
        num_experts = histograms.num_tokens.shape[1]
        return cls(routers, format, text, num_tokens, tuple(layers), num_experts, tables)

    def to_json(self) -> str:
        return json.dumps({"keeps": KEEPS, **asdict(self)}, separators=(",", ":"))

    def save(self, path: Path) -> None:
        path.write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Raises LoadError unless `path` is what `save` wrote."""
        try:
            return cls.from_values(read_json(path))
        except (ConfigError, OSError, TypeError, KeyError, ValueError) as error:
            raise LoadError(
                f"{path} is not a file of neuron thresholds; write one with: "
                "penstock calibrate MODEL"
            ) from error

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Calibration:
        """What `to_json` wrote, parsed. Raises TypeError, KeyError or ValueError."""
        if tuple(values.pop("keeps")) != KEEPS:
            raise ValueError("keeps")
        values["layers"] = tuple(values["layers"])
        tables = values["thresholds"]
        values["thresholds"] = {kind: _table(tables[kind]) for kind in MOE_SCORES}
        made = cls(**values)
        shape = len(made.layers), made.num_experts, len(KEEPS)
        shapes = {_shape(table) for table in made.thresholds.values()}
        if made.format not in WEIGHT_FORMATS or shapes != {shape}:
            raise ValueError("format or shape")
        return made

    def check(self, path: Path, routers: str) -> None:
        """Raise LoadError unless this is the calibration of the model with these routers."""
        if self.routers != routers:
            raise LoadError(
                f"{path} belongs to another model (its routers differ); calibrate this one with: "
                "penstock calibrate MODEL"
            )

    def at(self, kind: str, keep: float) -> dict[tuple[int, int], float]:
        """Thresholds by layer and expert: a score that reaches its own is kept.

        Interpolates logarithms between the stored fractions.
        """
        table = self.thresholds[kind]
        return {
            (layer, expert): _at(keep, thresholds)
            for layer, experts in zip(self.layers, table, strict=True)
            for expert, thresholds in enumerate(experts)
        }


def _at(keep: float, thresholds: Sequence[float]) -> float:
    place = keep * (len(KEEPS) - 1)
    lower = min(int(place + 1e-9), len(KEEPS) - 2)
    low, high, share = thresholds[lower], thresholds[lower + 1], place - lower
    if abs(share) < 1e-9:
        return low
    if low > 0 and high > 0:
        return math.exp((1 - share) * math.log(low) + share * math.log(high))
    return (1 - share) * low + share * high


def _table(values: Sequence[Sequence[Sequence[float]]]) -> Table:
    return tuple(tuple(tuple(map(float, keeps)) for keeps in experts) for experts in values)


def _shape(table: Table) -> tuple[int, int, int]:
    sizes = {(len(experts), len(keeps)) for experts in table for keeps in experts}
    return (len(table), *(sizes.pop() if len(sizes) == 1 else (0, 0)))
