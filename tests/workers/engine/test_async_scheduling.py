"""Steps launched before the last one was read: the same answers as in the plain order.

The oracle is the same engine with `async_scheduling: off`, whose own oracle is transformers.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.workers.config import EngineConfig
from penstock.workers.engine.build import wants_async_scheduling
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.thread import EngineThread
from penstock.workers.errors import ConfigError
from penstock.workers.execution.executor import Executor
from penstock.workers.execution.step import StepInFlight, StepOutput, prepare
from penstock.workers.models.loader import load_model
from penstock.workers.option_groups.batching import Switch
from penstock.workers.request import Delta, FinishReason, Request, SamplingParams
from penstock.workers.sampling.device_copy import Mark
from tests.workers.checkpoints import make_checkpoint, random_prompt
from tests.workers.commit_rules import stays_always

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
WINDOW: dict[str, Any] = {"context_policy": "sink_window", "sinks": 4, "window": 16, "roll": 8}


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return load_model(str(make_checkpoint("llama")), weights="fp32", progress=False)


def make_engine(model, async_scheduling="on", rule=None, **given):
    """An engine whose fresh memory is all NaN."""
    given = {"num_blocks": 128, "block_size": 4, **given}
    engine = Engine(EngineConfig(async_scheduling=async_scheduling, **given), model, rule)
    engine.arena.storage.fill_(0xFF)
    return engine


class LateStep(StepInFlight):
    """A step that a device has been given that is in no hurry."""

    def __init__(self, plan, step, before, executor, workspace):
        output = StepOutput(None, {}, 0.0, 0.0)
        super().__init__(plan, step.row_of, output, Mark(executor.model.device), 0.0)
        self._given: tuple[Any, Any, Any] | None = (step, before, workspace)
        self._executor = executor

    @torch.inference_mode()
    def compute(self):
        if self._given is not None:
            (step, before, workspace), self._given = self._given, None
            if before is not None:
                before.compute()
            self.output = self._executor.compute(step, before, workspace)
            self._mark = Mark(self._executor.model.device)

    def read(self):
        self.compute()
        return super().read()


class LateExecutor(Executor):
    """Computes each step as late as a device may: when it is read.

    So whatever the host does to memory in between is done under a step in flight.
    """

    def launch(self, plan, before=None):
        step = prepare(plan, before, self.block_size)
        with self.memory.lease(plan.num_tokens) as workspace:
            return LateStep(plan, step, before, self, workspace)


def make_late(engine):
    old = engine.executor
    engine.executor = LateExecutor(old.model, old.kv_layers, old.block_size, old.memory)
    return engine


def poison(engine):
    """Reading a block that no sequence holds fails."""
    for block_id in engine.pool._free:
        engine.arena.block(block_id).fill_(0xFF)


def step(engine, answers):
    for delta in engine.step():
        have = answers.setdefault(delta.request_id, [])
        assert not have or have[-1].finish_reason is None, "a delta after the last one"
        have.append(delta)
    poison(engine)
    engine.check()


def run(engine, requests):
    """The deltas of each request."""
    answers: dict[str, list[Delta]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        step(engine, answers)
    assert engine.stats().num_live_blocks == 0
    return answers


def assert_same(got, want, name):
    """All that a client sees of an answer, but for its times and what the cache had of it."""
    assert ids_of(got) == ids_of(want), name
    for one, other in zip(got, want, strict=True):
        assert one.finish_reason is other.finish_reason, name
        assert one.stop_token_id == other.stop_token_id, name
        assert one.num_evicted_tokens == other.num_evicted_tokens, name
        for field in ("logprobs", "prompt_logprobs"):
            pairs = list(zip(getattr(one, field), getattr(other, field), strict=True))
            for mine, theirs in pairs:  # sums of other batches are rounded differently
                assert mine.token_id == theirs.token_id, name
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4), name
                assert len(mine.top) == len(theirs.top), name


def ids_of(deltas):
    return [token_id for delta in deltas for token_id in delta.token_ids]


VARIETY = {
    "greedy": GREEDY,
    "stops": SamplingParams(seed=1, max_tokens=40, stop_token_ids=tuple(range(60))),
    "seeded": SamplingParams(temperature=1.2, seed=2, top_k=30, top_p=0.9, max_tokens=14),
    "one token": replace(GREEDY, max_tokens=1),
    "min_tokens": SamplingParams(
        temperature=1.5, seed=3, min_tokens=6, max_tokens=30, stop_token_ids=tuple(range(80))
    ),
    "logprobs": replace(GREEDY, logprobs=3, prompt_logprobs=2),
    "bias": replace(GREEDY, logit_bias=((7, 3.0), (9, -4.0)), bad_words_ids=((11,), (12,))),
    "penalties": replace(GREEDY, presence_penalty=1.5, frequency_penalty=0.5),
    "bad words": replace(GREEDY, bad_words_ids=((5, 6), (7, 8, 9))),
    "window": replace(GREEDY, max_tokens=70, **WINDOW),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of 5": {"max_num_batched_tokens": 5, "max_num_seqs": 4},
    "starved": {"num_blocks": 24},
    "starved, host memory": {"num_blocks": 24, "host_kv_gb": 0.01, "max_num_batched_tokens": 9,
                             "max_num_seqs": 6},
    "starved, deferral": {"num_blocks": 24, "kv_commit": "deferred", "rule": stays_always(8)},
    "deferral always": {"kv_commit": "deferred", "kv_defer_mode": "always",
                        "rule": stays_always(8)},
    "apart": {"merge_steps": False},
    "int8, no prefix cache": {"kv": "int8", "prefix_cache": False, "num_blocks": 40},
}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_kind_of_request_beside_the_others(model, schedule):
    requests = [
        Request(f"{name} {i}", tuple(random_prompt(3 + 7 * i + len(name), i)), params)
        for i in range(2)
        for name, params in VARIETY.items()
    ]
    want = run(make_engine(model, "off", **SCHEDULES[schedule]), requests)
    engine = make_engine(model, **SCHEDULES[schedule])
    if "host memory" not in schedule:  # whose link would have to wait for the device
        make_late(engine)
    got = run(engine, requests)
    for name, deltas in want.items():
        assert_same(got[name], deltas, name)
    stats = engine.stats()
    assert stats.num_generated_tokens == sum(len(ids_of(deltas)) for deltas in want.values())
    assert (stats.num_steps_ahead > 0) == (schedule != "deferral always")
    if schedule == "starved":
        assert stats.num_preemptions > 0


@settings(max_examples=16, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(22, 60),
    max_tokens=st.integers(6, 40),
    max_seqs=st.integers(1, 6),
    prefix_cache=st.booleans(),
    deferral=st.booleans(),
)
def test_random_arrivals_and_aborts(
    model, seed, num_blocks, max_tokens, max_seqs, prefix_cache, deferral
):
    """A sequence that stays gets the ids that it gets alone; one that is aborted got a prefix."""
    chance = random.Random(seed)
    given = {"num_blocks": num_blocks, "max_num_batched_tokens": max(max_tokens, max_seqs),
             "max_num_seqs": max_seqs, "prefix_cache": prefix_cache,
             "kv_commit": "deferred" if deferral else "eager", "rule": stays_always(8)}  # fmt: skip
    requests = []
    for i in range(10):
        params = chance.choice(list(VARIETY.values()))
        stem = random_prompt(8, chance.randrange(2))  # so that prompts begin alike
        prompt = (*stem, *random_prompt(chance.randrange(1, 12), i))
        requests.append(Request(f"r{i}", prompt, params))
    want = run(make_engine(model, "off", rule=stays_always(8)), requests)
    engine, aborted = make_late(make_engine(model, **given)), set()
    answers: dict[str, list[Delta]] = {}
    coming = list(requests)
    while coming or engine.has_work():
        if coming and chance.random() < 0.4:
            engine.add(coming.pop(0))
        step(engine, answers)
        if chance.random() < 0.08 and engine._sequences:
            victim = chance.choice(list(engine._sequences))
            assert engine.abort(victim)
            aborted.add(victim)
            poison(engine)
            engine.check()
    assert engine.stats().num_live_blocks == 0
    for name, deltas in want.items():
        got = ids_of(answers.get(name, []))
        if name in aborted:
            assert got == ids_of(deltas)[: len(got)]
        else:
            assert got == ids_of(deltas)
            assert answers[name][-1].finish_reason is deltas[-1].finish_reason


def test_what_was_sampled_behind_a_stop_is_discarded(model):
    prompt = tuple(random_prompt(9, 1))
    ids = ids_of(run(make_engine(model, "off"), [Request("a", prompt, GREEDY)])["a"])
    stop = next(i for i in ids if ids.index(i) >= 3)
    params = replace(GREEDY, stop_token_ids=(stop,))
    engine = make_engine(model)
    [*_, last] = run(engine, [Request("a", prompt, params)])["a"]
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, stop)
    stats = engine.stats()
    assert (stats.num_discarded_tokens, stats.num_generated_tokens) == (1, ids.index(stop) + 1)
    # A length is known before it is reached, so that nothing is computed in vain.
    engine = make_engine(model)
    run(engine, [Request("a", prompt, GREEDY)])
    stats = engine.stats()
    assert (stats.num_steps, stats.num_steps_ahead, stats.num_discarded_tokens) == (12, 11, 0)


def test_a_stop_in_a_rolling_window_counts_no_token_of_the_step_in_flight(model):
    """Wherever the stop token falls, also next to a roll of the window."""
    prompt = tuple(random_prompt(9, 1))
    params = SamplingParams(temperature=1.5, seed=1, max_tokens=48, ignore_eos=True, **WINDOW)
    ids = ids_of(run(make_engine(model, "off"), [Request("a", prompt, params)])["a"])
    places = [i for i in range(16, 47) if ids.index(ids[i]) == i]
    requests = [
        Request(f"stop {i}", prompt, replace(params, stop_token_ids=(ids[i],))) for i in places
    ]
    want = run(make_engine(model, "off", num_blocks=512), requests)
    evicted = []
    for request in requests:
        engine = make_engine(model)
        got = run(engine, [request])[request.request_id]
        assert got[-1].finish_reason is FinishReason.STOP
        assert engine.stats().num_discarded_tokens == 1, "no step was in flight"
        assert_same(got, want[request.request_id], request.request_id)
        evicted.append((len(ids_of(got)), got[-1].num_evicted_tokens))
    rolls = [
        (num, later - now)
        for (num, now), (after, later) in itertools.pairwise(evicted)
        if after == num + 1 and later > now
    ]
    assert rolls, "no answer ended with the window about to roll"
    assert {size for _, size in rolls} == {WINDOW["roll"]}


def test_answers_come_one_step_later_and_never_two(model):
    engine = make_engine(model)
    engine.add(Request("a", tuple(random_prompt(9, 1)), GREEDY))
    assert [len(engine.step()) for _ in range(12)] == [0] + [1] * 10 + [2]
    assert not engine.has_work()


def test_what_needs_the_hosts_ids_waits_for_them(model):
    """Penalties need the answer so far: synchronous steps, for the whole batch."""
    engine = make_engine(model)
    prompt = tuple(random_prompt(9, 1))
    params = replace(GREEDY, frequency_penalty=0.5)
    run(engine, [Request("a", prompt, params), Request("b", prompt, GREEDY)])
    assert engine.stats().num_steps_ahead == 0
    run(engine, [Request("a", prompt, replace(params, max_tokens=4)), Request("b", prompt, GREEDY)])
    assert engine.stats().num_steps_ahead == 12 - 4


def test_an_abort_in_flight_keeps_its_blocks_until_the_step_is_done(model):
    engine = make_engine(model)
    engine.add(Request("a", tuple(random_prompt(9, 1)), GREEDY))
    engine.step()
    engine.step()
    live = engine.stats().num_live_blocks
    assert engine.abort("a")
    assert live > 0
    assert engine.stats().num_live_blocks == live
    assert engine.has_work()
    engine.check()
    assert engine.step() == []
    assert engine.stats().num_live_blocks == 0
    assert not engine.has_work()


def test_nan_fails_one_request_and_no_other(model, caplog):
    requests = [Request(f"r{i}", tuple(random_prompt(9 + i, i)), GREEDY) for i in range(4)]
    want = run(make_engine(model, "off"), requests)
    engine = make_engine(model)
    answers: dict[str, list[Delta]] = {}
    for request in requests:
        engine.add(request)
    for _ in range(3):
        step(engine, answers)
    first_block = engine._sequences["r2"].block_table[0]
    engine.arena.block(first_block).fill_(0xFF)
    while answers["r2"][-1].finish_reason is None:
        step(engine, answers)
    assert answers["r2"][-1].error == "numerical_error"
    assert first_block not in engine.pool.index
    while engine.has_work():
        step(engine, answers)
    assert engine.stats().num_live_blocks == 0
    assert not caplog.records, "no step may fail for it: a device would not survive that"
    for name in ("r0", "r1", "r3"):
        assert ids_of(answers[name]) == ids_of(want[name])


def test_a_request_that_breaks_the_step_fails_alone(model, monkeypatch):
    """While the previous step is still to be read, and may have been a sequence's last one."""
    requests = [
        Request(f"r{i}", tuple(random_prompt(length, i)), GREEDY)
        for i, length in enumerate((9, 60, 10))
    ]
    ids = ids_of(run(make_engine(model, "off"), requests)["r2"])
    stop = next(i for i in ids[3:] if i not in ids[:3])
    at = ids.index(stop)
    requests[2] = replace(requests[2], params=replace(GREEDY, stop_token_ids=(stop,)))
    want = run(make_engine(model, "off"), requests)
    begin, broken_len = model.begin, len(requests[1].prompt_ids) + at + 1

    def breaks(token_ids, positions, inputs, *memory):
        if inputs.num_decode and (inputs.decode.context_lens == broken_len).any():
            raise RuntimeError("a kernel failed")
        return begin(token_ids, positions, inputs, *memory)

    engine = make_engine(model, cuda_graphs="off")  # which do not call `begin` again
    monkeypatch.setattr(model, "begin", breaks)
    got = run(engine, [requests[1], requests[0], requests[2]])
    assert got["r1"][-1].error == "internal_error"
    assert ids_of(got["r1"]) == ids_of(want["r1"])[: len(ids_of(got["r1"]))]
    for name in ("r0", "r2"):
        assert ids_of(got[name]) == ids_of(want[name])


