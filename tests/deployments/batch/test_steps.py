"""The steps of one batch, each broken off at every write: the next process ends it the same."""

from __future__ import annotations

import asyncio
import json
import os
import threading

import pytest

from penstock.deployments.batch import executor as executor_module
from penstock.deployments.batch.batch_store import BatchState, BatchStatus, BatchStore, StoredBatch
from penstock.deployments.batch.executor import Executor
from penstock.deployments.batch.file_store import FileStore
from penstock.deployments.batch.lease import Lease
from tests.deployments.batch.test_file_store import spec, stored
from tests.deployments.batch.test_runner import ScriptedTarget


class Killed(BaseException):
    """As if the process had ended here."""


def run_once(folder, target, board=None):
    """One executor from its start until no batch is left, or it is killed."""

    async def run():
        executor = Executor(folder, lambda _: target, ["builtin"], board)
        running = asyncio.create_task(executor.run())
        try:
            async with asyncio.timeout(60):
                await until_done(executor)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def until_done(executor):
        while await asyncio.to_thread(BatchStore(folder).unfinished):
            for running in executor._running.values():
                if running.task.done() and running.task.exception() is not None:
                    raise running.task.exception()
            await asyncio.sleep(0.01)

    asyncio.run(run())


class Notes:
    """A Board."""

    def __init__(self):
        self.states = []

    def note(self, spec, state):
        self.states.append((spec.id, state))

    async def is_cancelled(self, batch_id):
        return False


def write(folder, num_lines):
    request = {"method": "POST", "url": "/v1/completions"}
    lines = [
        json.dumps(
            {"custom_id": str(i), **request, "body": {"prompt": f"{i}", "max_tokens": i, "seed": i}}
        )
        for i in range(num_lines)
    ]
    file = stored(FileStore(folder).of(""), "\n".join(lines).encode())
    return BatchStore(folder).of("").create(spec(), FileStore(folder).of("").path(file))


def refusals(body, _):
    return 400 if body["max_tokens"] == 3 else None


def test_an_executor_notes_each_change_and_what_ended_before(tmp_path):
    before = write(tmp_path, 3)
    run_once(tmp_path, ScriptedTarget(refusals))  # nobody is told
    batch, notes = write(tmp_path, 2), Notes()
    run_once(tmp_path, ScriptedTarget(refusals), notes)
    assert (before.spec.id, before.state()) in notes.states
    noted = [state.status.value for batch_id, state in notes.states if batch_id == batch.spec.id]
    assert list(dict.fromkeys(noted))[:3] == ["validating", "in_progress", "finalizing"]


@pytest.mark.parametrize("step", range(12))
def test_a_batch_that_is_broken_off_at_any_replacement_of_a_file(tmp_path, monkeypatch, step):
    batch = write(tmp_path, 6)
    num_calls, real = [0], os.replace

    def replace(*paths):
        num_calls[0] += 1
        if num_calls[0] == step:
            raise Killed
        real(*paths)

    monkeypatch.setattr(os, "replace", replace)
    target = ScriptedTarget(refusals)
    try:
        run_once(tmp_path, target)
    except Killed:
        run_once(tmp_path, target)
    assert num_calls[0] >= 8
    state = batch.recorded()
    assert state.status is BatchStatus.COMPLETED
    assert (state.num_lines, state.num_completed, state.num_failed) == (6, 5, 1)
    files = FileStore(tmp_path).of("")
    assert {each.purpose for each in files.list()} == {"batch", "batch_output"}
    assert len(files.list()) == 3
    for file_id, custom_ids in (
        (state.output_file_id, ["0", "1", "2", "4", "5"]),
        (state.error_file_id, ["3"]),
    ):
        stored = files.get(file_id)
        assert stored is not None
        content = files.path(stored).read_text()
        assert [json.loads(each)["custom_id"] for each in content.splitlines()] == custom_ids
    run_once(tmp_path, ScriptedTarget(lambda *_: 500))  # there is nothing left to do
    assert batch.recorded() == state


def test_the_state_says_why_requests_are_sent_again_for_as_long_as_they_are(tmp_path):
    batch = write(tmp_path, 6)
    causes: list[str] = []

    def refusals(body, attempt):
        causes.append(batch.recorded().cause)
        return 503 if "code 503" not in causes else None

    run_once(tmp_path, ScriptedTarget(refusals))
    assert "code 503" in causes
    assert batch.recorded().cause == ""
    assert batch.recorded().num_completed == 6


def test_a_disk_that_fails_for_a_while_does_not_hide_that_a_client_cancels(tmp_path, monkeypatch):
    batch = write(tmp_path, 400)
    failures: list[BatchState] = []
    real = StoredBatch.write

    def failing(self, state):
        if state.num_completed and len(failures) < 3:
            failures.append(state)
            if len(failures) == 3:
                batch.cancel()
            raise OSError("no space left on device")
        real(self, state)

    monkeypatch.setattr(StoredBatch, "write", failing)
    monkeypatch.setattr(executor_module, "POLL_S", 0.02)
    monkeypatch.setattr(executor_module, "MAX_IN_FLIGHT", 1)
    run_once(tmp_path, ScriptedTarget())
    state = batch.recorded()
    assert len(failures) == 3
    assert state.status is BatchStatus.CANCELLED
    assert 0 < state.num_completed < 400


def test_a_late_record_of_the_progress_does_not_replace_the_end(tmp_path, monkeypatch):
    batch = write(tmp_path, 6)
    has_begun, has_ended = threading.Event(), threading.Event()
    commit, write_state = Lease.commit, StoredBatch.write
    num_delayed = [0]

    def delayed(self):
        if has_begun.is_set() and not num_delayed[0]:
            num_delayed[0] += 1
            has_ended.wait(0.5)
        return commit(self)

    def noted(self, state):
        write_state(self, state)
        if state.status.is_final:
            has_ended.set()

    def slow(_, attempt):
        has_begun.set()

    monkeypatch.setattr(Lease, "commit", delayed)
    monkeypatch.setattr(StoredBatch, "write", noted)
    monkeypatch.setattr(executor_module, "POLL_S", 0.001)
    run_once(tmp_path, ScriptedTarget(slow))
    assert num_delayed == [1]
    assert batch.recorded().status is BatchStatus.COMPLETED
