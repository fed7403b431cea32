"""SQLite under kill -9, a full disk, a lock that is held, and folders that others can reach."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from penstock.deployments.options import StateOptions
from penstock.deployments.state.embedded import folder as folders
from penstock.deployments.state.embedded import tables
from penstock.deployments.state.embedded.store import NUM_READERS
from penstock.deployments.state.embedded.writer import CHECKPOINT_BYTES
from penstock.deployments.state.factory import open_store
from penstock.deployments.state.store import Conflict, StateDown, StateFull
from penstock.workers.errors import ConfigError
from tests.deployments.state.servers import BUDGET, Backend, until
from tests.deployments.waiting import until as eventually

WRITER = """
import asyncio, sys
from penstock.deployments.options import StateOptions
from penstock.deployments.state.factory import open_store

async def main():
    store = await open_store(StateOptions(state_url=sys.argv[1]))
    async def appends():
        index = 0
        while True:
            index = await store.append("s", index, [b"%d" % index], budget_s=30)
            print("s", index, flush=True)
    async def puts():
        number = 0
        while True:
            number += 1
            await store.put("v", b"%d" % number, budget_s=30)
            print("v", number, flush=True)
    await asyncio.gather(appends(), puts())

asyncio.run(main())
"""


def url(folder: Path) -> str:
    return f"sqlite://{folder}"


def backend(folder: Path) -> Backend:
    return Backend(StateOptions(state_url=url(folder)), is_shared=False)


def test_what_was_acknowledged_survives_kill_9(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, url(tmp_path / "s")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said = []
    ends = time.monotonic() + 1.0
    least = {"s": 50, "v": 10}
    while time.monotonic() < ends or any(num >= 0 for num in least.values()):
        said.append(process.stdout.readline())
        least[said[-1].split()[0]] -= 1
    process.send_signal(signal.SIGKILL)
    said += process.stdout.read().splitlines()
    process.wait()
    pairs = [line.split() for line in said if len(line.split()) == 2]
    num = max(int(number) for kind, number in pairs if kind == "s")
    value = max(int(number) for kind, number in pairs if kind == "v")
    assert num > 50 and value > 10

    async def scenario(store):
        records: list[bytes] = []
        while part := (await store.read("s", len(records), **BUDGET)).records:
            records += part
        assert len(records) in (num, num + 1)  # the last one may have been done unseen
        assert records == [b"%d" % n for n in range(len(records))]
        assert int((await store.get("v", **BUDGET)).value) in (value, value + 1)

    backend(tmp_path / "s").run(scenario)
    for name in ("values.db", "streams.db"):
        with contextlib.closing(sqlite3.connect(tmp_path / "s" / name)) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 8 MB, and a file there that can be removed to make room."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", str(mounted)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small disk")
    filler = mounted / "filler"
    filler.write_bytes(bytes(4 << 20))
    yield mounted / "state", filler
    subprocess.run(["umount", "-l", str(mounted)], check=True)


async def fill(store):
    """Put and append until both are refused; the number of records that were acknowledged."""
    num, is_full = 0, [False, False]
    for number in range(400):
        try:
            num = await store.append("s", num, [bytes(60_000)], **BUDGET)
        except StateFull:
            is_full[0] = True
        try:
            await store.put(f"n{number}", bytes(60_000), **BUDGET)
        except StateFull:
            is_full[1] = True
        if all(is_full):
            return num
    raise AssertionError("the disk never became full")


async def serve_while_full(store, num):
    """Reads go on, and small writes are refused as well or done: never lost, never an exit."""
    assert (await store.get("kept", **BUDGET)).value == b"kept"
    found = await store.read("s", 0, limit=num + 1, **BUDGET)
    assert len(found.records) == num
    with pytest.raises(StateFull):
        await store.put("large", bytes(1 << 20), **BUDGET)
    assert store.status().is_up
    assert "full" in (store.status().fault or "")


async def serve_after(store, num):
    async def write():
        await store.put("again", b"1", **BUDGET)
        return await store.append("s", num, [b"again"], **BUDGET)

    following, after_s = await until(write, within_s=10)
    assert following == num + 1
    assert after_s < 2.0


def test_a_full_disk_is_state_full_until_there_is_room(small_disk):
    folder, filler = small_disk

    async def scenario(store):
        assert any("tmpfs" in note for note in store.status().notes)
        await store.put("kept", b"kept", **BUDGET)
        num = await fill(store)
        await serve_while_full(store, num)
        filler.unlink()
        await serve_after(store, num)

    backend(folder).run(scenario)


def test_a_call_that_fits_is_not_refused_for_one_beside_it(small_disk):
    folder, _ = small_disk

    async def scenario(store):
        calls = [store.put(f"n{n}", bytes(6 << 20 if n == 2 else 100), **BUDGET) for n in range(5)]
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(each, StateFull) for each in done] == [n == 2 for n in range(5)]

    backend(folder).run(scenario)


def test_reads_that_wait_for_a_reader_when_the_store_closes_raise_state_down(tmp_path, monkeypatch):
    """They do not cancel their callers."""
    get, may_read = tables.get, threading.Event()

    reading: list[None] = []

    def slow_get(*arguments, **options):
        reading.append(None)
        assert may_read.wait(60)
        return get(*arguments, **options)

    monkeypatch.setattr(tables, "get", slow_get)

    async def scenario(store):
        reads = [asyncio.create_task(store.get("v", **BUDGET)) for _ in range(NUM_READERS + 3)]
        await eventually(lambda: len(reading) == NUM_READERS)
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0.1)
        may_read.set()
        await closing
        done = await asyncio.gather(*reads, return_exceptions=True)
        assert done[:NUM_READERS] == [None] * NUM_READERS
        assert [type(each) for each in done[NUM_READERS:]] == [StateDown] * 3

    backend(tmp_path / "s").run(scenario)


LIMITED = """
import asyncio, resource, sys
from pathlib import Path
from tests.deployments.state.servers import BUDGET
from tests.deployments.state.test_embedded_faults import backend, fill
from tests.deployments.state.test_embedded_faults import serve_after, serve_while_full

