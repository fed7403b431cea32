"""Where the time of the steps goes: phases leave no gap, and nothing else is counted."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.execution.timing import PHASES, StepTimes
from penstock.workers.models.loader import load_model
from penstock.workers.request import FirstTokenTimes, Request, SamplingParams
from penstock.workers.stats import STEP_TOKENS_BOUNDS, Histogram


class Clock:
    """Goes on by a second each time that it is read."""

    def __init__(self):
        self.now_s = 0

    def __call__(self):
        self.now_s += 1
        return self.now_s


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return load_model("builtin", weights="fp32", progress=False)


def test_the_phases_of_a_step_are_the_whole_step(model):
    engine, clock = Engine(EngineConfig(num_blocks=64, device="cpu"), model), Clock()
    engine.times, engine.executor.clock = StepTimes(clock), clock
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    engine.add(Request("a", (5, 6, 7, 8), params))
    whole_s = 0
    while engine.has_work():
        clock.now_s += 1000  # between the steps: no phase's
        began_s = clock.now_s + 1  # `begin` looks first
        engine.step()
        whole_s += clock.now_s - began_s
    seconds = engine.stats().step_seconds
    assert sum(seconds.values()) == whole_s
    assert tuple(seconds) == PHASES
    assert min(seconds.values()) >= 5  # each phase is in each step


def test_tokens_are_counted_by_step(model):
    engine = Engine(
        EngineConfig(num_blocks=64, device="cpu", max_num_seqs=4, max_num_batched_tokens=12), model
    )
    engine.add(Request("a", tuple(range(5, 25)), SamplingParams(max_tokens=4, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    seen = engine.stats().step_tokens
    assert seen is not None
    # 20 tokens of the prompt in chunks of 12 and 8, then three decode rows
    assert seen.bounds == STEP_TOKENS_BOUNDS
    assert dict(zip(seen.bounds, seen.counts)) | {1: 3, 8: 1, 16: 1} == dict(
        zip(seen.bounds, seen.counts)
    )
    assert (sum(seen.counts), seen.total) == (5, 23)
    assert engine.stats().num_steps == 5


def test_a_histogram_counts_up_to_and_with_its_bounds():
    bounds = (0.5, 1.0, 2.0)
    histogram, chance = Histogram(bounds), random.Random(1)
    values = [*bounds, *(chance.uniform(0, 3) for _ in range(200))]
    for value in values:
        histogram.observe(value)
    histogram.observe(1.5, 4)
    values += [1.5] * 4
    seen = histogram.snapshot()
    upto = [sum(value <= bound for value in values) for bound in bounds]
    assert list(itertools.accumulate(seen.counts)) == [*upto, len(values)]
    assert seen.total == pytest.approx(sum(values))


def test_the_first_token_says_how_long_its_request_waited(model, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("penstock.workers.scheduling.sequence.time.monotonic", clock)
    engine = Engine(EngineConfig(num_blocks=64, device="cpu", max_num_seqs=1), model)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    engine.add(Request("a", (5, 6), params))
    engine.add(Request("b", (5, 6), params))
    times: dict[str, list[FirstTokenTimes | None]] = {}
    while engine.has_work():
        for delta in engine.step():
            times.setdefault(delta.request_id, []).append(delta.times)
        clock.now_s += 100
    assert [None not in each[:1] and each[1:] for each in times.values()] == [[None, None]] * 2
    a, b = times["a"][0], times["b"][0]
    assert a is not None and a.queue_s < 100  # scheduled in the first step
    assert b is not None and 300 <= b.queue_s < 400  # in the fourth
    assert 0 < b.prefill_s < 100
