"""A request whose deadline has passed is never computed, wherever on the worker it waits."""

from __future__ import annotations

import functools
import queue
import time
from typing import Any

import pytest
import torch

from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.channel.codec import request_from, submit_message
from penstock.workers.config import EngineConfig
from penstock.workers.engine import engine as engine_module
from penstock.workers.engine import validation
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.thread import EngineThread
from penstock.workers.models.loader import load_model
from penstock.workers.request import Delta, FinishReason, Request, RequestError, SamplingParams

PROMPT = tuple(range(3, 40))


@functools.cache
def model() -> Any:
    torch.set_num_threads(1)
    return load_model("builtin", weights="fp32", progress=False)


def new_engine(**settings: Any) -> Engine:
    return Engine(EngineConfig(**{"num_blocks": 64, "prefix_cache": False, **settings}), model())


def request(name: str, remaining_s: float | None = None, max_tokens: int = 8) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    deadline_s = None if remaining_s is None else time.monotonic() + remaining_s
    return Request(name, PROMPT, params, deadline_s=deadline_s)


class Clock:
    """The `time` of the engine's modules: real, and ahead by as much as a test says."""

    ahead_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (engine_module, validation):
        monkeypatch.setattr(module, "time", made)
    return made


def drain(engine: Engine) -> list[Delta]:
    deltas = []
    while engine.has_work():
        deltas += engine.step()
        engine.check()
    return deltas


def ids_of(deltas: list[Delta], name: str) -> list[int]:
    return [i for delta in deltas if delta.request_id == name for i in delta.token_ids]


def test_what_comes_too_late_is_refused() -> None:
    engine = new_engine()
    with pytest.raises(RequestError) as refusal:
        engine.add(request("late", remaining_s=-0.001))
    assert refusal.value.code == "deadline_exceeded"
    assert not engine.has_work()


def test_what_expires_while_it_waits_is_dropped_unread(clock: Clock) -> None:
    """One slot: the requests after the first wait, the middle one too long."""
    alone = new_engine()
    alone.add(request("a"))
    expected = ids_of(drain(alone), "a")

    engine = new_engine(max_num_seqs=1)
    for each in (request("a"), request("b", remaining_s=100), request("c", remaining_s=600)):
        engine.add(each)
    deltas = engine.step()
    clock.ahead_s = 200.0
    deltas += drain(engine)
    assert ids_of(deltas, "a") == ids_of(deltas, "c") == expected
    [delta_of_b] = [delta for delta in deltas if delta.request_id == "b"]
    assert (delta_of_b.finish_reason, delta_of_b.error) == (FinishReason.ERROR, "deadline_exceeded")
    stats = engine.stats()
    assert stats.num_prompt_tokens == 2 * (len(PROMPT) - 1)  # the last one is sampled from
    assert (stats.num_waiting, stats.num_live_blocks, stats.num_finished["error"]) == (0, 0, 1)


def test_all_that_waits_may_expire(clock: Clock) -> None:
    """A step that drops everything computes nothing, and still tells."""
    engine = new_engine()
    engine.add(request("a", remaining_s=100))
    clock.ahead_s = 200.0
    [delta] = engine.step()
    assert delta.error == "deadline_exceeded"
    assert not engine.has_work()
    assert engine.stats().num_prompt_tokens == engine.stats().num_steps == 0


def test_what_was_preempted_and_expires_gives_up_its_place(clock: Clock) -> None:
    """Two sequences in a pool that is too small: the younger one is preempted, then too late."""
    # Both prompts fit, and no block more: none is kept for activations.
    engine = new_engine(num_blocks=20, block_size=4, activation_memory="separate")
    for each in (request("old"), request("young", remaining_s=100)):
        engine.add(each)
    deltas = []
    while engine.has_work() and not engine.stats().num_preemptions:
        deltas += engine.step()
    assert engine.has_work(), "none was preempted"
    clock.ahead_s = 200.0
    deltas += drain(engine)
    assert len(ids_of(deltas, "old")) == 8
    assert 0 < len(ids_of(deltas, "young")) < 8
    assert [each.error for each in deltas if each.request_id == "young"][-1] == "deadline_exceeded"
    assert engine.stats().num_live_blocks == 0


def test_the_thread_tells_of_both() -> None:
    received: queue.SimpleQueue[list[Delta]] = queue.SimpleQueue()
    thread = EngineThread(new_engine(max_num_seqs=1), received.put, num_threads=1)
    for each in (request("late", remaining_s=-1.0), request("a", remaining_s=600)):
        thread.submit(each)
    thread.start()
    last: dict[str, Delta] = {}
    while len([each for each in last.values() if each.finish_reason]) < 2:
        last |= {delta.request_id: delta for delta in received.get(timeout=60)}
    thread.stop()
    assert (last["late"].error, last["a"].finish_reason) == (
        "deadline_exceeded",
        FinishReason.LENGTH,
    )
    assert "deadline" in last["late"].error_message


def test_a_deadline_travels_as_time_left() -> None:
    def sent(submitted: Request) -> Request:
        wire = submit_message(submitted, 1, 1).SerializeToString()
        return request_from(pb.Submit.FromString(wire), "r")

    assert sent(request("r")).deadline_s is None
    before_s = time.monotonic()
    submitted = request("r", remaining_s=100.0)
    got = sent(submitted).deadline_s
    assert submitted.deadline_s is not None and got is not None
    assert submitted.deadline_s <= got <= submitted.deadline_s + (time.monotonic() - before_s)
