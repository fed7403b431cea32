"""Figures of quality from the scores of each token: means, and what their standard errors are.

Tokens of a window share errors, so windows are the samples: a standard error is the standard
deviation of the windows' means over the root of their number. Changes are paired, since all
combinations see the same tokens. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.workers.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, and its standard error; None: a single sample has none."""

    value: float
    error: float | None


@dataclass(frozen=True, slots=True)
class KlFigures:
    """KL(baseline || combination) in nats a token, over the whole vocabulary."""

    mean: Estimate
    median: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class GreedyFigures:
    """Greedy answers beside the baseline's, id by id.

    `equal_ids`: share of places with the baseline's id. `identical`: share of answers with all of
    its ids. `before_first_difference`: mean number of leading ids that are equal.
    """

    equal_ids: Estimate
    identical: float
    before_first_difference: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Quality of one combination. `change`: of the perplexity against the baseline's, as a
    fraction. `same_top1`: share of scored tokens at which both find the same id the likeliest,
    behind the same text."""

    perplexity: Estimate
    change: Estimate
    kl: KlFigures
    same_top1: Estimate
    greedy: GreedyFigures | None


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Of one combination, in arrays [windows, tokens]: `nll` = -log p of each scored token, `top1`
    the likeliest id, `kl` to the baseline. `answers`: greedy ids, a list for each prompt."""

    nll: NDArray[np.float64]
    top1: NDArray[np.int64]
    kl: NDArray[np.float64]
    answers: Sequence[Sequence[int]] = ()


def estimate(samples: ArrayLike) -> Estimate:
    """Mean and standard error of independent samples [n]."""
    values = np.asarray(samples, dtype=np.float64)
    error = None if len(values) < 2 else float(values.std(ddof=1) / math.sqrt(len(values)))
    return Estimate(float(values.mean()), error)


def perplexity_of(nll: NDArray[np.float64]) -> Estimate:
    """exp(mean nll); its error by the first derivative, from the windows' means."""
    mean = estimate(nll.mean(axis=1))
    value = math.exp(mean.value)
    return Estimate(value, None if mean.error is None else value * mean.error)


def change_of(nll: NDArray[np.float64], base: NDArray[np.float64]) -> Estimate:
    """Of the perplexity against that of `base` over the same tokens, as a fraction."""
    ratio = perplexity_of(nll - base)
    return Estimate(ratio.value - 1, ratio.error)


def figures_of(scores: Scores, base: Scores) -> Figures:
    """Of `scores` beside those of the baseline. Raises InvariantError for other tokens."""
    if scores.nll.shape != base.nll.shape or len(scores.answers) != len(base.answers):
        raise InvariantError("the scores are of other windows than the baseline's")
    kl = scores.kl
    return Figures(
        perplexity=perplexity_of(scores.nll),
        change=change_of(scores.nll, base.nll),
        kl=KlFigures(
            mean=estimate(kl.mean(axis=1)),
            median=float(np.median(kl)),
            p99=float(np.quantile(kl, 0.99)),
            max=float(kl.max()),
        ),
        same_top1=estimate((scores.top1 == base.top1).mean(axis=1)),
        greedy=_greedy(scores.answers, base.answers) if base.answers else None,
    )


def _greedy(answers: Sequence[Sequence[int]], base: Sequence[Sequence[int]]) -> GreedyFigures:
    equal = np.asarray(answers) == np.asarray(base)  # [answers, tokens]
    leading = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
    return GreedyFigures(
        equal_ids=estimate(equal.mean(axis=1)),
        identical=float(equal.all(axis=1).mean()),
        before_first_difference=float(leading.mean()),
    )
