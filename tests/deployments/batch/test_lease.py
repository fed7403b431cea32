"""A job's lease: one owner at a time, whether processes end, hang, or run again.

Real processes, with real signals.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from penstock.deployments.batch import file_lock
from penstock.deployments.batch import lease as lease_module
from penstock.deployments.batch.file_lock import LockError
from penstock.deployments.batch.lease import LeaseHeld, LeaseLost, Owner, hold
from tests.deployments.batch.stopping import stop_outside_its_lock

POLLS = 20  # of 50 ms: an owner that does not renew the lease for a second loses it


class Contender:
    """A process of lease_owner.py, and what it prints."""

    def __init__(self, folder, polls=POLLS):
        command = [
            sys.executable,
            "-m",
            "tests.deployments.batch.processes.lease_owner",
            folder,
            str(polls),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        assert self.process.stdout is not None
        with self.process.stdout as printed:
            for line in printed:
                self._lines.put(line)

    def says(self, within_s=60.0):
        return self._lines.get(timeout=within_s)

    def is_silent(self, for_s):
        time.sleep(for_s)
        return self._lines.empty()

    def send(self, number):
        os.kill(self.process.pid, number)

    def end(self):
        self.process.kill()
        self.process.wait()
        self._reader.join()


@contextmanager
def contenders(folder, number, polls=POLLS):
    made = [Contender(folder, polls) for _ in range(number)]
    try:
        yield made
    finally:
        for each in made:
            each.end()


def fences(folder):
    """What the owners committed, in order."""
    return [int(line) for line in (folder / "log").read_text().splitlines()]


def test_an_owner_that_is_killed_is_replaced_at_once(tmp_path):
    """The kernel frees its lock: the second process need not wait until the lease is stale."""
    with contenders(tmp_path, 1, polls=10**6) as [first]:
        assert first.says() == "has 1\n"
        with contenders(tmp_path, 1, polls=10**6) as [second]:
            assert second.is_silent(3.0)
            first.end()
            assert second.says() == "has 2\n"


def test_an_owner_that_is_stopped_is_replaced_and_changes_nothing_when_it_continues(tmp_path):
    with contenders(tmp_path, 2) as both:
        first, second = both
        while first.is_silent(0.1) and second.is_silent(0.1):
            pass
        if first.is_silent(0):
            first, second = second, first
        assert first.says() == "has 1\n"
        stop_outside_its_lock(first.send, tmp_path / "lock")
        assert second.says() == "has 2\n"
        num_before = len(fences(tmp_path))
        first.send(signal.SIGCONT)
        lost = first.says()
        assert lost.startswith("lost: ")
        assert f"process {second.process.pid} on " in lost
        time.sleep(0.5)
        assert set(fences(tmp_path)[num_before:]) == {2}
        second.end()
        assert first.says() == "has 3\n"


@pytest.mark.parametrize("seed", range(2))
def test_commits_are_in_the_order_of_their_fence_numbers_whatever_happens_to_processes(
    tmp_path, seed
):
    draw = random.Random(seed)
    with contenders(tmp_path, 3) as all_of_them:
        while not (tmp_path / "lease").exists():
            time.sleep(0.01)
        rounds = 0
        while rounds < 8 or fences(tmp_path)[-1] < 4:  # whose pauses were long enough for others
            rounds += 1
            pid = json.loads((tmp_path / "lease").read_text())["pid"]
            owners = [i for i, each in enumerate(all_of_them) if each.process.pid == pid]
            each = owners[0] if owners else draw.randrange(3)
            if draw.random() < 0.3:
                all_of_them[each].end()
                all_of_them[each] = Contender(tmp_path)
            else:
                all_of_them[each].send(signal.SIGSTOP)
                time.sleep(draw.uniform(0.5, 3.0))
                all_of_them[each].send(signal.SIGCONT)
    found = fences(tmp_path)
    assert found == sorted(found)
    assert found[-1] >= 4


@pytest.fixture
def short(monkeypatch):
    for name, value in (("RENEW_S", 0.02), ("POLL_S", 0.01), ("STALE_POLLS", 200)):
        monkeypatch.setattr(lease_module, name, value)


def held(folder, **options):
    return hold(folder / "lease", folder / "lock", **options)


def test_a_second_owner_in_the_same_process_is_refused_while_the_first_is_alive(tmp_path, short):
    async def main():
        seen: list[Owner] = []
        async with held(tmp_path) as first:
            with pytest.raises(LeaseHeld, match=rf"another process .*kill {os.getpid()} "):
                async with held(tmp_path, on_wait=seen.append):
                    pass
            assert seen == [first.owner]
        async with held(tmp_path) as second:
            assert second.owner.fence == first.owner.fence + 1
            second.is_done = True
        assert not (tmp_path / "lease").exists()

    asyncio.run(main())


def test_the_body_is_cancelled_when_the_lease_is_lost_and_not_otherwise(tmp_path, short):
    async def main(ends):
        async with held(tmp_path):
            ends()
            await asyncio.sleep(60)

    def lose():
        lock, path = tmp_path / "lock", tmp_path / "lease"
        lease_module._take(path, lock, 7)

    def cancel():
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    with pytest.raises(LeaseLost, match="has taken this batch over"):
        asyncio.run(main(lose))
    (tmp_path / "lease").unlink()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main(cancel))
    with pytest.raises(LeaseLost, match="another process has taken"):
        asyncio.run(main((tmp_path / "lease").unlink))


def test_a_commit_of_a_lost_lease_does_nothing(tmp_path, short):
    async def main():
        async with held(tmp_path) as lease:
            lease_module._take(tmp_path / "lease", tmp_path / "lock", 7)
            with lease.commit():
                pytest.fail("this process has no lease")

    with pytest.raises(LeaseLost):
        asyncio.run(main())


def test_a_lock_that_does_not_come_free_is_named(tmp_path, short, monkeypatch):
    monkeypatch.setattr(file_lock, "LOCK_S", 0.1)

    async def main():
        async with held(tmp_path) as lease:
            with lease.commit():
                await asyncio.to_thread(use, lease)

    def use(lease):
        with lease.commit():
            pytest.fail("two commits at a time")

    with pytest.raises(LockError, match=r"another process has locked .*lock for 0 s"):
        asyncio.run(main())


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)

    async def main():
        async with held(tmp_path):
            pass

    with pytest.raises(LockError, match="No locks available; put it on a file system with locks"):
        asyncio.run(main())


def test_a_file_that_is_no_lease_is_not_replaced(tmp_path):
    (tmp_path / "lease").write_text("notes")

    async def main():
        async with held(tmp_path):
            pass

    with pytest.raises(LockError, match="is not the lease of a batch"):
        asyncio.run(main())
    assert (tmp_path / "lease").read_text() == "notes"
