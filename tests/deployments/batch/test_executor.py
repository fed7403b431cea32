"""Batches outlive the process that runs them, and one process at a time runs them.

Real servers over one data folder, and real SIGKILLs.
"""

from __future__ import annotations

import json
import signal
import time

import openai
import pytest

from tests.deployments.batch.processes.engine_server import EngineServer
from tests.deployments.batch.requests import errors_of, write_input
from tests.deployments.batch.stopping import stop_outside_its_lock
from tests.deployments.ports import free_port
from tests.deployments.waiting import eventually

pytestmark = pytest.mark.timeout(900)  # each start of a server loads torch
NUM_LINES = 600


@pytest.fixture
def given(tmp_path):
    """Requests of one endpoint, those that the server refuses included."""
    lines = write_input(tmp_path / "all.jsonl", 2 * NUM_LINES).read_text().splitlines()
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(each for each in lines if '"/v1/completions"' in each))
    return path


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def start(client, given):
    file = client.files.create(file=given, purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )


def num_done(client, batch):
    counts = client.batches.retrieve(batch.id).request_counts
    return counts.completed + counts.failed


def wait(client, batch):
    eventually(lambda: client.batches.retrieve(batch.id).status == "completed", 120)
    return client.batches.retrieve(batch.id)


def test_a_batch_goes_on_after_its_server_was_killed_twice(tmp_path, given):
    with EngineServer(free_port(), tmp_path / "data") as server, client_of(server) as client:
        batch = start(client, given)
        for least in (10, 60):
            eventually(lambda least=least: num_done(client, batch) >= least, 180)
            server.kill()
            server.start()
            assert client.batches.retrieve(batch.id).status == "in_progress"
        batch = wait(client, batch)
        counts = batch.request_counts
        assert counts.completed + counts.failed == counts.total == NUM_LINES
        output = client.files.content(batch.output_file_id).text.splitlines()
        errors = client.files.content(batch.error_file_id).text.splitlines()
    ids = [json.loads(each)["custom_id"] for each in output + errors]
    given_ids = [json.loads(each)["custom_id"] for each in given.read_text().splitlines()]
    assert sorted(ids) == sorted(given_ids)
    assert len(errors) == counts.failed == 24
    # Not a file but those of the batch and its results is left.
    contents = sorted((tmp_path / "data").glob("*/files/file-" + "?" * 32))
    assert len(contents) == 3
    assert not list((tmp_path / "data").rglob("*.tmp"))
    assert not list((tmp_path / "data").rglob("*.part"))


def test_of_two_servers_over_one_folder_one_works_and_the_other_takes_over(tmp_path, given):
    first, second = (EngineServer(free_port(), tmp_path / "data") for _ in range(2))
    with first, second, client_of(second) as client:
        batch = start(client, given)
        eventually(lambda: num_done(client, batch) >= 20, 180)
        first.kill()
        began_s = time.monotonic()
        batch = wait(client, batch)
        assert batch.request_counts.total == NUM_LINES
        assert time.monotonic() - began_s < 100
        first.start()  # for its end
        content = client.files.content(batch.error_file_id).text
    (tmp_path / "errors").write_text(content)
    assert set(errors_of(tmp_path / "errors").values()) == {"invalid_value"}


def test_a_server_that_is_stopped_loses_its_batches_and_does_not_disturb_them_afterwards(
    tmp_path, given
):
    first, second = (EngineServer(free_port(), tmp_path / "data") for _ in range(2))
    with first, second, client_of(second) as client:
        batch = start(client, given)
        eventually(lambda: num_done(client, batch) >= 20, 180)
        stop_outside_its_lock(first.send, tmp_path / "data" / "executor.lock")
        before = num_done(client, batch)
        eventually(lambda: num_done(client, batch) > before, 180)
        first.send(signal.SIGCONT)
        batch = wait(client, batch)
        output = client.files.content(batch.output_file_id).text.splitlines()
        errors = client.files.content(batch.error_file_id).text.splitlines()
        time.sleep(3.0)  # longer than the first one needs to write a state of its own
        assert client.batches.retrieve(batch.id) == batch
        second.send(signal.SIGSTOP)  # the first one works again, and has nothing to do
        time.sleep(3.0)
        second.send(signal.SIGCONT)
        assert client.batches.retrieve(batch.id) == batch
    ids = [json.loads(each)["custom_id"] for each in output + errors]
    given_ids = [json.loads(each)["custom_id"] for each in given.read_text().splitlines()]
    assert sorted(ids) == sorted(given_ids)
    assert len(list((tmp_path / "data").glob("*/files/file-" + "?" * 32))) == 3
    assert not list((tmp_path / "data").rglob("*.tmp"))
