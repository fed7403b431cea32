"""The neurons that sparse rows of a step use of each expert of a layer, and where they lie.

A sparse row asks for the id E + e in place of expert e of E: rows that leave neurons out and rows
that do not are multiplied apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.neurons import PooledNeurons
from penstock.workers.experts.expert_file import RowIndices
from penstock.workers.experts.modes import StepRows
from penstock.workers.experts.neurons.places import Places
from penstock.workers.experts.neurons.pool import NeuronPool
from penstock.workers.experts.neurons.scores import NeuronSelector


@dataclass(frozen=True, slots=True, eq=False)
class SelectedNeurons:
    """Of one layer in one step."""

    by_token: dict[int, list[RowIndices]]  # by expert: of each of its sparse rows, in their order
    union: dict[int, RowIndices]  # by expert: what the pool must hold

    @classmethod
    def of(
        cls, selector: NeuronSelector, layer: int, ids: Tensor, x: Tensor, rows: StepRows
    ) -> SelectedNeurons:
        """For `ids` int64 [T, k] of normed states `x` [T, hidden]; what is left out is counted in
        `rows`, some of which must be sparse."""
        assert rows.sparse is not None
        by_token, union = {}, {}
        chosen, sparse = ids.cpu().numpy(), rows.sparse.cpu().numpy()
        num_neurons, num_skipped = np.zeros((2, len(sparse)), np.int64)
        for expert in np.unique(chosen[sparse]).tolist():
            tokens = np.flatnonzero((chosen == expert).any(1) & sparse)
            states = x if len(tokens) == len(x) else x[torch.from_numpy(tokens).to(x.device)]
            kept = selector.active(layer, expert, states).cpu().numpy()
            by_token[expert] = each = [np.flatnonzero(mask) for mask in kept]
            union[expert] = each[0] if len(each) == 1 else np.flatnonzero(kept.any(0))
            num_neurons[tokens] += kept.shape[1]
            num_skipped[tokens] += kept.shape[1] - np.array([len(some) for some in each])
        rows.num_neurons.add_(torch.from_numpy(num_neurons).to(x.device))
        rows.num_skipped.add_(torch.from_numpy(num_skipped).to(x.device))
        return cls(by_token, union)

    def pooled(self, expert: int, places: Places, pool: NeuronPool) -> PooledNeurons:
        """`places`: those of the expert's neurons in `pool`."""
        each = [places[rows] for rows in self.by_token[expert]]
        found = torch.from_numpy(each[0] if len(each) == 1 else np.concatenate(each))
        return PooledNeurons(pool.rows, pool.format, found, [len(rows) for rows in each])
