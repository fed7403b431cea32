"""Alarms against `asyncio.timeout_at`: who waits, who is cancelled, and by whom."""

from __future__ import annotations

import asyncio

import pytest

from penstock.deployments.ingress.core.streams import Alarm

FAR = 3600.0


def now():
    return asyncio.get_running_loop().time()


async def soon(value=7):
    await asyncio.sleep(0)
    return value


async def never():
    await asyncio.Event().wait()


def test_one_timer_serves_all_waits():
    async def main():
        alarm = Alarm(now() + FAR)
        assert [await alarm.wait(soon(i)) for i in range(5)] == [*range(5)]
        timer = alarm._timer
        assert await alarm.wait(soon()) == 7
        assert alarm._timer is timer
        alarm.close()
        assert timer.cancelled()
        assert not asyncio.current_task().cancelling()

    asyncio.run(main())


@pytest.mark.parametrize("in_s", [0.02, -1.0])
def test_the_deadline(in_s):
    async def main():
        alarm = Alarm(now() + in_s)
        for _ in range(2):  # and it stays rung
            with pytest.raises(TimeoutError):
                await alarm.wait(never())
        assert not asyncio.current_task().cancelling()
        await asyncio.sleep(0)  # no cancel is left over

        async def ready():
            return 3

        assert await alarm.wait(ready()) == 3, "what is there needs no waiting"
        alarm.close()

    asyncio.run(main())


@pytest.mark.parametrize("at", [None, FAR])
def test_rung_by_hand(at):
    async def main():
        alarm = Alarm(None if at is None else now() + at)
        asyncio.get_running_loop().call_soon(alarm.ring)
        asyncio.get_running_loop().call_soon(alarm.ring)  # twice is once
        with pytest.raises(TimeoutError):
            await alarm.wait(never())
        assert not asyncio.current_task().cancelling()
        alarm = Alarm(None)
        alarm.ring()  # before anybody waits
        with pytest.raises(TimeoutError):
            await alarm.wait(never())

    asyncio.run(main())


def test_a_cancel_from_outside_stays_one_whatever_rings_beside():
    async def main(rings):
        alarm = Alarm(now() + FAR)
        task = asyncio.create_task(alarm.wait(never()))
        await asyncio.sleep(0)
        task.cancel()
        if rings:
            alarm.ring()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        alarm.close()

    asyncio.run(main(False))
    asyncio.run(main(True))


def test_errors_of_what_is_waited_for_come_through():
    async def main():
        async def fails():
            await asyncio.sleep(0)
            raise KeyError("x")

        alarm = Alarm(now() + FAR)
        with pytest.raises(KeyError):
            await alarm.wait(fails())
        assert await alarm.wait(soon()) == 7
        alarm.close()

    asyncio.run(main())
