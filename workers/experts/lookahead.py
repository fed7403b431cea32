"""Predicts which experts the next MoE layer will need, while the current layer computes.

The residual stream changes little from layer to layer. So the next layer's norm and router, with
the model's whole selection rule, are applied to this layer's state, after the shared expert's
output, which is known by then, has been added. (The published predictors apply the next router to
this layer's normed state: arXiv 2312.17238, section 3.2.) A prediction only warms the cache. Its
accuracy is counted by layer, next to a baseline: the experts of the previous token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.rowwise import rms_norm
from penstock.workers.experts.expert_file import RowIndices

# normed states [T, hidden] -> weights and ids [T, k]
Route = Callable[[Tensor], tuple[Tensor, Tensor]]


class Selector(Protocol):
    """Selects neurons: neurons/scores.py."""

    def has(self, layer: int, expert: int) -> bool:
        """Whether it can for this expert."""

    def active(self, layer: int, expert: int, x: Tensor) -> Tensor:
        """Those of an expert for normed states [n, hidden]: bool [n, inner]."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutedLayer:
    """What a prediction needs of a layer: its index, the norm before its router, and the rule."""

    layer: int
    norm: Tensor
    route: Route


@dataclass(slots=True)
class PredictionCounts:
    """How many of the experts that tokens were routed to had been predicted, for one layer."""

    num_routed: int = 0  # tokens with a prediction, times experts of a token
    num_right: int = 0
    num_repeated_routed: int = 0  # tokens of one-row steps that follow one another, times experts
    num_repeated: int = 0  # of their experts, those of the previous token
    num_neurons: int = 0  # that steps needed of experts whose neurons had been predicted
    num_neurons_right: int = 0  # of those, the predicted ones


@dataclass(slots=True, eq=False)
class ExpertPredictor:
    """Predictions for the layer after each MoE layer, and how accurate they were."""

    layers: Sequence[RoutedLayer]
    num_experts: int
    top_k: int
    eps: float
    accuracy: dict[int, PredictionCounts] = field(default_factory=dict)
    _predicted_ids: dict[int, Tensor] = field(default_factory=dict)
    _predicted_neurons: dict[int, dict[int, RowIndices]] = field(
        default_factory=dict
    )  # by layer and expert
    _before: dict[int, list[int]] = field(default_factory=dict)  # experts of the last one-row step

    def __post_init__(self) -> None:
        self.accuracy = {each.layer: PredictionCounts() for each in self.layers}

    def next_of(self, layer: int) -> int | None:
        """The MoE layer after `layer`; None after the last one."""
        return next((each.layer for each in self.layers if each.layer > layer), None)

    def predict_ids(self, state: Tensor, layer: int) -> Tensor:
        """The experts that `layer` would choose for residual states [T, hidden]: ids int64 [T, k].

        For the layer's own state this is exactly its routing: the control for the accuracy counts.
        """
        return self._facts(layer).route(self._normed(state, layer))[1]

    def predict_experts(self, state: Tensor, layer: int) -> list[int]:
        """The experts that `layer` is likely to need for these rows, the likeliest first."""
        ids = self.predict_ids(state, layer)
        self._predicted_ids[layer] = ids
        counts = torch.bincount(ids.reshape(-1), minlength=self.num_experts)
        order = counts.argsort(descending=True, stable=True)
        return order[: int((counts > 0).sum())].tolist()

    def predict_neurons(
        self, state: Tensor, layer: int, selector: Selector
    ) -> dict[int, RowIndices]:
        """By expert that was just predicted, if `selector` has it: the neurons that would be active
        for the rows that are likely to be routed to it."""
        ids, normed = self._predicted_ids[layer], self._normed(state, layer)
        self._predicted_neurons[layer] = {}
        for expert in ids.unique().tolist():
            if not selector.has(layer, expert):
                continue
            kept = selector.active(layer, expert, normed[(ids == expert).any(1)]).any(0)
            self._predicted_neurons[layer][expert] = kept.nonzero()[:, 0].cpu().numpy()
        return self._predicted_neurons[layer]

    def forget(self, *layers: int | None) -> None:
        """Discard the predictions for these layers."""
        for layer in layers:
            if layer is not None:
                self._predicted_ids.pop(layer, None)
                self._predicted_neurons.pop(layer, None)

    def forget_experts(self, layer: int) -> None:
        """The experts of the last one-row step are not those of the token before any more."""
        self._before.pop(layer, None)

    def needs_all_experts(self, num_rows: int) -> bool:
        """Whether `num_rows` tokens, routed evenly, would leave out less than a quarter of the
        experts: (1 - k/E)^T <= 1/4."""
        return (1 - self.top_k / self.num_experts) ** num_rows <= 0.25

    def observe(self, layer: int, ids: Tensor) -> None:
        """Compare the routing [T, k] of a layer with its prediction and with the baseline."""
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
        """Count how many of the neurons that a layer needs of an expert had been predicted."""
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
