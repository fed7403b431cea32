"""Signals of `penstock serve`: who ends the process, and what it prints. Real processes."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# What the main thread does; `made` are its Signals.
BEGIN = """
import sys, time
from penstock.deployments.cli import signals
signals.PATIENCE_S = {patience_s}
made = signals.Signals(lambda: print("gave up", flush=True), unwinds={unwinds})
"""
# In a destructor an exception is printed, and lost.
IN_A_DESTRUCTOR = """
class Busy:
    def __del__(self):
        print("busy", flush=True)
        while True:
            time.sleep(0.01)
Busy()
"""
UNWINDS = """
try:
    print("busy", flush=True)
    time.sleep(60)
except signals.Interrupted:
    print("cleaned up", flush=True)
finally:
    made.started()
{then}
"""
SERVES = """
made.started()
print("busy", flush=True)
while made.num_seen < {num}:
    time.sleep(0.01)
print("saw", made.num_seen, flush=True)
{then}
"""


def run(
    program: str, *numbers: int, unwinds: bool = False, patience_s: float = 0.3
) -> tuple[int, list[str], str]:
    """Status, lines and errors of a process that gets these signals, each after a line of it."""
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN.format(unwinds=unwinds, patience_s=patience_s) + program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = []
        for number in numbers:
            lines.append(process.stdout.readline().strip())
            process.send_signal(number)
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, lines + rest.split("\n")[:-1], errors


@pytest.mark.parametrize("number", SIGNALS)
def test_a_start_ends_at_once_and_prints_nothing_wherever_it_is(number: int) -> None:
    status, lines, errors = run(IN_A_DESTRUCTOR, number)
    assert (status, errors) == (130, "")
    assert lines == ["busy", "gave up"]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_start_that_has_to_clean_up_does_it_in_the_main_thread(number: int) -> None:
    program = UNWINDS.format(then="sys.exit(3)")
    ended = run(program, number, unwinds=True, patience_s=60.0)
    assert ended == (3, ["busy", "cleaned up"], "")
    status, lines, errors = run(UNWINDS.format(then="time.sleep(60)"), number, unwinds=True)
    assert (status, lines[-1], errors) == (130, "gave up", "")  # it took too long


def test_a_server_that_runs_is_told_and_ends_by_itself_or_at_the_second_signal() -> None:
    one, two = SERVES.format(num=1, then=""), SERVES.format(num=1, then="time.sleep(60)")
    for unwinds in (False, True):
        assert run(one, signal.SIGINT, unwinds=unwinds) == (0, ["busy", "saw 1"], "")
        status, lines, errors = run(two, signal.SIGINT, signal.SIGTERM, unwinds=unwinds)
        assert (status, lines, errors) == (130, ["busy", "saw 1", "gave up"], "")
