"""A run over a target that refuses, fails or ends: every line gets one result all the same."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.deployments.batch import runner as runner_module
from penstock.deployments.batch import target as target_module
from penstock.deployments.batch.lease import hold
from penstock.deployments.batch.run import BatchFiles, BatchRun
from penstock.deployments.batch.runner import RunSettings, seed_of
from penstock.deployments.batch.state import StateError
from penstock.deployments.batch.target import Reply, TargetError, Unreachable
from penstock.deployments.gate.types import LOWEST_PRIORITY
from penstock.deployments.ingress.core.call import MAX_PRIORITY
from tests.deployments.batch.requests import errors_of, ids_of, write_input

NUM_LINES = 40


class ScriptedTarget:
    """Answers with the request's seed as its only token; `refusals` decides on some of them."""

    def __init__(self, refusals=lambda body, attempt: None):
        self._refusals = refusals
        self.attempts = {}
        self.bodies = {}
        self.num_in_flight = self.most_in_flight = 0

    async def send(self, url, body):
        key = str(body.get("prompt") or body["messages"])
        self.bodies.setdefault(key, body)
        assert self.bodies[key] == body, "an attempt differs from the one before it"
        attempt = self.attempts[key] = self.attempts.get(key, 0) + 1
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        try:
            await asyncio.sleep(0.002)
        finally:
            self.num_in_flight -= 1
        refusal = self._refusals(body, attempt)
        if isinstance(refusal, Exception):
            raise refusal
        if refusal is not None:
            return Reply(refusal, {"error": {"code": f"code {refusal}"}})
        choices = [{"token_ids": [body["seed"]]}]
        return Reply(200, {"choices": choices, "usage": {"prompt_tokens": 2}}, "r")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(target_module, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(target_module, "LONGEST_WAIT_S", 0.002)


@pytest.fixture
def files(tmp_path):
    given = write_input(tmp_path / "in.jsonl", NUM_LINES)
    return BatchFiles(given, tmp_path / "out.jsonl", tmp_path / "err.jsonl")


@asynccontextmanager
async def begun(files, *, model="m", seed=5, restart=False):
    with BatchRun(files, model=model) as batch:
        async with hold(files.lease, files.state) as lease:
            batch.begin(lease, run_seed=seed, restart=restart)
            yield batch


def run(files, target, *, model="m", restart=False, seed=5, **settings):
    async def main():
        async with begun(files, model=model, seed=seed, restart=restart) as batch:
            if batch.finished is not None:
                return "finished"
            options = RunSettings(run_seed=batch.run_seed, **settings)
            return await batch.run(target, options, batch.progress())

    return asyncio.run(main())


def left(files):
    """How many lines have their results, and the seed of the run that is to be resumed."""

    async def main():
        async with begun(files, seed=None) as batch:  # no seed: the one of the run so far
            return batch.num_done, batch.run_seed

    return asyncio.run(main())


def test_every_line_keeps_its_seed_through_refusals_failures_and_lost_connections(files):
    def refusals(body, attempt):
        kind = sum(map(ord, str(body))) % 4
        if attempt <= 2:
            return (None, 503, 500, Unreachable())[kind]
        return None

    target = ScriptedTarget(refusals)
    assert run(files, target) is None
    ids = ids_of(files.output)
    assert list(ids) == [f"request {i}" for i in range(NUM_LINES)]
    for i in range(NUM_LINES):
        assert ids[f"request {i}"] == [i if i % 3 == 1 else seed_of(5, i + 1)]
    assert not files.errors.exists()
    assert {body["priority"] for body in target.bodies.values()} == {100}
    assert sum(target.attempts.values()) > NUM_LINES


def test_the_lowest_priority_is_the_same_for_clients_the_gate_and_batches():
    assert runner_module.LOWEST_PRIORITY == MAX_PRIORITY == -LOWEST_PRIORITY


def test_priority_none_leaves_that_of_each_line(files):
    target = ScriptedTarget()
    run(files, target, priority=None)
    assert all("priority" not in body for body in target.bodies.values())


def test_lines_that_fail_for_good_are_errors_and_the_others_go_on(files):
    def refusals(body, _):
        return {0: 400, 1: 500}.get(body["max_tokens"] % 4)

    target = ScriptedTarget(refusals)
    assert run(files, target) is None
    ids, errors = ids_of(files.output), errors_of(files.errors)
    assert len(ids) + len(errors) == NUM_LINES
    assert set(errors.values()) == {"code 400", "code 500"}
    for body in target.bodies.values():
        key = str(body.get("prompt") or body["messages"])
        assert target.attempts[key] == {0: 1, 1: 3}.get(body["max_tokens"] % 4, 1)


def test_no_more_in_flight_than_max_in_flight(files):
    target = ScriptedTarget()
    run(files, target, max_in_flight=3)
    assert target.most_in_flight == 3


def test_a_wrong_key_stops_the_run_and_keeps_what_is_done(files):
    count = [0]

    def refusals(_, __):
        count[0] += 1
        return 401 if count[0] > 20 else None

    with pytest.raises(TargetError, match="API key"):
        run(files, ScriptedTarget(refusals), max_in_flight=4)
    assert not files.output.exists()
    assert left(files) == (20, 5)
    target = ScriptedTarget()
    assert run(files, target) is None
    assert len(target.attempts) == NUM_LINES - 20
    assert len(ids_of(files.output)) == NUM_LINES


class StarvedTarget(ScriptedTarget):
    """Answers only requests of priority 0, as a busy server may."""

    async def send(self, url, body):
        if body.get("priority", 0) > 0:
            self.num_starved = getattr(self, "num_starved", 0) + 1
            await asyncio.sleep(1000)
        return await super().send(url, body)


def test_lines_that_wait_are_raised_when_the_deadline_is_at_risk(files, monkeypatch):
    monkeypatch.setattr(runner_module, "CHECK_URGENCY_S", 0.05)
    target = StarvedTarget()
    settings = {"deadline_s": time.monotonic() + 20, "max_in_flight": 8}
    assert run(files, target, **settings) is None
    # Those in flight when the risk was found out; on a slow machine it is found out anew after
    # priorities were lowered again.
    assert 8 <= target.num_starved < NUM_LINES
    ids = ids_of(files.output)
    assert ids["request 2"] == [seed_of(5, 3)]
    assert len(ids) == NUM_LINES


def test_what_is_left_at_the_deadline_expires(files):
    def refusals(body, _):
        return 503 if body["max_tokens"] % 2 else None

    began_s = time.monotonic()
    deadline_s = time.monotonic() + 0.5
    assert run(files, ScriptedTarget(refusals), deadline_s=deadline_s) == "batch_expired"
    assert time.monotonic() - began_s < 5
    ids, errors = ids_of(files.output), errors_of(files.errors)
    assert set(errors.values()) == {"batch_expired"}
    assert len(ids) + len(errors) == NUM_LINES
    assert len(ids) == sum((24 + i % 7) % 2 == 0 for i in range(NUM_LINES))


def test_a_deadline_that_has_passed_expires_all(files):
    target = ScriptedTarget(lambda body, _: 503)
    assert run(files, target, deadline_s=time.monotonic() - 1) == "batch_expired"
    assert files.output.read_text() == ""
    assert len(errors_of(files.errors)) == NUM_LINES


def test_a_cancel_lets_those_in_flight_finish_for_a_while(files, monkeypatch):
    async def main():
        cancelled = asyncio.Event()

        class Target(ScriptedTarget):
            async def send(self, url, body):
                if len(self.attempts) == 8:
                    cancelled.set()
                if len(self.attempts) == 2:
                    self.attempts["stuck"] = 1
                    await asyncio.sleep(60)
                return await super().send(url, body)

        async with begun(files) as batch:
            options = RunSettings(batch.run_seed, max_in_flight=4, cancel_s=0.3)
            return await batch.run(Target(), options, batch.progress(), cancelled)

    assert asyncio.run(main()) == "batch_cancelled"
    ids, errors = ids_of(files.output), errors_of(files.errors)
    assert len(ids) + len(errors) == NUM_LINES
    assert set(errors.values()) == {"batch_cancelled"}
    assert 4 <= len(ids) < 20


def test_a_run_that_is_finished_is_not_run_again(files):
    run(files, ScriptedTarget())
    before = files.output.read_bytes()
    assert run(files, ScriptedTarget(lambda *_: 500)) == "finished"
    assert files.output.read_bytes() == before
    target = ScriptedTarget()
    assert run(files, target, restart=True, seed=6) is None
    assert len(target.attempts) == NUM_LINES
    assert ids_of(files.output)["request 2"] == [seed_of(6, 3)]


def test_a_run_without_errors_leaves_no_error_file_of_an_earlier_one(files):
    run(files, ScriptedTarget(lambda body, _: 400 if body["max_tokens"] % 2 else None))
    assert files.errors.exists()
    assert run(files, ScriptedTarget(), restart=True) is None
    assert not files.errors.exists()


def test_a_run_with_another_input_or_seed_is_refused_and_nothing_is_lost(files):
    count = [0]

    def refusals(_, __):
        count[0] += 1
        return 401 if count[0] > 9 else None

    with pytest.raises(TargetError):
        run(files, ScriptedTarget(refusals), max_in_flight=1)
    with pytest.raises(StateError, match="another seed"):
        run(files, ScriptedTarget(), seed=6)
    with pytest.raises(StateError, match="another model"):
        run(files, ScriptedTarget(), model="other")
    original = files.input.read_bytes()
    files.input.write_bytes(original + original.replace(b"request", b"other"))
    with pytest.raises(StateError, match=r"another input.*--restart"):
        run(files, ScriptedTarget())
    files.input.write_bytes(original)
    assert left(files) == (9, 5)


def test_a_file_that_is_no_output_of_a_batch_is_not_replaced(files):
    files.output.write_text("my thesis")
    with pytest.raises(StateError, match="is not the output of a batch"):
        run(files, ScriptedTarget())
    assert files.output.read_text() == "my thesis"
    assert run(files, ScriptedTarget(), restart=True) is None


@pytest.mark.parametrize("step", range(10))
def test_a_run_that_ends_at_any_step_of_its_finish_is_finished_by_the_next(
    files, monkeypatch, step
):
    """Every call that changes a file once all lines have their results, in turn."""

    def refusals(body, _):
        return 400 if body["max_tokens"] % 4 == 0 else None

    whole = BatchFiles(files.input, files.output.with_name("w"), files.errors.with_name("we"))
    run(whole, ScriptedTarget(refusals))
    num_calls = [-1000]

    def counted(real):
        def call(*args, **options):
            num_calls[0] += 1
            if num_calls[0] == step:
                raise KeyboardInterrupt
            return real(*args, **options)

        return call

    for name in ("fsync", "replace", "pwrite"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    finish = BatchRun._finish

    def finish_counted(self, ended):
        num_calls[0] = -1
        finish(self, ended)

    monkeypatch.setattr(BatchRun, "_finish", finish_counted)
    of_an_earlier_owner = files.output.with_name(f"{files.output.name}.0123abcd.tmp")
    of_an_earlier_owner.write_text("its first line")
    with pytest.raises(KeyboardInterrupt):
        run(files, ScriptedTarget(refusals))
    monkeypatch.undo()
    target = ScriptedTarget(refusals)
    run(files, target)
    assert target.attempts == {}, "a line that had its result ran again"
    assert ids_of(files.output) == ids_of(whole.output)
    assert errors_of(files.errors) == errors_of(whole.errors)
    assert not files.part.exists()
    assert not [*files.output.parent.glob("*.tmp")]
