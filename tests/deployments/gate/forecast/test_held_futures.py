"""Futures that are kept between forecasts against ones that are drawn anew, and their mean."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.deployments.gate.forecast.held_futures import HeldFutures
from penstock.deployments.prediction.distribution import (
    NUM_BINS,
    LengthDistribution,
    cumulative_hazard,
)
from penstock.deployments.prediction.hazards import length_prior


def test_they_are_what_would_be_drawn_anew():
    """Answers come, go, grow, and now and then fall back, as reports correct what was reckoned."""
    rng = np.random.default_rng(0)
    held = HeldFutures(5)
    answers: dict[int, list] = {}  # by row: distribution, uniforms, tokens so far
    for _ in range(600):
        if len(answers) < 40 and rng.random() < 0.3:
            cumulative = cumulative_hazard(rng.uniform(0.0, 0.3, NUM_BINS))
            limit = int(rng.integers(1, 3000)) if rng.random() < 0.8 else None
            length = LengthDistribution(cumulative, limit, min_tokens=int(rng.integers(0, 30)))
            uniforms = rng.random(5)
            answers[held.add(length, uniforms)] = [length, uniforms, 0]
        if answers and rng.random() < 0.1:
            row = int(rng.choice(list(answers)))
            held.remove(row)
            del answers[row]
        for each in answers.values():
            grown = max(each[2] + int(rng.integers(-3, 40)), 0)
            each[2] = min(grown, each[0].max_tokens or grown)
        rows = rng.permutation(list(answers)).astype(int)
        lengths = [answers[row][0] for row in rows.tolist()]
        drawn = np.array([answers[row][1] for row in rows.tolist()]).reshape(-1, 5)
        out = np.array([answers[row][2] for row in rows.tolist()], np.int64)
        anew = [
            each.sample_remaining(int(tokens), uniforms).tolist()
            for each, tokens, uniforms in zip(lengths, out, drawn, strict=True)
        ]
        assert held.remaining(rows, out).tolist() == anew
    assert len(answers) > 16  # more rows than there are at first


def test_the_mean_is_that_of_many_futures():
    prior = cumulative_hazard(length_prior())
    lengths = [LengthDistribution(prior, 2000), LengthDistribution(prior, 40)]
    held = HeldFutures(1)
    rows = np.array([held.add(each, np.array([0.5])) for each in lengths])
    uniforms = np.tile((np.arange(4000) + 0.5) / 4000, (2, 1))
    for generated in ([0, 0], [500, 39], [1999, 40]):
        out = np.array(generated)
        many = [
            each.sample_remaining(tokens, drawn).mean()
            for each, tokens, drawn in zip(lengths, generated, uniforms, strict=True)
        ]
        assert held.mean_remaining(rows, out) == pytest.approx(many, rel=0.2)
    assert held.mean_remaining(rows, np.array([1999, 40])).tolist() == [1.0, 0.0]
