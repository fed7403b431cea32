"""The estimators that `online` compares: the length predictor, and others that use no text.

All start from nothing. A contender predicts a distribution of lengths, and then learns from the
length of each answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from penstock.deployments.prediction.distribution import (
    NUM_BINS,
    LengthDistribution,
    bin_of,
    cumulative_hazard,
)
from penstock.deployments.prediction.features import Features
from penstock.deployments.prediction.hazards import PRIOR_WEIGHT, HazardTree, exposure, length_prior
from penstock.deployments.prediction.predictor import Ended, LengthPredictor, Watch

WINDOW = 200  # answers


class Contender(Protocol):
    """An estimator in the comparison: predicts a distribution, then learns the length."""

    def predict(self, features: Features) -> LengthDistribution: ...

    def observe(self, features: Features, length: int, ended: Ended) -> None: ...


class Histogram:
    """Kaplan-Meier counts by a key, as in the predictor's own groups, and nothing else."""

    def __init__(self, key: Callable[[Features], Sequence[Any]]):
        self._tree, self._key = HazardTree(length_prior()), key

    def predict(self, features: Features) -> LengthDistribution:
        path = [(), *self._key(features)]
        return LengthDistribution(cumulative_hazard(self._tree.hazards(path)), features.max_tokens)

    def observe(self, features: Features, length: int, ended: Ended) -> None:
        seen = exposure(0, length, ended is Ended.STOP, features.max_tokens)
        self._tree.add([(), *self._key(features)], seen)


class Window:
    """The last 200 lengths, cut ones taken for finished, as LightLLM's past-future queue does."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=WINDOW)  # the bins of the lengths

    def predict(self, features: Features) -> LengthDistribution:
        ended = np.bincount(np.array(self._recent, np.int64), minlength=NUM_BINS)
        reached = np.cumsum(ended[::-1])[::-1]
        hazards = (ended + PRIOR_WEIGHT * self._prior) / (reached + PRIOR_WEIGHT)
        return LengthDistribution(cumulative_hazard(hazards), features.max_tokens)

    def observe(self, features: Features, length: int, ended: Ended) -> None:
        self._recent.append(bin_of(length))

    _prior = length_prior()


class Untexted(LengthPredictor):
    """The predictor without the text of prompts: groups and calibration alone."""

    def predict(self, features: Features, *, with_cancels: bool = False) -> LengthDistribution:
        return super().predict(replace(features, text=None), with_cancels=with_cancels)

    def observe(
        self, features: Features, length: int, ended: Ended | str, watch: Watch | None = None
    ) -> None:
        super().observe(replace(features, text=None), length, ended, watch)


CONTENDERS: dict[str, Callable[[], Contender]] = {
    "global histogram": lambda: Histogram(lambda _: []),
    "prompt-length bins": lambda: Histogram(lambda f: [f.prompt_tokens.bit_length()]),
    "per-tenant histogram": lambda: Histogram(lambda f: [f.tenant]),
    "last-200 window": Window,
    "predictor without text": Untexted,
    "predictor": LengthPredictor,
}
