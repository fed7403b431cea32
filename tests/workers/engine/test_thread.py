"""The engine on its thread: many callers, cancels at any moment, refusals, and a crash."""

from __future__ import annotations

import random
import threading
import time

import pytest

from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.thread import EngineThread
from penstock.workers.models.loader import load_model
from penstock.workers.request import FinishReason, Request, SamplingParams
from tests.deployments.waiting import eventually
from tests.workers.checkpoints import make_checkpoint, random_prompt, reference_greedy


class Sink:
    """Collects deltas by request and wakes the threads that wait for an end."""

    def __init__(self):
        self.changed = threading.Condition()
        self.ids, self.last = {}, {}

    def __call__(self, deltas):
        with self.changed:
            for delta in deltas:
                self.ids.setdefault(delta.request_id, []).extend(delta.token_ids)
                if delta.finish_reason:
                    self.last[delta.request_id] = delta
            self.changed.notify_all()

    def wait(self, condition, timeout_s=60):
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s)


@pytest.fixture
def running():
    model = load_model(str(make_checkpoint("llama")), weights="fp32", progress=False)
    engine = Engine(EngineConfig(num_blocks=60, block_size=8, max_num_seqs=8), model)
    sink = Sink()
    thread = EngineThread(engine, sink, num_threads=1)
    thread.start()
    yield engine, thread, sink
    thread.stop()
    assert not thread.alive


def greedy(request_id, prompt, num_new):
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    return Request(request_id, tuple(prompt), params)


def held_by(thread):
    stats = thread.stats()
    return stats.num_live_blocks, stats.num_running, stats.num_waiting


def test_many_callers_and_random_cancels(running):
    engine, thread, sink = running
    prompts = [random_prompt(1 + i % 30, i) for i in range(60)]
    cancelled = set()

    def caller(start):
        rng = random.Random(start)
        for i in range(start, len(prompts), 4):
            thread.submit(greedy(f"r{i}", prompts[i], 15))
            time.sleep(rng.random() * 0.01)
            if rng.random() < 0.3:
                cancelled.add(f"r{i}")
                thread.cancel(f"r{i}")

    callers = [threading.Thread(target=caller, args=(n,)) for n in range(4)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    sink.wait(lambda: all(f"r{i}" in sink.last or f"r{i}" in cancelled for i in range(60)))
    eventually(lambda: held_by(thread) == (0, 0, 0), what="nothing to be held")
    assert cancelled
    folder = make_checkpoint("llama")
    for i in range(60):
        if f"r{i}" in sink.last:
            assert sink.ids[f"r{i}"] == reference_greedy(folder, prompts[i], 15)


def test_refusals_come_back_as_deltas(running):
    _, thread, sink = running
    thread.submit(Request("empty", ()))
    thread.submit(greedy("long", [3] * 480, 1))
    thread.submit(greedy("good", [3, 4], 3))
    sink.wait(lambda: len(sink.last) == 3)
    assert sink.last["empty"].error == "invalid_value"
    assert sink.last["long"].error == "context_length_exceeded"
    assert sink.last["good"].finish_reason is FinishReason.LENGTH
    assert thread.alive


def test_cancel_frees_within_one_step(running):
    engine, thread, sink = running
    thread.submit(greedy("r0", [3] * 100, 300))
    sink.wait(lambda: "r0" in sink.ids)
    thread.cancel("r0")
    thread.submit(greedy("r1", [5], 1))
    sink.wait(lambda: "r1" in sink.last)
    num = len(sink.ids["r0"])
    time.sleep(0.1)
    assert len(sink.ids["r0"]) == num
    eventually(lambda: thread.stats().num_live_blocks == 0, what="no block to be held")


def test_a_crash_is_seen(running, monkeypatch):
    engine, thread, _ = running

    def crash():
        raise RuntimeError("the scheduler broke")

    monkeypatch.setattr(engine.scheduler, "schedule", crash)
    thread.submit(greedy("r0", [3], 1))
    eventually(lambda: not thread.alive, what="the thread to end")
    assert thread.stalled_s >= 0
