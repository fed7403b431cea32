"""Deadlines against `asyncio.timeout_at`: who waits, who is cancelled, and by whom."""

from __future__ import annotations

import asyncio

import pytest

from penstock.deployments.ingress.core.bounds.deadline import Deadline

FAR = 3600.0


def cancelling() -> int:
    """How many cancellations the task that runs has been asked for."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


def now():
    return asyncio.get_running_loop().time()


async def soon(value=7):
    await asyncio.sleep(0)
    return value


async def never():
    await asyncio.Event().wait()


def test_one_timer_serves_all_waits():
    async def main():
        deadline = Deadline(now() + FAR)
        assert [await deadline.wait(soon(i)) for i in range(5)] == [*range(5)]
        timer = deadline._timer
        assert await deadline.wait(soon()) == 7
        assert deadline._timer is timer
        deadline.close()
        assert timer is not None and timer.cancelled()
        assert not cancelling()

    asyncio.run(main())


@pytest.mark.parametrize("in_s", [0.02, -1.0])
def test_the_deadline(in_s):
    async def main():
        deadline = Deadline(now() + in_s)
        for _ in range(2):  # and it stays rung
            with pytest.raises(TimeoutError):
                await deadline.wait(never())
        assert not cancelling()
        await asyncio.sleep(0)  # no cancel is left over

        async def ready():
            return 3

        assert await deadline.wait(ready()) == 3, "what is there needs no waiting"
        deadline.close()

    asyncio.run(main())


@pytest.mark.parametrize("at", [None, FAR])
def test_rung_by_hand(at):
    async def main():
        deadline = Deadline(None if at is None else now() + at)
        asyncio.get_running_loop().call_soon(deadline.expire)
        asyncio.get_running_loop().call_soon(deadline.expire)  # twice is once
        with pytest.raises(TimeoutError):
            await deadline.wait(never())
        assert not cancelling()
        deadline = Deadline(None)
        deadline.expire()  # before anybody waits
        with pytest.raises(TimeoutError):
            await deadline.wait(never())

    asyncio.run(main())


def test_a_cancel_from_outside_stays_one_whatever_rings_beside():
    async def main(rings):
        deadline = Deadline(now() + FAR)
        task = asyncio.create_task(deadline.wait(never()))
        await asyncio.sleep(0)
        task.cancel()
        if rings:
            deadline.expire()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        deadline.close()

    asyncio.run(main(False))
    asyncio.run(main(True))


def test_errors_of_what_is_waited_for_come_through():
    async def main():
        async def fails():
            await asyncio.sleep(0)
            raise KeyError("x")

        deadline = Deadline(now() + FAR)
        with pytest.raises(KeyError):
            await deadline.wait(fails())
        assert await deadline.wait(soon()) == 7
        deadline.close()

    asyncio.run(main())
