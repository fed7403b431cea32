"""A limit of memory around one process, by a cgroup of version 1 or 2. Needs root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.faults.table.rows import CannotInject

ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_cap(pid: int, extra_mib: int) -> Iterator[None]:
    """While it holds, the kernel kills the process once it takes `extra_mib` more than now.

    What it had before is not charged to the new group (version 1 charges by page at first touch).
    Raises CannotInject where cgroups cannot be written.
    """
    is_v2 = (ROOT / "cgroup.controllers").exists()
    folder = (ROOT if is_v2 else ROOT / "memory") / f"penstock-faults-{os.getpid()}"
    limit = "memory.max" if is_v2 else "memory.limit_in_bytes"
    num_bytes = extra_mib << 20
    try:
        folder.mkdir()
        if is_v2:
            num_bytes += psutil.Process(pid).memory_info().rss
            (folder / "memory.swap.max").write_text("0")
        (folder / limit).write_text(str(num_bytes))
        (folder / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise CannotInject(f"a cgroup cannot be made here: {error.strerror}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()
