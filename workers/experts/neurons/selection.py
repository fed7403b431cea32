"""The neurons that rows of a step take from the pool, of each expert of a layer: which, and where.

A row of `moe_mode: sparse` takes those that are selected for it. A row of `streamed` takes them
first and then all others: what is selected is computed while the others are copied. The two sums
are added in that order, whatever was there before; so a result is of the row alone.

Such a row asks for the id E + e in place of expert e of E: rows that take neurons from the pool and
rows that take whole experts are multiplied apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.neurons import PooledNeurons
from penstock.kernels.types import PartialSums
from penstock.workers.experts.expert_file import RowIndices
from penstock.workers.experts.modes import StepRows
from penstock.workers.experts.neurons.places import Places
from penstock.workers.experts.neurons.pool import NeuronPool
from penstock.workers.experts.neurons.scores import NeuronSelector


@dataclass(frozen=True, slots=True, eq=False)
class SelectedExpert:
    """The neurons of one expert, in parts that are computed one after another."""

    by_token: Sequence[Sequence[RowIndices]]  # of each part: of each of the expert's rows
    parts: Sequence[RowIndices]  # what the pool must hold for each part; no neuron is in two
    so_far: Tensor | None  # fp32 [rows, hidden], if there are several parts

    @classmethod
    def sparse(cls, kept: npt.NDArray[np.bool_]) -> SelectedExpert:
        """Those `kept` [rows, inner] and no others."""
        each = [np.flatnonzero(mask) for mask in kept]
        return cls([each], [each[0] if len(each) == 1 else np.flatnonzero(kept.any(0))], None)

    @classmethod
    def streamed(
        cls, kept: npt.NDArray[np.bool_], hidden: int, device: torch.device
    ) -> SelectedExpert:
        """Those `kept` [rows, inner], then the others."""
        by_token = [[np.flatnonzero(mask == is_kept) for mask in kept] for is_kept in (True, False)]
        any_kept = np.any(kept, axis=0)
        parts = [np.flatnonzero(any_kept), np.flatnonzero(~any_kept)]
        return cls(by_token, parts, torch.empty(len(kept), hidden, device=device))

    def pooled(self, part: int, places: Places, pool: NeuronPool) -> PooledNeurons:
        """One part; `places`: those of the expert's neurons in `pool`."""
        each = [places[rows] for rows in self.by_token[part]]
        found = torch.from_numpy(each[0] if len(each) == 1 else np.concatenate(each))
        sums = None
        if self.so_far is not None:
            sums = PartialSums(self.so_far, part == 0, part == len(self.parts) - 1)
        return PooledNeurons(pool.rows, pool.format, found, [len(rows) for rows in each], sums)


def select_neurons(
    selector: NeuronSelector, layer: int, ids: Tensor, x: Tensor, rows: StepRows
) -> dict[int, SelectedExpert]:
    """By expert, for `ids` int64 [T, k] of normed states `x` [T, hidden]; what is left out is
    counted in `rows`, some of which must be pooled. Experts that `selector` lacks are other ranks',
    which select and count for them."""
    assert rows.pooled is not None
    found = {}
    chosen, pooled = ids.cpu().numpy(), rows.pooled.cpu().numpy()
    num_neurons, num_skipped = np.zeros((2, len(pooled)), np.int64)
    for expert in np.unique(chosen[pooled]).tolist():
        if not selector.has(layer, expert):
            continue
        tokens = np.flatnonzero((chosen == expert).any(1) & pooled)
        states = x if len(tokens) == len(x) else x[torch.from_numpy(tokens).to(x.device)]
        kept = selector.active(layer, expert, states).cpu().numpy()
        if rows.is_streamed:
            found[expert] = SelectedExpert.streamed(kept, x.shape[1], x.device)
            continue
        found[expert] = SelectedExpert.sparse(kept)
        num_neurons[tokens] += kept.shape[1]
        num_skipped[tokens] += kept.shape[1] - kept.sum(1)
    if not rows.is_streamed:
        rows.num_neurons.add_(torch.from_numpy(num_neurons).to(x.device))
        rows.num_skipped.add_(torch.from_numpy(num_skipped).to(x.device))
    return found
