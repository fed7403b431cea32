"""The mixture of experts that makes a length prediction, and how much each expert is trusted.

An expert predicts hazards: by the groups alone, with those by the prompt's size, and both with the
text's shift. Exponential weights follow the likelihood of finished and running answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from penstock.deployments.prediction.conformal import fresh_levels
from penstock.deployments.prediction.distribution import Floats
from penstock.deployments.prediction.hazards import Exposure
from penstock.deployments.prediction.residual import Row

MEMORY = 0.998  # of the evidence for the residual: about the last 500 requests of a model
# What the mixture weighs: the groups alone, those by the prompt's size, and both with the text.
EXPERTS = ("groups", "size", "groups+text", "size+text")
_NO_TEXT = 2  # the first experts do not use the residual


@dataclass(slots=True)
class Trust:
    """Weights of the experts and calibration levels, of one model."""

    # Log-likelihood of each of EXPERTS above that of the first, fading.
    evidence: Floats = field(default_factory=lambda: np.zeros(len(EXPERTS)))
    levels: Floats = field(default_factory=fresh_levels)

    @property
    def log_weights(self) -> Floats:
        """[experts] of the mixture."""
        return self.evidence - np.logaddexp.reduce(self.evidence)

    @property
    def text_weight(self) -> float:
        return float(np.exp(self.log_weights[_NO_TEXT:]).sum())

    @property
    def size_weight(self) -> float:
        return float(np.exp(self.log_weights[1::2]).sum())


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one prediction."""

    row: Row
    shift: float
    hazards: Floats  # [experts, bins], in the order of EXPERTS
    trust: Trust
    cumulative: Floats  # [bins + 1] mixed and calibrated


def log_likelihood(hazards: Floats, seen: Exposure) -> Floats:
    """[experts, bins] -> [experts] ln P of what was seen: ln(1 - h) survived, ln h at the end."""
    if seen.event is None:
        return np.log1p(-hazards[:, seen.bins]) @ seen.at_risk
    before = np.log1p(-hazards[:, seen.first : seen.event]) @ seen.at_risk[:-1]
    return before + np.log(hazards[:, seen.event])


def gradient(hazards: Floats, seen: Exposure) -> Floats:
    """[experts, bins] -> [experts] d(-ln P) / d(shift of all logits): expected minus seen ends."""
    return hazards[:, seen.bins] @ seen.at_risk - float(seen.event is not None)


def gradient_of_mixture(steps: Steps, seen: Exposure) -> float:
    """The gradient with the weights of the counts, whatever the residual's own weight is."""
    weights = np.exp(steps.trust.log_weights)
    by_count = weights[:_NO_TEXT] + weights[_NO_TEXT:]
    return float(by_count @ gradient(steps.hazards[_NO_TEXT:], seen))
