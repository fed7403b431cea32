"""The right to change a job's files: one process has it, and one that hangs loses it.

A lease is a file that names its owner and a fence number, one higher for each owner. The owner
keeps the file locked (flock), and renews its modification time every RENEW_S. Another process takes
the lease over

- at once if the owner has released it, or if the owner's process on this machine has ended, however
  it ended: the kernel frees its lock;
- after STALE_POLLS polls without a renewal if the owner hangs, is stopped, or ran on another
  machine, whose processes cannot be seen from here.

A new owner makes a new file under the same name. An earlier owner that runs again finds that at its
next renewal. Until then it changes nothing that others read: such changes are made within `commit`,
which keeps new owners out and fails for an earlier owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from penstock.deployments.batch.file_lock import LockError, locked, try_lock
from penstock.deployments.batch.part_file import sync_folder

RENEW_S = 2.0
POLL_S = 0.5
# Polls, not seconds: a process that was stopped itself must not count that time.
STALE_POLLS = 40
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class LeaseLost(LockError):
    """Another process has taken over the lease."""


class LeaseHeld(LockError):
    """Another process has the lease, and renews it."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a lease. `kernel`: processes on the same kernel see each other's locks."""

    fence: int
    host: str
    kernel: str
    pid: int
    token: str  # random, of this owner alone
    is_released: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True)
class _Sighting:
    """One poll of a lease that another process has; two are equal if no renewal came between them.

    `has_ended`: the owner has released the lease, or its process has ended.
    """

    owner: Owner
    renewed_ns: int
    has_ended: bool


class Lease:
    """A lease that this process has; see `hold`. Methods may run on any thread."""

    def __init__(self, path: Path, lock: Path, owner: Owner, fd: int):
        self.owner = owner
        self.is_lost = False
        self.is_done = False  # set when the job is finished: then `release` removes the file
        self._path, self._lock, self._fd = path, lock, fd
        self._using = threading.Lock()  # of the descriptor: a renewal may run during the release

    def renew(self) -> None:
        """Renew the file's modification time. Raises LeaseLost or OSError."""
        with self._using:
            if self._fd < 0:
                return
            os.utime(self._fd)
            self._check()

    @contextmanager
    def commit(self) -> Iterator[None]:
        """For changes that other processes read: none takes over meanwhile. For moments only.

        Raises LockError, or LeaseLost before the body has run.
        """
        with locked(self._lock):
            self._check()
            yield

    def release(self) -> None:
        """Release the lease; without effect if it is lost."""
        try:
            with contextlib.suppress(LeaseLost), self.commit():
                if self.is_done:
                    self._path.unlink()
                else:
                    os.close(_put(self._path, replace(self.owner, is_released=True)))
        finally:
            with self._using:
                os.close(self._fd)
                self._fd = -1

    def _check(self) -> None:
        owner = _owner_at(self._path)
        if owner is None or owner.token != self.owner.token:
            self.is_lost = True
            raise LeaseLost(
                f"this process did not renew its lease in time, and {owner or 'another process'} "
                "has taken this batch over, with the lines that were finished before"
            )


@asynccontextmanager
async def hold(
    path: Path,
    lock: Path,
    *,
    waits: bool = False,
    on_wait: Callable[[Owner], object] = lambda _: None,
) -> AsyncIterator[Lease]:
    """Acquire the lease at `path`, and renew it for the body, which is cancelled if it is lost.

    `lock`: a file that each owner locks for moments. `waits`: until no other process has the lease;
    without `waits`, an owner that renews it is a LeaseHeld. `on_wait`: called once with another
    owner, before this process waits for a renewal. Raises LeaseLost, LockError or OSError.
    """
    lease = await _acquire(path, lock, waits, on_wait)
    body = asyncio.current_task()
    assert body is not None
    num_cancels = body.cancelling()
    renewing = asyncio.create_task(_renew(lease, body))
    try:
        yield lease
    except asyncio.CancelledError:
        if lease.is_lost and body.uncancel() <= num_cancels:
            lease._check()  # raises LeaseLost, with the new owner
        raise
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        await asyncio.to_thread(lease.release)


async def _renew(lease: Lease, body: asyncio.Task[Any]) -> None:
    while True:
        await asyncio.sleep(RENEW_S)
        try:
            await asyncio.to_thread(lease.renew)
        except LeaseLost:
            body.cancel()
            return
        except OSError:
            continue  # the disk cannot be reached; a later renewal finds whether the lease is lost


async def _acquire(
    path: Path, lock: Path, waits: bool, on_wait: Callable[[Owner], object]
) -> Lease:
    seen: _Sighting | None = None
    num_equal = 0
    while True:
        over = seen if num_equal >= STALE_POLLS else None
        trying = asyncio.ensure_future(asyncio.to_thread(_try_acquire, path, lock, over))
        try:
            found = await asyncio.shield(trying)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError, LockError):
                late = await trying
                if isinstance(late, Lease):
                    late.release()
            raise
        if isinstance(found, Lease):
            return found
        if found == seen:
            num_equal += 1
        elif seen is None:
            on_wait(found.owner)
        elif not waits:
            raise LeaseHeld(
                f"another process runs this batch: {found.owner}; wait until it ends, or end it "
                f"(kill {found.owner.pid} there; `ray job stop` where it is a Ray job)"
            )
        if found != seen:
            seen, num_equal = found, 0
        await asyncio.sleep(POLL_S)


def _try_acquire(path: Path, lock: Path, over: _Sighting | None) -> Lease | _Sighting:
    """The lease if it is free, or unchanged since `over`; else what this poll found."""
    with locked(lock):
        seen = _look(path)
        if seen is None:
            return _take(path, lock, 1)
        if not seen.has_ended and seen != over:
            return seen
        return _take(path, lock, seen.owner.fence + 1)


def _look(path: Path) -> _Sighting | None:
    """One poll; None: no process has the lease."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        owner = _read(fd, path)
        has_ended = owner.is_released
        if not has_ended and owner.kernel == _kernel():
            has_ended = try_lock(fd, path)
        return _Sighting(owner, os.fstat(fd).st_mtime_ns, has_ended)
    finally:
        os.close(fd)


def _take(path: Path, lock: Path, fence: int) -> Lease:
    """Make this process the owner. The caller holds `lock`."""
    for unfinished in path.parent.glob(f"{glob.escape(path.name)}.*.new"):
        unfinished.unlink()
    owner = Owner(fence, socket.gethostname(), _kernel(), os.getpid(), secrets.token_hex(4))
    return Lease(path, lock, owner, _put(path, owner))


def _put(path: Path, owner: Owner) -> int:
    """Replace the file of the lease; the descriptor of the new one, which holds its lock."""
    new = path.with_name(f"{path.name}.{owner.token}.new")
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        try_lock(fd, new)
        os.write(fd, json.dumps(asdict(owner)).encode())
        os.fsync(fd)
        os.rename(new, path)
        sync_folder(path.parent)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _owner_at(path: Path) -> Owner | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return _read(fd, path)
    finally:
        os.close(fd)


def _read(fd: int, path: Path) -> Owner:
    try:
        return Owner(**json.loads(os.pread(fd, 4096, 0)))
    except (ValueError, TypeError):
        raise LockError(f"{path} is not the lease of a batch; remove it") from None


def _kernel() -> str:
    """The id of this machine's kernel since its start; containers share it."""
    try:
        return _BOOT.read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()
