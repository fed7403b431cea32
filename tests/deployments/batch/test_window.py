"""The number of requests in flight follows the server's refusals."""

from __future__ import annotations

import asyncio

from penstock.deployments.batch.window import FIRST_LIMIT, Window


def test_the_limit_grows_by_each_success_and_halves_once_for_refusals_together():
    now_s = [0.0]
    window = Window(100, lambda: now_s[0])
    assert window.limit == FIRST_LIMIT
    for _ in range(32):
        window.succeeded()
    assert window.limit == FIRST_LIMIT + 32
    for _ in range(10):
        window.refused()
    assert window.limit == 20
    now_s[0] = 1.5
    window.refused()
    assert window.limit == 10
    for _ in range(10):
        window.succeeded()
    assert window.limit == 10  # one more for a windowful
    for _ in range(2):
        window.succeeded()
    assert window.limit == 11
    for second in range(2, 20):
        now_s[0] = float(second)
        window.refused()
    assert window.limit == 1


def test_no_more_than_the_limit_are_in_flight_and_never_more_than_the_most():
    async def run():
        window = Window(12, lambda: 0.0)
        most = 0

        async def one():
            nonlocal most
            async with window.slot():
                most = max(most, window.num_in_flight)
                assert window.num_in_flight <= window.limit <= 12
                await asyncio.sleep(0.001)
                window.succeeded()

        await asyncio.gather(*(one() for _ in range(200)))
        assert window.num_in_flight == 0
        return most

    assert asyncio.run(run()) == 12


def test_a_task_that_is_cancelled_while_it_waits_gives_its_place_to_the_next():
    async def run():
        window = Window(1, lambda: 0.0)
        async with window.slot():
            waiting = [asyncio.create_task(_hold(window)) for _ in range(3)]
            await asyncio.sleep(0)
            waiting[0].cancel()
            await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*waiting[1:]), 60)
        assert window.num_in_flight == 0

    asyncio.run(run())


async def _hold(window):
    async with window.slot():
        await asyncio.sleep(0)
