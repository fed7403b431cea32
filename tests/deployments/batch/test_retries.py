"""Lost workers: a cluster that restarts fails no request, and one that kills workers ends."""

from __future__ import annotations

import asyncio
import time

import pytest

from penstock.deployments.batch import retries as retries_module
from penstock.deployments.batch import target as target_module
from penstock.deployments.batch.retries import MAX_WORKERS_LOST, Retries
from penstock.deployments.batch.target import Reply, TargetError
from penstock.deployments.batch.window import Window

LOST = Reply(503, {"error": {"code": "worker_lost"}})


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(target_module, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(target_module, "LONGEST_WAIT_S", 0.01)


class Worker:
    """One worker: a request of `poison` kills it, and it takes all that it has along.

    `is_broken`: it loses every request, whatever it is.
    """

    def __init__(self, poison=(), seconds=0.004):
        self._poison = poison
        self._seconds = seconds
        self._lives = 0
        self.is_broken = False
        self.attempts: dict[str, int] = {}

    def request(self, name, seconds=None):
        async def attempt():
            self.attempts[name] = self.attempts.get(name, 0) + 1
            life = self._lives
            await asyncio.sleep(0.001 if name in self._poison else seconds or self._seconds)
            if name in self._poison:
                self._lives += 1
            return LOST if self.is_broken or life != self._lives else Reply(200, {"of": name})

        return attempt


def answer_all(worker, names, *, max_in_flight=16, during=None, seconds=None):
    """The replies to all, by name."""

    async def main():
        retries = Retries(Window(max_in_flight, time.monotonic))
        running = [
            asyncio.ensure_future(retries.reply_of(worker.request(n, seconds))) for n in names
        ]
        if during is not None:
            await during()
        return dict(zip(names, await asyncio.gather(*running)))

    return asyncio.run(main())


def test_a_cluster_that_loses_every_request_for_a_while_fails_none():
    worker = Worker()
    worker.is_broken = True

    async def restart():
        while min(worker.attempts.values(), default=0) < 4 * MAX_WORKERS_LOST:
            await asyncio.sleep(0.01)
        worker.is_broken = False

    names = [f"line {i}" for i in range(4)]
    replies = answer_all(worker, names, during=restart)
    assert all(reply.is_success for reply in replies.values())


def test_a_cluster_that_restarts_in_the_middle_of_a_batch_fails_none():
    worker = Worker()
    num_restarts = MAX_WORKERS_LOST - 1  # each one counts once against a request that it ends

    async def attempts(number):
        aim = sum(worker.attempts.values()) + number
        while sum(worker.attempts.values()) < aim:
            await asyncio.sleep(0.001)

    async def restart():
        for _ in range(num_restarts):
            await attempts(100)
            worker.is_broken = True
            await attempts(30)
            worker.is_broken = False

    replies = answer_all(worker, [f"line {i}" for i in range(600)], during=restart)
    assert all(reply.is_success for reply in replies.values())
    assert sum(worker.attempts.values()) >= 600 + num_restarts * 14  # 16 are in flight at most


@pytest.mark.parametrize("seconds", [0.004, 0.05])
@pytest.mark.parametrize("poison", [("line 3",), ("line 3", "line 4", "line 90")])
def test_a_request_that_kills_workers_ends_and_those_beside_it_do_not(poison, seconds):
    worker = Worker(poison)
    names = [f"line {i}" for i in range(100)]
    replies = answer_all(worker, names, seconds=seconds)
    assert {name for name, reply in replies.items() if not reply.is_success} == set(poison)
    for name in poison:
        assert replies[name] == LOST
        # Beside long requests some losses do not count: nothing was answered in between.
        assert MAX_WORKERS_LOST <= worker.attempts[name] <= 6 * MAX_WORKERS_LOST


def test_a_request_that_kills_workers_ends_too_when_it_is_the_last_that_is_left():
    worker = Worker(("last",))

    async def main():
        retries = Retries(Window(16, time.monotonic))
        assert (await retries.reply_of(worker.request("first"))).is_success
        return await asyncio.wait_for(retries.reply_of(worker.request("last")), 60)

    assert asyncio.run(main()) == LOST
    assert worker.attempts["last"] <= 2 * MAX_WORKERS_LOST
    assert worker.attempts["first"] <= worker.attempts["last"]  # it was sent again to compare


def test_without_any_answer_for_a_day_the_job_stops_and_fails_no_line():
    worker, now = Worker(), [0.0]
    worker.is_broken = True
    causes: list[str] = []

    def clock():
        now[0] += 600.0
        return now[0]

    async def main():
        retries = Retries(Window(4, time.monotonic), causes.append, clock)
        await retries.reply_of(worker.request("line"))

    with pytest.raises(TargetError, match=r"no request was answered for 24 h.*worker_lost"):
        asyncio.run(main())
    assert set(causes) == {"worker_lost"}
    assert len(causes) * 600.0 >= retries_module.NO_ANSWER_S


def test_waits_after_losses_grow_whatever_the_server_says(monkeypatch):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    async def lost():
        return Reply(503, LOST.body, retry_after_s=0.001)

    async def main():
        monkeypatch.setattr(asyncio, "sleep", sleep)
        with pytest.raises(TargetError):
            await Retries(
                Window(4, time.monotonic), clock=iter(range(0, 10**6, 7200)).__next__
            ).reply_of(lost)

    monkeypatch.setattr(target_module, "FIRST_WAIT_S", 0.5)
    monkeypatch.setattr(target_module, "LONGEST_WAIT_S", 30.0)
    asyncio.run(main())
    assert len(waits) == 12
    assert all(0.25 * 2**i <= wait <= 0.75 * 2**i for i, wait in enumerate(waits[:6]))
    assert all(15 <= wait <= 45 for wait in waits[7:])
