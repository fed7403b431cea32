"""`EmbeddedStore`: the verbs on the event loop. Writes go to one thread, reads to two others."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from penstock.deployments.state import arguments
from penstock.deployments.state.embedded import tables
from penstock.deployments.state.embedded.folder import Folder, open_folder
from penstock.deployments.state.embedded.tables import Database
from penstock.deployments.state.embedded.writer import Job, Writer, translated
from penstock.deployments.state.store import (
    ANY,
    Bucket,
    Expect,
    Slice,
    StateDown,
    StoreStatus,
    Taken,
    Versioned,
)

T = TypeVar("T")

NUM_READERS = 2
VALUES, STREAMS = 0, 1  # which database
CLOSE_S = 5.0


class EmbeddedStore:
    """Implements store.Store in a folder, for one process."""

    def __init__(self, folder: Folder, databases: tuple[Database, ...], writer: Writer) -> None:
        self._folder = folder
        self._databases = databases
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="penstock-state-read")
        self._local = threading.local()
        self._opened: list[sqlite3.Connection] = []  # readers' connections
        self._waiting: dict[str, set[asyncio.Event]] = {}  # reads, by stream
        self._is_closed = False

    @staticmethod
    async def open(path: Path | None, synchronous: str = "NORMAL") -> EmbeddedStore:
        """Raises ConfigError for a folder that cannot be used. None: a temporary folder.

        synchronous: of streams; FULL: on the disk before an append returns.
        """
        loop = asyncio.get_running_loop()
        folder, databases, writer = await asyncio.to_thread(_open, path, loop, synchronous)
        return EmbeddedStore(folder, databases, writer)

    async def get(self, name: str, *, budget_s: float) -> Versioned | None:
        arguments.check_name(name)
        work = partial(tables.get, name=name, now_s=time.time())
        return await self._read(VALUES, work, budget_s)

    async def put(
        self,
        name: str,
        value: bytes,
        *,
        ttl_s: float | None = None,
        expect: Expect | int = ANY,
        budget_s: float,
    ) -> int:
        arguments.check_put(name, value, ttl_s, expect)

        def work(db: sqlite3.Connection) -> int:
            return tables.put(db, name, value, ttl_s, expect, time.time())

        return await self._write(VALUES, work, budget_s, len(value))

    async def append(
        self,
        name: str,
        first: int,
        records: Sequence[bytes],
        *,
        fence: int = 0,
        ttl_s: float | None = None,
        keep: int | None = None,
        budget_s: float,
    ) -> int:
        size = arguments.check_append(name, first, records, fence, ttl_s, keep)

        def work(db: sqlite3.Connection) -> int:
            return tables.append(db, name, first, records, fence, ttl_s, keep, time.time())

        return await self._write(STREAMS, work, budget_s, size, partial(self._arrived, name))

    async def read(
        self, name: str, start: int = 0, *, limit: int = 1000, wait_s: float = 0.0, budget_s: float
    ) -> Slice:
        arguments.check_read(name, start, limit, wait_s)
        deadline = self._loop.time() + wait_s
        arrived = asyncio.Event()
        self._waiting.setdefault(name, set()).add(arrived)
        try:
            while True:
                arrived.clear()
                work = partial(tables.read, name=name, start=start, limit=limit, now_s=time.time())
                found = await self._read(STREAMS, work, budget_s)
                left_s = deadline - self._loop.time()
                if found.records or left_s <= 0 or self._is_closed:
                    return found
                try:
                    async with asyncio.timeout(left_s):
                        await arrived.wait()
                except TimeoutError:
                    return found
        finally:
            self._waiting[name].discard(arrived)
            if not self._waiting[name]:
                del self._waiting[name]

    async def take(self, buckets: Sequence[Bucket], *, budget_s: float) -> Taken:
        arguments.check_buckets(buckets)

        def work(db: sqlite3.Connection) -> Taken:
            return tables.take(db, buckets, time.time())

        return await self._write(STREAMS, work, budget_s)

    async def delete(self, name: str, *, expect: Expect | int = ANY, budget_s: float) -> None:
        arguments.check_name(name)
        arguments.check_expect(expect)
        began_s = self._loop.time()

        def value(db: sqlite3.Connection) -> None:
            tables.delete_value(db, name, expect, time.time())

        def rest(db: sqlite3.Connection) -> None:
            tables.delete_stream_and_bucket(db, name)

        await self._write(VALUES, value, budget_s)
        await self._write(STREAMS, rest, budget_s - (self._loop.time() - began_s))

    def status(self) -> StoreStatus:
        kind = f"embedded, SQLite {sqlite3.sqlite_version}"
        return StoreStatus(kind, not self._is_closed, self._folder.notes, self._writer.fault)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for events in self._waiting.values():
            for event in events:
                event.set()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._readers.shutdown()  # reads that have not begun raise StateDown
        for db in self._opened:
            db.close()
        self._writer.close(CLOSE_S)
        self._folder.close()

    async def _write(
        self,
        database: int,
        work: Callable[[sqlite3.Connection], T],
        budget_s: float,
        size: int = 0,
        on_done: Callable[[], None] | None = None,
    ) -> T:
        job = Job(database, work, size, self._loop.create_future(), on_done)
        self._writer.submit(job)
        try:
            async with asyncio.timeout(budget_s):
                result: T = await job.future
                return result
        except TimeoutError:
            raise StateDown(f"the disk did not answer within {budget_s:.3g} s") from None
        finally:
            job.is_abandoned = True

    async def _read(
        self, database: int, work: Callable[[sqlite3.Connection], T], budget_s: float
    ) -> T:
        if self._is_closed:
            raise StateDown("the store is closed")
        try:
            async with asyncio.timeout(budget_s):
                return await self._loop.run_in_executor(
                    self._readers, self._on_reader, database, work
                )
        except TimeoutError:
            raise StateDown(f"the disk did not answer within {budget_s:.3g} s") from None

    def _on_reader(self, database: int, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._is_closed:
            raise StateDown("the store is closed")
        try:
            dbs = getattr(self._local, "dbs", None)
            if dbs is None:
                dbs = self._local.dbs = [tables.connect_reader(each) for each in self._databases]
                self._opened.extend(dbs)
            return work(dbs[database])
        except sqlite3.Error as error:
            raise translated(error) from error

    def _arrived(self, name: str) -> None:
        for event in self._waiting.get(name, ()):
            event.set()


def _open(
    path: Path | None, loop: asyncio.AbstractEventLoop, synchronous: str
) -> tuple[Folder, tuple[Database, ...], Writer]:
    folder = open_folder(path)
    try:
        databases = (
            Database(folder.file("values.db"), tables.VALUES_SQL, "FULL"),
            Database(folder.file("streams.db"), tables.STREAMS_SQL, synchronous),
        )
        writer = Writer(databases, loop)
    except BaseException:
        folder.close()
        raise
    return folder, databases, writer
