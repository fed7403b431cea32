"""`penstock batch` and its server, killed: one result for each line, and the same tokens.

Real processes and real SIGKILLs. The reference is a run that is left alone.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.deployments.batch.processes.engine_server import EngineServer
from tests.deployments.batch.requests import check_complete, write_input
from tests.deployments.batch.stopping import stop_outside_its_lock
from tests.deployments.ports import free_port

pytestmark = pytest.mark.timeout(900)  # each start of a server loads torch
BATCH = [sys.executable, "-m", "penstock.deployments.cli", "batch"]
QUICK = [sys.executable, "-m", "tests.deployments.batch.processes.quick_lease", "batch"]
NUM_LINES = 120
SEED = ("--seed", "11")


@pytest.fixture(scope="module")
def server():
    with EngineServer(free_port()) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("batch")


@pytest.fixture(scope="module")
def given(folder):
    return write_input(folder / "in.jsonl", NUM_LINES)


@pytest.fixture(scope="module")
def reference(server, folder, given):
    """The token ids of an undisturbed run."""
    output = folder / "reference.jsonl"
    done = subprocess.run(
        [*BATCH, given, output, "--url", server.url, *SEED],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert f"{output}: 117 of {NUM_LINES} requests answered" in done.stdout
    assert "reference.errors.jsonl: 3 requests failed: invalid_value (3)" in done.stdout
    assert f"{given}: {NUM_LINES} requests to {server.url}" in done.stderr
    assert f"{NUM_LINES} of {NUM_LINES} requests (100 %)" in done.stderr
    return check_complete(output, folder / "reference.errors.jsonl", NUM_LINES)


def num_records(output: Path) -> int:
    try:
        return output.with_name(f"{output.name}.part").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def run_until(output: Path, num_lines: int, arguments: list[str]) -> bool:
    """Run the command and kill it once `num_lines` are done. False if it ended before that."""
    process = subprocess.Popen([*BATCH, *arguments], stderr=subprocess.DEVNULL)
    while process.poll() is None:
        if num_records(output) >= num_lines:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.002)
    assert process.returncode == 0
    return False


def test_a_runner_that_is_killed_again_and_again(server, tmp_path, given, reference):
    draw = random.Random(1)
    output = tmp_path / "killed.jsonl"
    arguments = [str(given), str(output), "--url", server.url, *SEED, "--max-in-flight", "16"]
    num_kills = 0
    while run_until(output, num_records(output) + draw.randrange(10, 50), arguments):
        num_kills += 1
        assert not output.exists()
    assert num_kills >= 2
    ids = check_complete(output, output.with_name("killed.errors.jsonl"), NUM_LINES)
    assert ids == reference


def test_a_server_that_is_killed_and_returns(tmp_path, given, reference):
    output = tmp_path / "server-killed.jsonl"
    with EngineServer(free_port()) as server:
        process = subprocess.Popen(
            [*QUICK, given, output, "--url", server.url, *SEED, "--max-in-flight", "16"]
        )
        try:
            for num_lines in (20, 60):
                while num_records(output) < num_lines:
                    assert process.poll() is None
                    time.sleep(0.002)
                server.kill()
                server.start()
            assert process.wait(timeout=200) == 0
        finally:
            process.kill()
            process.wait()
    ids = check_complete(output, tmp_path / "server-killed.errors.jsonl", NUM_LINES)
    assert ids == reference


def test_an_engine_in_the_process_of_the_runner_killed_and_resumed(tmp_path, given, reference):
    output = tmp_path / "local.jsonl"
    arguments = [str(given), str(output), "--model", "builtin", *SEED, "--config"]
    (tmp_path / "engine.yaml").write_text("weights: fp32\nthreads: 1\n")
    arguments.append(str(tmp_path / "engine.yaml"))
    assert run_until(output, 30, arguments)
    assert run_until(output, 10**9, arguments) is False
    ids = check_complete(output, tmp_path / "local.errors.jsonl", NUM_LINES)
    assert ids == reference


def test_a_second_runner_of_the_same_output_is_refused(server, tmp_path, given):
    output = tmp_path / "twice.jsonl"
    arguments = [*BATCH, given, output, "--url", server.url, "--max-in-flight", "1"]
    first = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
    try:
        while num_records(output) < 3:
            assert first.poll() is None
            time.sleep(0.01)
        second = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
        assert second.returncode == 1
        assert "another process runs this batch" in second.stderr
        first.send_signal(signal.SIGINT)
        assert first.wait(timeout=30) == 130
    finally:
        first.kill()
        first.wait()
    num_done = num_records(output)
    assert 3 <= num_done < NUM_LINES
    third = subprocess.run(arguments[:-2], capture_output=True, text=True, timeout=200)
    assert third.returncode == 0
    check_complete(output, tmp_path / "twice.errors.jsonl", NUM_LINES)


def owner_of(output: Path) -> int | None:
    """The process id in the lease."""
    try:
        return int(json.loads(output.with_name(f"{output.name}.lease").read_text())["pid"])
    except FileNotFoundError:
        return None


def test_a_runner_that_is_stopped_is_replaced_and_writes_nothing_when_it_continues(
    server, tmp_path, given, reference
):
    output = tmp_path / "stopped.jsonl"
    arguments = [*QUICK, given, output, "--url", server.url, *SEED, "--max-in-flight", "1"]
    first = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    second = None
    try:
        while num_records(output) < 20:
            assert first.poll() is None
            time.sleep(0.002)
        stop_outside_its_lock(first.send_signal, output.with_name(f"{output.name}.state"))
        num_done = num_records(output)
        second = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
        while num_records(output) <= num_done:
            assert second.poll() is None
            time.sleep(0.002)
        assert owner_of(output) == second.pid
        first.send_signal(signal.SIGCONT)
        _, said = first.communicate(timeout=60)
        assert first.returncode == 1
        assert f"process {second.pid} on" in said and "has taken this batch over" in said
        _, said = second.communicate(timeout=200)
        assert second.returncode == 0, said
        assert f"process {first.pid} on" in said
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.wait()
    assert check_complete(output, tmp_path / "stopped.errors.jsonl", NUM_LINES) == reference


def test_two_runners_of_the_same_output_that_are_stopped_and_killed_in_turn(
    server, tmp_path, given, reference
):
    """One that is refused or has lost the batch begins anew."""
    draw = random.Random(1)
    output = tmp_path / "race.jsonl"
    arguments = [*QUICK, given, output, "--url", server.url, *SEED, "--max-in-flight", "2"]
    running: list[subprocess.Popen[bytes]] = []
    killed: list[int] = []
    has_ended_well: list[int] = []

    def check_end(process: subprocess.Popen[bytes]) -> None:
        # A killed one may have ended by itself just before.
        ends = (0, 1, -signal.SIGKILL) if process.pid in killed else (0, 1)
        assert process.returncode in ends
        if process.returncode == 0:
            has_ended_well.append(process.pid)

    def renew() -> None:
        for process in [each for each in running if each.poll() is not None]:
            check_end(process)
            running.remove(process)
        while len(running) < 2:
            running.append(subprocess.Popen(arguments, stderr=subprocess.DEVNULL))

    try:
        for turn in range(6):
            num_lines = num_records(output) + draw.randrange(2, 18)
            while num_records(output) < num_lines and not output.exists():
                renew()
                time.sleep(0.002)
            pid = owner_of(output)
            if pid not in [each.pid for each in running]:
                continue  # it has just changed
            if turn % 3 == 2:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(draw.uniform(1.5, 4.0))
                os.kill(pid, signal.SIGCONT)
        # The output alone does not say that all is done: its owner may have been killed just then.
        while not has_ended_well:
            renew()
            time.sleep(0.01)
        for process in running:
            process.wait(timeout=100)
            check_end(process)
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert check_complete(output, tmp_path / "race.errors.jsonl", NUM_LINES) == reference


def test_bad_input_names_the_line_and_the_field(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"custom_id": "a", "method": "POST", "url": "/v1/chat", "body": {}}\n{\n')
    done = subprocess.run(
        [*BATCH, bad, tmp_path / "out.jsonl"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "line 1: url must be one of /v1/chat/completions, /v1/completions" in done.stderr
    assert "line 2: not valid JSON" in done.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["bad.jsonl"]
