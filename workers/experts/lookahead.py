"""Which experts the next MoE layer will want, guessed while the one before it computes.

The residual stream changes little from layer to layer. So the next layer's own norm and router are
asked what they would choose for this layer's state, with the model's whole selection rule; what the
shared expert gave, which is known by then, is added before. (The published predictors ask the next
router about this layer's normed state: arXiv 2312.17238, section 3.2.) A guess only warms a cache.
How often it was right is counted by layer, beside a baseline: the experts of the previous token.
Knows nothing of slots or copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.rowwise import rms_norm
from penstock.workers.experts.expert_file import RowIndices

# normed states [T, hidden] -> weights and ids [T, k]
Route = Callable[[Tensor], tuple[Tensor, Tensor]]
# of layer and expert, for normed states [n, hidden] -> bool [n, inner]
Active = Callable[[int, int, Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class RoutedLayer:
    """What a guess needs of a layer: its index, the norm before its router, and its whole rule."""

    layer: int
    norm: Tensor
    route: Route


@dataclass(slots=True)
class PredictionCounts:
    """How many of the experts that tokens went through had been guessed, of one layer."""

    num_routed: int = 0  # tokens that there was a guess for, times experts of a token
    num_right: int = 0
    num_repeated_routed: int = 0  # tokens that came alone, after one that came alone; times experts
    num_repeated: int = 0  # of their experts, those of the token before
    num_neurons: int = 0  # that steps wanted of experts whose neurons had been guessed
    num_neurons_right: int = 0  # of those, the ones that had been


@dataclass(slots=True, eq=False)
class ExpertPredictor:
    """Guesses for the layer behind each MoE layer."""

    layers: Sequence[RoutedLayer]
    num_experts: int
    top_k: int
    eps: float
    accuracy: dict[int, PredictionCounts] = field(default_factory=dict)
    _predicted_ids: dict[int, Tensor] = field(default_factory=dict)
    _predicted_neurons: dict[int, dict[int, RowIndices]] = field(
        default_factory=dict
    )  # by layer and expert
    _before: dict[int, list[int]] = field(default_factory=dict)  # the last lone token's experts

    def __post_init__(self) -> None:
        self.accuracy = {each.layer: PredictionCounts() for each in self.layers}

    def next_of(self, layer: int) -> int | None:
        """The MoE layer behind `layer`; None behind the last one."""
        return next((each.layer for each in self.layers if each.layer > layer), None)

    def predict_ids(self, state: Tensor, layer: int) -> Tensor:
        """The experts that `layer` would choose for residual states [T, hidden]: ids int64 [T, k].

        With the layer's own state it is its routing, exactly: the control of what is counted here.
        """
        return self._facts(layer).route(self._normed(state, layer))[1]

    def predict_experts(self, state: Tensor, layer: int) -> list[int]:
        """The experts that `layer` is likely to want for all of the rows, the likeliest first."""
        ids = self.predict_ids(state, layer)
        self._predicted_ids[layer] = ids
        counts = torch.bincount(ids.reshape(-1), minlength=self.num_experts)
        order = counts.argsort(descending=True, stable=True)
        return order[: int((counts > 0).sum())].tolist()

    def predict_neurons(self, state: Tensor, layer: int, active: Active) -> dict[int, RowIndices]:
        """Of the experts that were just foreseen, the neurons that would be `active` for the rows
        that are likely to go there."""
        ids, normed = self._predicted_ids[layer], self._normed(state, layer)
        self._predicted_neurons[layer] = {}
        for expert in ids.unique().tolist():
            kept = active(layer, expert, normed[(ids == expert).any(1)]).any(0)
            self._predicted_neurons[layer][expert] = kept.nonzero()[:, 0].cpu().numpy()
        return self._predicted_neurons[layer]

    def forget(self, *layers: int | None) -> None:
        """There is no guess for these layers."""
        for layer in layers:
            if layer is not None:
                self._predicted_ids.pop(layer, None)
                self._predicted_neurons.pop(layer, None)

    def needs_all_experts(self, num_rows: int) -> bool:
        """Whether so many tokens, routed evenly, would leave out less than a quarter of the
        experts: (1 - k/E)^T <= 1/4."""
        return (1 - self.top_k / self.num_experts) ** num_rows <= 0.25

    def observe(self, layer: int, ids: Tensor) -> None:
        """Count what the routing [T, k] of a layer says of its guess, and of the baseline."""
        counts, guessed = self.accuracy[layer], self._predicted_ids.pop(layer, None)
        if guessed is not None and guessed.shape == ids.shape:
            counts.num_routed += ids.numel()
            counts.num_right += num_common(guessed, ids)
        self._predicted_neurons.pop(layer, None)
        before = self._before.pop(layer, None)
        if ids.shape[0] != 1:
            return
        now = ids[0].tolist()
        if before is not None:
            counts.num_repeated_routed += len(now)
            counts.num_repeated += len(set(now) & set(before))
        self._before[layer] = now

    def observe_neurons(self, layer: int, expert: int, row_indices: RowIndices) -> None:
        """Count how many of the neurons that a layer wants of an expert had been guessed."""
        guessed = self._predicted_neurons.get(layer, {}).get(expert)
        if guessed is not None:
            self.accuracy[layer].num_neurons += len(row_indices)
            self.accuracy[layer].num_neurons_right += int(np.isin(row_indices, guessed).sum())

    def _facts(self, layer: int) -> RoutedLayer:
        return next(each for each in self.layers if each.layer == layer)

    def _normed(self, state: Tensor, layer: int) -> Tensor:
        return rms_norm(state, self._facts(layer).norm, self.eps)


def num_common(left: Tensor, right: Tensor) -> int:
    """How many of the ids of each row of `right` [T, k] are in the same row of `left` [T, k]."""
    return int((left[:, :, None] == right[:, None, :]).any(1).sum())