async def scenario(store):
    await store.put("kept", b"kept", **BUDGET)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, resource.RLIM_INFINITY))
    num = await fill(store)
    await serve_while_full(store, num)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await serve_after(store, num)
    print("done")

backend(Path(sys.argv[1])).run(scenario)
"""


def test_a_limit_of_file_sizes_is_a_full_disk(tmp_path):
    if resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY:
        pytest.skip("this process has a limit of its own")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "s")],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout.strip() == "done", done.stderr


def test_two_processes_do_not_share_a_folder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, url(tmp_path / "s")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()  # it is open

    async def scenario(store):
        return await store.read("s", **BUDGET)

    try:
        with pytest.raises(ConfigError, match="another process uses"):
            backend(tmp_path / "s").run(scenario)
    finally:
        process.kill()
        process.communicate()
    assert backend(tmp_path / "s").run(scenario).records  # the lock went with its process


def test_nor_do_two_stores_of_one_process(tmp_path):
    async def scenario(store):
        with pytest.raises(ConfigError, match="another process uses"):
            await open_store(StateOptions(state_url=url(tmp_path / "s")))

    backend(tmp_path / "s").run(scenario)


def test_everything_is_closed_to_other_users(tmp_path):
    async def scenario(store):
        await store.put("a", b"1", **BUDGET)
        await store.append("s", 0, [b"1"], **BUDGET)
        return {each.name: each.stat().st_mode & 0o777 for each in (tmp_path / "s").iterdir()}

    old = os.umask(0)
    try:
        modes = backend(tmp_path / "s").run(scenario)
    finally:
        os.umask(old)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700
    assert {"values.db", "values.db-wal", "streams.db", "streams.db-wal", "lock"} <= set(modes)
    assert set(modes.values()) == {0o600}


def test_a_folder_that_others_can_read_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "s").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"chmod 700 .*/s"):
        backend(tmp_path / "s").run(lambda store: store.get("a", **BUDGET))


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        backend(tmp_path / "file" / "s").run(lambda store: store.get("a", **BUDGET))


def test_a_network_file_system_is_refused(tmp_path, monkeypatch):
    device = os.stat(tmp_path).st_dev
    line = (
        f"36 35 {os.major(device)}:{os.minor(device)} / /data rw,noatime shared:1 - nfs4 srv:/ rw"
    )
    (tmp_path / "mountinfo").write_text(f"{line}\n")
    monkeypatch.setattr(folders, "MOUNTS", tmp_path / "mountinfo")
    with pytest.raises(ConfigError, match="nfs4"):
        backend(tmp_path / "s").run(lambda store: store.get("a", **BUDGET))


def test_an_old_sqlite_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "OLDEST", (99, 0, 0))
    with pytest.raises(ConfigError, match="too old"):
        backend(tmp_path / "s").run(lambda store: store.get("a", **BUDGET))
    monkeypatch.undo()
    backend(tmp_path / "s").run(lambda store: store.get("a", **BUDGET))  # the lock was given back


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda path: path.write_bytes(b"no database" * 1000), "cannot be used"),
        (lambda path: sqlite3.connect(path).execute("PRAGMA user_version=7"), "version 7"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, spoil, word):
    backend(tmp_path / "s").run(lambda store: store.put("a", b"1", **BUDGET))
    spoil(tmp_path / "s" / "values.db")
    with pytest.raises(ConfigError, match=rf"values\.db.*{word}"):
        backend(tmp_path / "s").run(lambda store: store.get("a", **BUDGET))


def test_a_temporary_folder_is_said_and_removed():
    async def scenario(store):
        await store.put("a", b"1", **BUDGET)
        (note,) = store.status().notes
        return note

    note = Backend(StateOptions(), is_shared=False).run(scenario)
    assert "does not survive" in note and "state_url" in note
    assert not Path(note.split()[5].rstrip(":")).exists()


def test_the_log_does_not_grow_without_bound_under_constant_load(tmp_path):
    async def scenario(store):
        largest, index, record = 0, 0, bytes(20_000)
        while index < 2000:  # 40 MB, without a pause
            index = await store.append("s", index, [record] * 10, **BUDGET)
            largest = max(largest, (tmp_path / "s" / "streams.db-wal").stat().st_size)
        assert 1 << 20 < largest < 3 * CHECKPOINT_BYTES
        log = tmp_path / "s" / "streams.db-wal"
        await eventually(lambda: log.stat().st_size == 0)  # emptied when idle

    backend(tmp_path / "s").run(scenario)


def test_what_has_expired_is_removed_from_the_files(tmp_path):
    def rows():
        with contextlib.closing(sqlite3.connect(tmp_path / "s" / "streams.db")) as db:
            tables_of = ("stream", "record", "gone", "bucket")
            sums = [db.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables_of]
        with contextlib.closing(sqlite3.connect(tmp_path / "s" / "values.db")) as db:
            return sum(sums) + db.execute("SELECT count(*) FROM value").fetchone()[0]

    async def scenario(store):
        for first in range(0, 1500, 100):  # three turns
            await store.append("s", first, [b"r"] * 100, ttl_s=600, **BUDGET)
        await store.append("kept", 0, [b"r"] * 3, **BUDGET)
        for number in range(50):
            await store.put(f"n{number}", b"1", ttl_s=600, **BUDGET)
        assert rows() == 1500 + 1 + 3 + 1 + 50
        for number in range(50):  # the last write decides how long it lasts
            await store.put(f"n{number}", b"1", ttl_s=0.1, **BUDGET)
        await store.append("s", 1500, [], ttl_s=0.1, **BUDGET)
        await eventually(lambda: rows() == 4)

    backend(tmp_path / "s").run(scenario)


def test_a_disk_that_hangs_holds_nobody_beyond_a_budget(tmp_path):
    async def scenario(store):
        await store.put("a", b"1", **BUDGET)
        with contextlib.closing(
            sqlite3.connect(tmp_path / "s" / "values.db", isolation_level=None)
        ) as other:
            other.execute("BEGIN IMMEDIATE")  # so that no other connection can write
            began = time.monotonic()
            with pytest.raises(StateDown, match=r"within 0\.2 s"):
                await store.put("a", b"2", budget_s=0.2)
            assert time.monotonic() - began < 2.0
            assert (await store.get("a", **BUDGET)).value == b"1"
            many = [
                asyncio.create_task(store.put("b", bytes(8 << 20), budget_s=0.5)) for _ in "12345"
            ]
            await asyncio.wait(many)
            assert any("wait for the disk already" in str(each.exception()) for each in many)
            other.execute("ROLLBACK")
        version, _ = await until(lambda: store.put("c", b"3", **BUDGET), within_s=10)
        with pytest.raises(Conflict):
            await store.put("c", b"4", expect=version - 1, **BUDGET)

    backend(tmp_path / "s").run(scenario)
