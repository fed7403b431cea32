"""Host memory for K and V in a group: every rank stores and loads its parts of the same blocks.

The oracle is one process without host memory. Real processes; each rank's blocks would hold other
tokens' K and V, and give other ids, if it copied too late, too early, or to another slot.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.workers.engine import load
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.group import wire
from penstock.workers.request import Request, SamplingParams
from tests.workers.answers import answers, ids_of
from tests.workers.checkpoints import make_checkpoint, random_prompt
from tests.workers.engine.group.forked_ranks import forked_ranks
from tests.workers.engine.group.test_group import engine_of

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "logprobs": 1}
ROLLING = {**GREEDY, "context_policy": "sink_window", "sinks": 4, "window": 24, "roll": 8}
HOST: dict[str, Any] = {"host_kv_gb": 0.01, "kv_restore": "load", "kv_commit": "eager"}


def requests_of(params: dict[str, Any], name: str = "") -> list[Request]:
    prompts = [tuple(random_prompt(num, seed=num)) for num in (40, 33, 48, 21)]
    return [Request(f"{name}{i}", ids, SamplingParams(**params)) for i, ids in enumerate(prompts)]


def run(engine: Engine, rounds: list[dict[str, Any]]) -> list[Any]:
    """Ids and logprobs of the rounds' requests, one round after the other."""
    found = []
    for number, params in enumerate(rounds):
        for deltas in answers(engine, requests_of(params, f"{number}-")).values():
            found.append((ids_of(deltas), [each.logprobs for each in deltas]))
    return found


@pytest.mark.parametrize(
    ("name", "cut", "options"),
    [
        ("llama", {"tensor_parallel_size": 2}, {}),
        ("llama", {"tensor_parallel_size": 2}, {"prefix_cache": False, "kv": "int8"}),
        ("llama", {"tensor_parallel_size": 2}, {"kv_restore": "auto"}),
        ("llama", {"pipeline_parallel_size": 2}, {}),
        ("olmoe-4-kv", {"tensor_parallel_size": 3}, {"prefix_cache": False}),
        ("llama", {"tensor_parallel_size": 3}, {"max_num_batched_tokens": 8}),
    ],
)
def test_blocks_come_back_on_all_ranks(name, cut, options):
    """Preempted sequences, and evicted prefixes, whose prompts come a second time."""
    model, small = str(make_checkpoint(name)), {"num_blocks": 34, **options}
    one = engine_of(model, 1, num_blocks=200, **{k: v for k, v in options.items() if k == "kv"})
    with forked_ranks():
        group = engine_of(model, cut.get("tensor_parallel_size", 1), **{**HOST, **small, **cut})
    try:
        rounds = [GREEDY, ROLLING, GREEDY]
        assert run(group, rounds) == run(one, rounds)
        swap = group.cache.swap
        assert swap is not None and group.stats().num_preemptions > 0
        if options.get("kv_restore") != "auto":
            assert swap.num_loaded_tokens > 0, "nothing came back from host memory"
    finally:
        one.close()
        group.close()


def test_by_collective_operations(monkeypatch):
    """What GPUs use, by gloo."""
    monkeypatch.setattr(load, "transport_of", lambda device, is_far: "gloo")
    model = str(make_checkpoint("llama"))
    one = engine_of(model, 1, num_blocks=200)
    with forked_ranks():
        group = engine_of(model, 2, num_blocks=34, **HOST)
    try:
        assert run(group, [GREEDY, GREEDY]) == run(one, [GREEDY, GREEDY])
        assert group.cache.swap is not None and group.cache.swap.num_loaded_tokens > 0
    finally:
        one.close()
        group.close()


def test_the_memory_is_that_of_all_ranks_together():
    model = str(make_checkpoint("llama"))
    with forked_ranks():
        one, group = (engine_of(model, ranks, num_blocks=34, **HOST) for ranks in (1, 2))
    try:
        tiers = [each.cache.swap.tier for each in (one, group) if each.cache.swap is not None]
        assert tiers[0].num_slots == pytest.approx(tiers[1].num_slots, rel=0.05)
        assert tiers[1].storage.nbytes < 0.6 * tiers[0].storage.nbytes
    finally:
        one.close()
        group.close()


def test_numbers_travel():
    assert wire.pairs_from(wire.pairs_bytes([3, 1 << 40], (0, 7))) == [(3, 0), (1 << 40, 7)]
    assert wire.pairs_from(wire.pairs_bytes([], [])) == []
