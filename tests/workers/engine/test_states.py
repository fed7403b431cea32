"""Recurrent states in the engine: snapshots of prefixes, preemption, failed steps, few slots, and
what a model with linear attention cannot have. That ids equal transformers' under every schedule is
in test_engine.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.errors import ConfigError
from penstock.workers.models.loader import load_model
from penstock.workers.request import FinishReason, Request, RequestError, SamplingParams
from tests.workers.checkpoints import make_checkpoint, random_prompt, reference_greedy
from tests.workers.engine.test_engine import GREEDY, NUM_NEW, make_engine, run

NAME = "qwen3_5_text"
SIZE = 16  # tokens of a block


@pytest.fixture(scope="module")
def model():
    return load_model(str(make_checkpoint(NAME)), weights="fp32", progress=False)


def request(prompt, name="r", **params):
    asked = {"temperature": 0.0, "max_tokens": NUM_NEW, "ignore_eos": True, **params}
    return Request(name, tuple(prompt), SamplingParams(**asked))


def answered(engine, prompt, **params):
    """Ids, and tokens of the prompt that were found in the prefix cache."""
    ids, last = run(engine, [request(prompt, **params)])
    return ids["r"], last["r"].num_cached_tokens


def expected(prompt, num=NUM_NEW):
    return reference_greedy(make_checkpoint(NAME), prompt, num)


def test_where_two_prompts_part_a_state_is_kept_for_the_third(model):
    engine = make_engine(model)
    shared = random_prompt(3 * SIZE + 5, seed=1)
    for ending, cached in ((2, 0), (3, 0), (4, 3 * SIZE)):
        prompt = shared[: 3 * SIZE] + random_prompt(20, seed=ending)
        assert answered(engine, prompt) == (expected(prompt), cached)
    assert answered(engine, prompt)[1] == (len(prompt) - 1) // SIZE * SIZE, "at its last block"


def test_the_next_turn_begins_with_the_state_at_the_end_of_the_last(model):
    engine = make_engine(model)
    prompt = random_prompt(21, seed=5)
    ids, _ = answered(engine, prompt, max_tokens=30)
    turn = [*prompt, *ids, *random_prompt(9, seed=6)]
    found, cached = answered(engine, turn)
    assert found == expected(turn)
    assert cached == (len(prompt) + len(ids) - 1) // SIZE * SIZE
    assert engine.stats().states.num_snapshots < 5, "one a block would have been left"


def test_tenants_do_not_share_states(model):
    engine = make_engine(model)
    prompt = tuple(random_prompt(40, seed=8))
    for domain, cached in ((b"a", 0), (b"b", 0), (b"a", 32)):
        one = Request("r", prompt, GREEDY, cache_domain=domain)
        _, last = run(engine, [one])
        assert last["r"].num_cached_tokens == cached


def test_a_preempted_request_goes_on_from_its_newest_state(model):
    """Two requests for whose answers there is no room at once."""
    prompts = [random_prompt(40, seed=10), random_prompt(40, seed=11)]
    counts = {}
    for prefix_cache in (True, False):
        sizes: dict[str, Any] = {"num_blocks": 9, "activation_memory": "separate"}
        engine = make_engine(model, **sizes, prefix_cache=prefix_cache, kv_commit="eager")
        ids, _ = run(engine, [request(p, f"r{i}", max_tokens=50) for i, p in enumerate(prompts)])
        assert [ids["r0"], ids["r1"]] == [expected(prompt, 50) for prompt in prompts]
        stats = engine.stats()
        assert stats.num_preemptions > 0
        counts[prefix_cache] = stats.num_prompt_tokens
    assert counts[True] < counts[False]


def test_a_failed_step_runs_again_with_the_states_before_it(model, monkeypatch):
    """The states were written, and then the step failed: they must not count twice."""
    prompts = [random_prompt(30, seed=20), random_prompt(9, seed=21)]
    engine = make_engine(model)
    compute: Any = engine.executor.compute
    failures = iter([False, True, False, False, True, True])

    def fails(*args):
        output = compute(*args)
        if next(failures, False):
            raise RuntimeError("after the model has run")
        return output

    monkeypatch.setattr(engine.executor, "compute", fails)
    ids, last = run(engine, [request(p, f"r{i}") for i, p in enumerate(prompts)])
    right = [f"r{i}" for i, p in enumerate(prompts) if ids[f"r{i}"] == expected(p)]
    failed = [name for name, delta in last.items() if delta.finish_reason is FinishReason.ERROR]
    assert sorted(right + failed) == ["r0", "r1"] and len(failed) == 1
    assert answered(engine, prompts[0])[0] == expected(prompts[0]), "its snapshots are right"


def test_two_slots_are_enough_for_one_request_at_a_time(model):
    engine = make_engine(model, num_state_slots=2, max_num_seqs=4)
    prompts = [random_prompt(length, seed=length) for length in (20, 40, 3)]
    ids, _ = run(engine, [request(p, f"r{i}") for i, p in enumerate(prompts)])
    assert list(ids.values()) == [expected(prompt) for prompt in prompts]
    assert engine.stats().max_num_seqs == 1


def test_snapshots_make_room_the_longest_unused_first(model):
    engine = make_engine(model, num_state_slots=6, max_num_seqs=1)
    prompts = [random_prompt(33, seed=seed) for seed in range(30, 36)]
    for prompt in prompts:
        answered(engine, prompt)
    assert answered(engine, prompts[-1]) == (expected(prompts[-1]), 32)
    assert answered(engine, prompts[0]) == (expected(prompts[0]), 0)
    states = engine.stats().states
    assert states.num_evicted > 0 and states.num_live == 0
    assert states.num_slots == 6 and states.slot_bytes > 2 * 4 * (4 * 12 * 20)


def test_a_prompt_alone_can_be_embedded(model):
    engine = make_engine(model)
    one = Request("r", tuple(random_prompt(40)), SamplingParams(max_tokens=1), embeds=True)
    _, first = run(engine, [one])
    _, again = run(engine, [one])
    assert first["r"].embedding == again["r"].embedding and again["r"].num_cached_tokens == 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_kv_gb": 0.1}, "host_kv_gb cannot be combined with a model that has linear"),
        ({"enable_lora": True}, "enable_lora cannot be combined with a model that has linear"),
        ({"speculate": "lookup"}, "its linear attention has a state"),
        ({"context_policy": "sink_window"}, "from which no token can be taken out"),
        ({"cuda_graphs": "on"}, "cuda_graphs cannot be on"),
        ({"num_blocks": None, "kv_cache_gb": 1e-5}, "holds no two recurrent states"),
    ],
)
def test_what_it_cannot_have_is_refused_by_name(model, settings, message):
    config = EngineConfig(**{"num_blocks": 64, **settings})
    with pytest.raises(ConfigError, match=message):
        Engine(config, model)


def test_a_request_cannot_have_a_sink_window(model):
    engine = make_engine(model)
    with pytest.raises(RequestError, match="from which no token can be taken out"):
        engine.add(request(random_prompt(5), context_policy="sink_window"))


def test_the_slots_are_part_of_the_memory_for_the_kv_cache(model):
    sizes: dict[str, Any] = {"num_blocks": None, "max_num_seqs": 4, "kv_cache_gb": 0.002}
    engine = Engine(EngineConfig(**sizes, max_model_len=512, block_size=16), model)
    stats = engine.stats()
    states = stats.states
    assert states is not None
    state_bytes = states.num_slots * states.slot_bytes
    assert 0.25 * 0.002 * 2**30 < state_bytes <= 0.5 * 0.002 * 2**30
    assert engine.arena.num_bytes + state_bytes <= 0.002 * 2**30
    assert stats.num_block_bytes == 2 * 16 * 2 * 24 * 4, "of one layer with K and V"


def test_slots_of_a_model_without_states_are_refused():
    plain = load_model(str(make_checkpoint("llama")), weights="fp32", progress=False)
    with pytest.raises(ConfigError, match="num_state_slots is for models with linear attention"):
        make_engine(plain, num_state_slots=6)