def test_a_step_that_cannot_be_read_ends_its_requests_and_the_engine_goes_on(model, monkeypatch):
    engine = make_engine(model)
    answers: dict[str, list[Delta]] = {}
    request = Request("a", tuple(random_prompt(9, 1)), GREEDY)
    engine.add(request)
    step(engine, answers)
    step(engine, answers)
    read = StepInFlight.read
    lost = engine._in_flight

    def fails(launched):
        if launched is lost:
            raise RuntimeError("the device is gone")
        return read(launched)

    monkeypatch.setattr(StepInFlight, "read", fails)
    while engine.has_work():
        step(engine, answers)
    assert answers["a"][-1].error == "internal_error"
    assert engine.stats().num_live_blocks == 0
    again = run(engine, [replace(request, request_id="b")])["b"]
    assert len(ids_of(again)) == 12


def test_on_its_thread(model):
    engine = make_engine(model)
    got: dict[str, list[Delta]] = {}
    requests = [Request(f"r{i}", tuple(random_prompt(5 + i, i)), GREEDY) for i in range(8)]
    want = run(make_engine(model, "off"), requests)

    def deliver(deltas):
        for delta in deltas:
            got.setdefault(delta.request_id, []).append(delta)

    thread = EngineThread(engine, deliver, num_threads=1)
    for request in requests:
        thread.submit(request)
    thread.cancel("r7")  # before it has begun
    while thread._turn() and engine.has_work():  # in this thread: nothing to wait for
        pass
    assert {name: ids_of(deltas) for name, deltas in got.items()} == {
        name: ids_of(deltas) for name, deltas in want.items() if name != "r7"
    }


def test_the_setting():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    switches: dict[Switch, tuple[bool, bool]] = {
        "auto": (False, True), "on": (True, True), "off": (False, False),
    }  # fmt: skip
    for setting, want in switches.items():
        config = EngineConfig(async_scheduling=setting)
        assert (wants_async_scheduling(config, cpu), wants_async_scheduling(config, cuda)) == want
        assert not wants_async_scheduling(config, cuda, is_routed=True)
    with pytest.raises(ConfigError, match="async_scheduling must be one of auto, on, off"):
        EngineConfig(async_scheduling="yes")  # type: ignore[arg-type]
