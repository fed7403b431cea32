"""A short run of the real thing: worker processes are killed under mixed load by real callers."""

from __future__ import annotations

import argparse
import asyncio

import pytest

from benchmarks.faults.random_kills import main_async
from benchmarks.faults.workload import FEATURES, make_call, make_fields

NUM_CALLS = len(FEATURES)


@pytest.mark.timeout(900)  # a machine that is ten times slower than it is alone takes half of that
def test_kills_cost_no_answer_and_no_block() -> None:
    options = argparse.Namespace(
        kills=4, every_s=0.4, stop_share=0.0, workers=2, callers=4, calls=NUM_CALLS, seed=1
    )
    results = asyncio.run(main_async(options))
    assert results["kills"] == 4
    assert results["calls"] > 0
    assert results["differing answers"] == 0
    assert results["lost requests"] == {}
    assert results["blocks held at the end"] == 0
    assert results["pauses s"]["n"] == results["requests continued"] > 0


def test_each_feature_is_called_and_a_number_is_always_the_same_call() -> None:
    assert [make_fields(number)[0] for number in range(NUM_CALLS)] == list(FEATURES)
    for number in range(2 * NUM_CALLS):
        feature, call, num_choices = make_call(number)
        _, again, _ = make_call(number)
        assert (call.prompt, call.params) == (again.prompt, again.params)
        assert (call.params.seed is None) == (feature == "unseeded")
        assert (call.context.seed is not None) == (feature == "unseeded")
        assert num_choices == (3 if feature == "n" else 1)
