"""Locks of open files (flock): the kernel frees one when its process ends, however it ends.

They hold between processes of one machine, and between machines on file systems that support it
(NFS 4 does; object stores mounted as folders do not).
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_S = 10.0  # longest wait for another process, which holds the lock for moments only


class LockError(RuntimeError):
    """A file cannot be locked. The message is for the user, with the remedy."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of `path`. Raises LockError after LOCK_S, or where locks do not work."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        end_s = time.monotonic() + LOCK_S
        while not try_lock(fd, path):
            if time.monotonic() > end_s:
                raise LockError(
                    f"another process has locked {path} for {LOCK_S:.0f} s: if it is stopped, end "
                    f"it (`fuser {path}` names it; kill -9), and try again"
                )
            time.sleep(0.01)
        yield
    finally:
        os.close(fd)  # frees the lock, too


def try_lock(fd: int, path: Path) -> bool:
    """Lock an open file; whether that succeeded. Raises LockError where locks do not work."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise LockError(
            f"cannot lock {path}: {error.strerror}; put it on a file system with locks, as a local "
            "disk or NFS 4"
        ) from error
    return True
