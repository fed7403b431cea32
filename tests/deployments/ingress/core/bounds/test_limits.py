"""A burst of calls leaves the event loop free for others in between."""

from __future__ import annotations

import asyncio

from penstock.deployments.ingress.core.bounds.limits import Turns


async def passes(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def calls_of(turns: Turns, number: int) -> tuple[list[asyncio.Future[None]], list[int]]:
    """Calls that wait for their turns, and the numbers of those that have begun."""
    begun: list[int] = []

    async def call(number: int) -> None:
        await turns.wait()
        begun.append(number)

    return [asyncio.ensure_future(call(each)) for each in range(number)], begun


def test_a_call_alone_does_not_wait() -> None:
    async def run() -> None:
        turns = Turns(2)
        for _ in range(3):
            for _ in range(2):
                waiting = turns.wait()
                with_no_pass = False
                try:
                    waiting.send(None)
                except StopIteration:
                    with_no_pass = True
                assert with_no_pass
            await passes(2)

    asyncio.run(run())


def test_many_begin_in_order_and_few_in_each_pass() -> None:
    async def run() -> None:
        turns = Turns(3)
        calls, begun = calls_of(turns, 50)
        num_before = 0
        for _ in range(60):
            await passes(1)
            assert len(begun) - num_before <= 3
            num_before = len(begun)
        assert begun == list(range(50))
        await asyncio.gather(*calls)
        await turns.wait()  # and later ones begin as well

    asyncio.run(run())


def test_a_call_that_is_cancelled_takes_no_turn() -> None:
    async def run() -> None:
        turns = Turns(1)
        calls, begun = calls_of(turns, 12)
        await passes(2)
        for each in calls[4:8]:
            each.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert begun == [0, 1, 2, 3, 8, 9, 10, 11]

    asyncio.run(run())


def test_an_event_loop_after_another() -> None:
    turns = Turns(1)

    async def run() -> None:
        await asyncio.gather(*(turns.wait() for _ in range(5)))

    for _ in range(2):
        asyncio.run(asyncio.wait_for(run(), 5))
