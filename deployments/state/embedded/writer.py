"""The one thread that writes: it commits waiting calls in groups, checkpoints, and sweeps.

SQLite before 3.51.3 can damage a write-ahead log when one connection checkpoints while another
writes. Here one connection a file does both, and readers' connections cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.deployments.state.embedded import tables
from penstock.deployments.state.embedded.tables import Database
from penstock.deployments.state.store import StateDown, StateError, StateFull

log = logging.getLogger("penstock.state")

MOST_WAITING_BYTES = 32 << 20
MOST_WAITING = 10_000
MOST_TOGETHER = 256  # calls in one commit
CHECKPOINT_BYTES = 4 << 20  # of the write-ahead log, estimated
COMMIT_BYTES = 3 * 4120  # that a commit adds to the log besides its records: some pages
IDLE_S = 0.25  # without calls, before the log is emptied
SWEEP_S = 1.0
FULL = ("SQLITE_FULL", "SQLITE_READONLY", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE")


@dataclass(slots=True, eq=False)
class Job:
    """One call that changes something."""

    database: int
    work: Callable[[sqlite3.Connection], Any]
    size: int
    future: asyncio.Future[Any]
    on_done: Callable[[], None] | None = None  # on the loop, after success
    is_abandoned: bool = False  # its caller does not wait any more


Outcome = tuple[Job, Any, Exception | None]


class Writer:
    """Runs jobs of the event loop and sets their futures there. `submit` and `close` run on it."""

    def __init__(self, databases: tuple[Database, ...], loop: asyncio.AbstractEventLoop) -> None:
        """Opens the files. Raises ConfigError."""
        self._databases = databases
        self._loop = loop
        self._dbs = [tables.connect_writer(each) for each in databases]
        self._sweeps = (tables.sweep_values, tables.sweep_streams)
        self._logged = [0] * len(databases)  # bytes in each write-ahead log, about
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._size = 0
        self._is_closing = False
        self._swept_at = time.monotonic()
        self.fault: str | None = None  # why the last commit failed
        self._thread = threading.Thread(target=self._run, name="penstock-state", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Raises StateDown where too many calls or bytes wait already."""
        with self._changed:
            if self._is_closing:
                raise StateDown("the store is closed")
            if len(self._jobs) >= MOST_WAITING or self._size + job.size > MOST_WAITING_BYTES:
                raise StateDown(f"{len(self._jobs)} calls wait for the disk already")
            self._jobs.append(job)
            self._size += job.size
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Finish the waiting calls, empty the logs, and close the files. Blocks."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the disk of the state store hangs; its thread is left behind")

    def _run(self) -> None:
        while True:
            jobs = self._next()
            if not jobs and self._is_closing:
                break
            for number in range(len(self._dbs)):
                if those := [job for job in jobs if job.database == number]:
                    self._commit(number, those)
            for number, size in enumerate(self._logged):
                if size > CHECKPOINT_BYTES or (size and not jobs):
                    self._checkpoint(number, "PASSIVE" if jobs else "TRUNCATE")
            if time.monotonic() - self._swept_at > SWEEP_S:
                self._sweep()
        for number, db in enumerate(self._dbs):
            if self._logged[number]:
                self._checkpoint(number, "TRUNCATE")
            with contextlib.suppress(sqlite3.Error):
                db.close()

    def _next(self) -> list[Job]:
        """The waiting calls; an empty list after a while without calls."""
        with self._changed:
            if not self._jobs and not self._is_closing:
                self._changed.wait(IDLE_S if any(self._logged) else SWEEP_S)
            jobs = [self._jobs.popleft() for _ in range(min(len(self._jobs), MOST_TOGETHER))]
            self._size -= sum(job.size for job in jobs)
        return jobs

    def _commit(self, number: int, jobs: list[Job]) -> None:
        outcomes = self._transact(number, jobs)
        if len(jobs) > 1 and any(isinstance(error, StateFull) for _, _, error in outcomes):
            # A smaller one of them may fit.
            outcomes = [each for job in jobs for each in self._transact(number, [job])]
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(_deliver, outcomes)

    def _transact(self, number: int, jobs: list[Job]) -> list[Outcome]:
        """All of `jobs` in one transaction. A job that raises StateError has changed nothing."""
        db = self._dbs[number]
        outcomes: list[Outcome] = []
        try:
            db.execute("BEGIN IMMEDIATE")
            for job in jobs:
                if job.is_abandoned:
                    continue
                try:
                    outcomes.append((job, job.work(db), None))
                except StateError as error:
                    outcomes.append((job, None, error))
            db.execute("COMMIT")
        except Exception as error:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            self._note(error)
            return [(job, None, translated(error)) for job in jobs]
        self._logged[number] += COMMIT_BYTES + sum(job.size for job in jobs)
        self.fault = None
        return outcomes

    def _note(self, error: Exception) -> None:
        failure = translated(error)
        if self.fault is None:
            log.error("%s (%s)", failure, error, exc_info=not isinstance(error, sqlite3.Error))
        self.fault = str(failure)

    def _checkpoint(self, number: int, mode: str) -> None:
        """Copy the log into the file. Where that fails the log is kept, and it is tried again."""
        try:
            db = self._dbs[number]
            is_busy, _, _ = db.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        except sqlite3.Error as error:
            self._note(error)
            is_busy = True
        # More than 0 until the log is empty: it is tried again when idle.
        self._logged[number] = 0 if mode == "TRUNCATE" and not is_busy else 1

    def _sweep(self) -> None:
        has_more = False
        for number, sweep in enumerate(self._sweeps):
            db = self._dbs[number]
            try:
                db.execute("BEGIN IMMEDIATE")
                before = db.total_changes
                has_more |= sweep(db, time.time())
                db.execute("COMMIT")
            except sqlite3.Error as error:
                with contextlib.suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                self._note(error)
                continue
            if db.total_changes > before:
                self._logged[number] += COMMIT_BYTES
        if not has_more:
            self._swept_at = time.monotonic()


def _deliver(outcomes: list[Outcome]) -> None:
    for job, result, error in outcomes:
        if error is None and job.on_done is not None:
            job.on_done()
        if job.future.done():
            continue
        if error is None:
            job.future.set_result(result)
        else:
            job.future.set_exception(error)


def translated(error: Exception) -> StateError:
    """An error of SQLite as one of the store's errors."""
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith(FULL):
        return StateFull(f"the disk of the state store is full or cannot be written ({name})")
    if isinstance(error, sqlite3.Error):
        return StateDown(f"the state store's file cannot be used ({name or type(error).__name__})")
    return StateDown(f"unexpected error in the state store ({type(error).__name__})")
