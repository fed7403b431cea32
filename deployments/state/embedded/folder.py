"""The folder of an embedded store: closed to other users, and locked by one process."""

from __future__ import annotations

import fcntl
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from penstock.workers.errors import ConfigError

MOUNTS = Path("/proc/self/mountinfo")
IN_MEMORY = ("tmpfs", "ramfs")
# SQLite's write-ahead log shares memory between connections: a network file system has none.
ON_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "fuse.sshfs", "lustre")


class FolderInUse(ConfigError):
    """Another process has the folder."""


@dataclass(slots=True)
class Folder:
    """An open folder. `close` gives the lock back, and removes a temporary folder."""

    path: Path
    notes: tuple[str, ...]
    lock: int
    temporary: tempfile.TemporaryDirectory[str] | None = None

    def file(self, name: str) -> Path:
        """A file in it that only this user can read; made, if it is missing."""
        path = self.path / name
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        return path

    def close(self) -> None:
        os.close(self.lock)
        if self.temporary is not None:
            self.temporary.cleanup()


def open_folder(path: Path | None) -> Folder:
    """The folder, locked. None: a temporary one. Raises ConfigError naming the remedy."""
    if path is None:
        temporary = tempfile.TemporaryDirectory(
            prefix="penstock-state-", ignore_cleanup_errors=True
        )
        note = (
            f"state is in the temporary folder {temporary.name}: it does not survive this process; "
            "give state_url"
        )
        return Folder(Path(temporary.name), (note,), _lock(Path(temporary.name)), temporary)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise ConfigError(
            f"state_url: folder {path} cannot be made: {error.strerror}; choose another"
        ) from None
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"state_url: other users can reach {path} (owner {found.st_uid}, mode "
            f"{found.st_mode & 0o777:o}), and it holds prompts and answers; choose a folder of "
            f"this user, and run: chmod 700 {path}"
        )
    kind = file_system(path)
    if kind in ON_NETWORK:
        raise ConfigError(
            f"state_url: {path} is on {kind}, and SQLite needs a local disk; choose one, or Redis"
        )
    notes: tuple[str, ...] = ()
    if kind in IN_MEMORY:
        notes = (f"state is in {path} on {kind}: it does not survive a restart of the machine",)
    return Folder(path, notes, _lock(path))


def _lock(path: Path) -> int:
    """Its descriptor is closed in child programs, so that none of them keeps the lock."""
    try:
        lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise ConfigError(
            f"state_url: folder {path} cannot be written: {error.strerror}; choose another"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise FolderInUse(
            f"state_url: another process uses {path}; give each process a folder of its own, or "
            "let them share a Redis"
        ) from None
    return lock


def file_system(path: Path) -> str:
    """The type of the file system of `path`, as the kernel names it; "" where it cannot tell."""
    try:
        lines = MOUNTS.read_text().splitlines()
        device = path.stat().st_dev
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:  # id, parent, major:minor, root, mount point, options, ..., -, type, ...
        left, _, right = line.partition(" - ")
        if left.split()[2] == wanted:
            return right.split()[0]
    return ""
