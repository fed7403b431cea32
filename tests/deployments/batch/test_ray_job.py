"""A batch as a Ray job: its driver is killed, and the job is submitted again.

A real Ray head with a dashboard, `ray job submit`, a real server and a real SIGKILL.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray.job_submission import JobSubmissionClient

from penstock.deployments.supervision.processes import descendants, end
from tests.deployments.batch.processes.engine_server import EngineServer
from tests.deployments.batch.requests import check_complete, write_input
from tests.deployments.ports import free_port

pytestmark = pytest.mark.timeout(900)  # each start of a server loads torch
NUM_LINES = 1000
RAY = Path(sys.executable).with_name("ray")
BATCH = [sys.executable, "-m", "penstock.deployments.cli", "batch"]


@pytest.fixture
def dashboard() -> Iterator[str]:
    """The address of the dashboard of a Ray head of its own."""
    # Short, for Ray puts sockets below it, whose paths have a limit of 107 characters.
    folder = Path(f"/tmp/pst-job-{os.getpid()}")
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "tests.deployments.batch.processes.ray_head",
        str(port),
        str(folder),
    ]
    head = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert head.stdin is not None
    assert head.stdout is not None
    try:
        assert any(line == "ready\n" for line in head.stdout), "Ray did not start"
        yield f"http://127.0.0.1:{port}"
    finally:
        pids = descendants(head.pid)
        head.stdin.close()
        try:
            head.wait(60)
        finally:
            head.kill()
            head.wait()
            end(pids, 5.0)  # some still write their logs when the driver has ended
            shutil.rmtree(folder, ignore_errors=True)


def submit(dashboard: str, name: str, entrypoint: list[str]) -> None:
    """`ray job submit`, without waiting for the job."""
    environment = json.dumps({"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}})
    command: list[str | Path] = [
        *(RAY, "job", "submit", "--address", dashboard, "--submission-id", name),
        *("--entrypoint-num-cpus", "1", "--runtime-env-json", environment, "--no-wait", "--"),
        *entrypoint,
    ]
    deadline_s = time.monotonic() + 120
    while True:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode == 0:
            return
        said = done.stdout + done.stderr
        assert "No available agent" in said, said  # the head's agent starts after its dashboard
        assert time.monotonic() < deadline_s, said


def status_of(dashboard: str, name: str) -> str:
    return JobSubmissionClient(dashboard).get_job_status(name).value


def wait_until(condition, within_s: float, what: str) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def drivers_of(output: Path) -> list[psutil.Process]:
    """The processes that run `penstock batch` for this output."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(output) in words and "batch" in words:
            found.append(process)
    return found


def test_a_job_whose_driver_is_killed_and_that_is_submitted_again(dashboard, tmp_path):
    given = write_input(tmp_path / "in.jsonl", NUM_LINES, max_tokens=4)
    output, undisturbed = tmp_path / "out.jsonl", tmp_path / "undisturbed.jsonl"
    part = tmp_path / "out.jsonl.part"
    with EngineServer(free_port()) as server:
        flags = ["--url", server.url, "--seed", "3", "--max-in-flight", "32"]
        job = [*BATCH, str(given), str(output), *flags]
        submit(dashboard, "first", job)
        third = NUM_LINES // 3
        wait_until(
            lambda: part.exists() and part.read_bytes().count(b"\n") >= third,
            120,
            "the job did not get on",
        )
        for driver in drivers_of(output):
            os.kill(driver.pid, signal.SIGKILL)
        wait_until(lambda: status_of(dashboard, "first") == "FAILED", 180, "the job did not notice")
        num_done = part.read_bytes().count(b"\n")
        assert third <= num_done < NUM_LINES
        assert not output.exists()
        submit(dashboard, "second", job)
        wait_until(
            lambda: status_of(dashboard, "second") in ("SUCCEEDED", "FAILED"),
            200,
            "the second job did not end",
        )
        assert status_of(dashboard, "second") == "SUCCEEDED"
        alone = subprocess.run(
            [*BATCH, given, undisturbed, *flags], capture_output=True, text=True, timeout=200
        )
        assert alone.returncode == 0, alone.stderr
    ids = check_complete(output, tmp_path / "out.errors.jsonl", NUM_LINES)
    errors = tmp_path / "undisturbed.errors.jsonl"
    assert ids == check_complete(undisturbed, errors, NUM_LINES)
    assert len(ids) + len(errors.read_text().splitlines()) == NUM_LINES
