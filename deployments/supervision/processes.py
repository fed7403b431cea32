"""Finds and ends child processes, also those that Ray leaves running."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Sequence

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
KILLED_S = 5.0  # how long a killed process may take to end on a busy machine


def descendants(pid: int) -> list[int]:
    """All descendants of `pid`, parents first."""
    try:
        return [each.pid for each in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended: a zombie only waits to be reaped."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def end(pids: Sequence[int], grace_s: float) -> None:
    """Send SIGTERM; SIGKILL to those that still run after `grace_s`."""
    left = list(pids)
    if grace_s:
        _send(left, signal.SIGTERM)
        left = _wait(left, grace_s)
    _send(left, signal.SIGKILL)
    _wait(left, KILLED_S)


def keep_orphans() -> None:
    """From now on descendants whose parent ends become children of this process: they stay its
    descendants. Those that end then are zombies until this process ends."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _wait_for_the_end(_number: int) -> None:
    """A handler of C's, on whichever thread."""
    while True:
        time.sleep(1.0)


def hold_aborts() -> None:
    """From now on a thread that aborts this process stops instead, and another one has to end it.

    For a process that kills its children, and ends with a status of its own: Ray's library aborts
    it where Ray's processes end while it waits for them.
    """
    ctypes.CDLL(None).signal(signal.SIGABRT, _wait_for_the_end)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, `parent`, ends. Not its own children."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended before
        os._exit(0)


def kill_descendants(at_most_s: float) -> None:
    """SIGKILL to all descendants of this process, and to those that they start meanwhile.

    Returns once all have ended, or after `at_most_s`: killed processes end by themselves.
    """
    keep_orphans()
    deadline_s = time.monotonic() + at_most_s
    while left := [pid for pid in descendants(os.getpid()) if is_running(pid)]:
        _send(left, signal.SIGKILL)
        if time.monotonic() >= deadline_s:
            return
        time.sleep(0.02)


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
