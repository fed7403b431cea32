"""Ends the processes below this one, also where Ray does not. Linux: reads /proc."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

KILLED_S = 5.0  # until a killed process is gone, on a machine that is busy


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if (facts := _stat(int(entry.name))) is not None:
            children.setdefault(facts[1], []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended: a zombie only waits to be counted."""
    facts = _stat(pid)
    return facts is not None and facts[0] not in "ZX"


def end(pids: Sequence[int], grace_s: float) -> None:
    """Send SIGTERM; SIGKILL to those that still run after `grace_s`."""
    left = list(pids)
    if grace_s:
        _send(left, signal.SIGTERM)
        left = _wait(left, grace_s)
    _send(left, signal.SIGKILL)
    _wait(left, KILLED_S)


def _wait(pids: Sequence[int], at_most_s: float) -> list[int]:
    """Wait for these processes to end; returns those that still run after `at_most_s`."""
    deadline_s = time.monotonic() + at_most_s
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return left


def _send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _stat(pid: int) -> tuple[str, int] | None:
    """State and parent of a process; None if there is none."""
    try:
        # "pid (name) state parent ...", where the name may hold anything
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return None
    return fields[0], int(fields[1])
