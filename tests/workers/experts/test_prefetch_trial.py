"""`expert_prefetch: auto`: what trials decide, and what they cost, on steps that are made up."""

from __future__ import annotations

import random

import pytest
import torch

from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.experts.build import ExpertSettings
from penstock.workers.experts.prefetch_trial import MOST_PAIRS, TURN_STEPS, PrefetchTrial
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from tests.workers.checkpoints import make_checkpoint, random_prompt


def run(trial, num_steps, gain, noise=0.1, seed=0, rows=lambda rng: 1):
    """Seconds in all, and how many steps had prefetch. With it a step is faster by `gain`; one in
    fifty is disturbed."""
    rng, total, num_on = random.Random(seed), 0.0, 0
    for step in range(num_steps):
        num_rows = rows(rng)
        better = gain(step) if callable(gain) else gain
        seconds = num_rows * (1.0 - better * trial.is_on) * rng.lognormvariate(0, noise)
        seconds *= 5 if rng.random() < 0.02 else 1
        total, num_on = total + seconds, num_on + trial.is_on
        trial.observe(seconds, num_rows)
    return total, num_on


class Always:
    """Prefetches in each step, or in none."""

    def __init__(self, is_on):
        self.is_on = is_on

    def observe(self, seconds, num_rows):
        pass


@pytest.mark.parametrize("gain", [0.3, 0.08, -0.08, -0.5])
@pytest.mark.parametrize("seed", range(5))
def test_at_most_three_per_cent_behind_the_better_way(gain, seed):
    trial = PrefetchTrial()
    num_steps = 20_000
    total, num_on = run(trial, num_steps, gain, seed=seed)
    share = num_on / num_steps
    assert share > 0.9 if gain > 0 else share < 0.1
    best, _ = run(Always(gain > 0), num_steps, gain, seed=seed)
    assert total <= 1.03 * best


def test_without_an_effect_it_is_mostly_off():
    num_on = [run(PrefetchTrial(), 20_000, 0.0, seed=seed)[1] for seed in range(10)]
    assert sum(num_on) < 0.4 * 10 * 20_000


def test_traffic_that_changes_is_noticed():
    trial = PrefetchTrial()
    run(trial, 6000, 0.3)
    assert trial.is_on
    run(trial, 40_000, -0.3, seed=1)
    assert not trial.is_on and trial.num_trials >= 3


def test_batches_of_all_sizes_are_compared_with_their_like():
    trial = PrefetchTrial()
    run(trial, 20_000, 0.2, rows=lambda rng: rng.choice((1, 2, 3, 7, 8)), seed=3)
    assert trial.is_on
    # Where no two turns have steps of one size, nothing is known, and trials end all the same.
    trial, sizes = PrefetchTrial(), iter(range(10**9))
    for _ in range(2 * TURN_STEPS * (MOST_PAIRS + 1)):
        trial.observe(1.0, 1 << (next(sizes) // TURN_STEPS % 40))
    assert trial.num_trials == 1 and not trial.is_on


def test_in_an_engine_the_ids_are_the_same_and_predictions_are_counted():
    torch.set_num_threads(1)
    folder = str(make_checkpoint("mixtral"))
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    found = {}
    for prefetch in (None, False):
        experts = ExpertSettings(num_slots=6, prefetch=prefetch)
        model = load_model(folder, weights="fp32", progress=False, experts=experts)
        engine = Engine(EngineConfig(num_blocks=64), model)
        engine.add(Request("r", tuple(random_prompt(9, 1)), params))
        was_on, ids = set(), []
        while engine.has_work():
            ids += [token for delta in engine.step() for token in delta.token_ids]
            assert model.routed is not None
            was_on.add(model.routed.prefetch)
        stats = engine.stats().experts
        assert stats is not None
        assert was_on == ({True, False} if prefetch is None else {False})
        # Of the prompt, layers are streamed whole; none is prefetched for a later token.
        assert (stats.num_prefetched > stats.num_experts) == (prefetch is None)
        assert sum(each.num_routed for each in stats.by_layer) > 0, "counted without prefetch too"
        found[prefetch] = ids
        engine.close()
    assert found[None] == found[False]
