"""Stops a process that uses a lock, at a moment at which it does not hold it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path

from penstock.deployments.batch.file_lock import try_lock
from tests.deployments.waiting import eventually


def stop_outside_its_lock(send: Callable[[signal.Signals], None], path: Path) -> None:
    """SIGSTOP by `send`, but not while the lock of `path` is held: none else could work then."""
    for _ in range(100):
        send(signal.SIGSTOP)
        with contextlib.suppress(AssertionError), path.open() as file:
            eventually(lambda: try_lock(file.fileno(), path), 1.0)
            return
        send(signal.SIGCONT)
        time.sleep(0.05)
    raise AssertionError("the process always holds its lock")
