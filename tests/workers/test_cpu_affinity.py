"""Cores that an engine has for itself: read, kept, and given back."""

from __future__ import annotations

import os
import threading

import pytest

from penstock.workers.config import EngineConfig
from penstock.workers.cpu_affinity import allowed_cores, kept_to, parse_cores
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.thread import EngineThread
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from tests.workers.checkpoints import make_checkpoint, random_prompt


@pytest.mark.parametrize(
    ("text", "cores"), [("3", {3}), ("2-4, 9", {2, 3, 4, 9}), ("0,0-1", {0, 1}), ("7-7", {7})]
)
def test_cores_as_taskset_has_them(text, cores):
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "a", "3-", "4-2", "-1", "1;2", "1,,2", "123456"])
def test_what_names_no_core(text):
    with pytest.raises(ValueError, match="2-7,9"):
        parse_cores(text)


def test_a_thread_is_kept_for_a_while():
    before = allowed_cores()
    one = {max(before)}
    seen = []

    def fail():
        with kept_to(one):
            seen.append(allowed_cores())
            raise KeyError("whatever goes wrong")

    with pytest.raises(KeyError):
        fail()
    assert seen == [one]
    with kept_to(None):
        assert allowed_cores() == before
    assert allowed_cores() == before


def test_the_engine_computes_there_and_no_other_thread_is_moved():
    before = allowed_cores()
    one = {max(before)}
    model = load_model(str(make_checkpoint("llama")), weights="fp32", progress=False)
    engine = Engine(EngineConfig(num_blocks=20, block_size=8, max_num_seqs=2), model)
    seen, was_called = [], threading.Event()

    def deliver(_):
        seen.append(set(os.sched_getaffinity(0)))
        was_called.set()

    thread = EngineThread(engine, deliver, num_threads=1, cores=one)
    thread.start()
    try:
        params = SamplingParams(temperature=0.0, max_tokens=1)
        thread.submit(Request("r", tuple(random_prompt(5, 0)), params))
        assert was_called.wait(60)
    finally:
        thread.stop()
    assert seen == [one]
    assert allowed_cores() == before
