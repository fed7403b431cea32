"""Locks of the hub's cache: one download of a model on a machine, and what ended ones left behind.

The hub's client writes a file under a name of its own, and moves it when it is whole. A process
that is killed leaves its part, which nobody can continue.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.workers.progress import WAITING, Progress, Report, size

log = logging.getLogger("penstock.loading")

LOCK_POLL_S = 0.2
LOCKS, PARTS = ".locks", "*.incomplete"


@contextmanager
def alone(cache: Path, repository: str, report: Report) -> Iterator[None]:
    """Hold this machine's lock of a repository, by its folder's name in the cache.

    Where locks do not work, files are still whole, and some may be fetched twice.
    """
    folder = cache / LOCKS / repository
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / "penstock.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
    try:
        while _try_lock(fd) is False:
            report(Progress(WAITING))
            time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(fd)  # frees the lock, too


def remove_leftovers(cache: Path, repository: str) -> None:
    """Delete the parts of files of a repository that no process downloads any more."""
    for part in (cache / repository / "blobs").glob(PARTS):
        # The client holds this lock while it writes.
        lock = cache / LOCKS / repository / f"{part.name.partition('.')[0]}.lock"
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if _try_lock(fd):
                num_bytes = part.stat().st_size
                part.unlink(missing_ok=True)
                log.info("removed %s of a download that has ended: %s", size(num_bytes), part)
        except OSError as error:
            log.warning("%s cannot be removed: %s", part, error.strerror)
        finally:
            os.close(fd)


def _try_lock(fd: int) -> bool | None:
    """Lock an open file; whether that succeeded. None: locks do not work there."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
