"""Several answers on their way at once, read as one stream of pieces. Knows nothing of cores.

One deadline for all waits of an answer: one timer, where `asyncio.timeout_at` has one a wait.

An answer waits once for each of its deltas, and a timer each time costs as much as the rest of the
wait. Knows tasks and times; nothing of what is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import TypeVar

from penstock.deployments.ingress.core.call import TextDelta

MAX_WAITING = 256  # pieces that nobody has read so far


async def side_by_side(
    streams: Sequence[AsyncGenerator[TextDelta, None]],
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """All pieces as they come, each with the index of its stream; a stream has one last piece.

    The first failure ends them all; so does closing this generator.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    ready: asyncio.Queue[tuple[int, TextDelta | Exception]] = asyncio.Queue(maxsize=MAX_WAITING)

    async def pump(index: int, stream: AsyncGenerator[TextDelta, None]) -> None:
        try:
            async with aclosing(stream) as pieces:
                async for piece in pieces:
                    await ready.put((index, piece))
        except Exception as error:
            await ready.put((index, error))

    pumps = [asyncio.create_task(pump(i, each)) for i, each in enumerate(streams)]
    try:
        num_unfinished = len(streams)
        while num_unfinished:
            index, item = await ready.get()
            if isinstance(item, Exception):
                raise item
            num_unfinished -= item.finish_reason is not None
            yield index, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


T = TypeVar("T")


class Alarm:
    """Rings at `at_s`, on the clock of the event loop, or when told; None: only when told.

    One task waits at a time. `close` it in the end.
    """

    def __init__(self, at_s: float | None):
        self._at_s = at_s
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Task[object] | None = None
        self._woke = False  # it was this alarm that cancelled who waits

    def ring(self) -> None:
        """Now: whoever waits, or will, gets a TimeoutError."""
        self._at_s = asyncio.get_running_loop().time()
        if self._waiting is not None and not self._woke:
            self._woke = True
            self._waiting.cancel()

    def close(self) -> None:
        """Ring no more of itself."""
        if self._timer is not None:
            self._timer.cancel()

    async def wait(self, thing: Awaitable[T]) -> T:
        """What `thing` gives. Raises TimeoutError once the alarm has rung.

        As with `asyncio.timeout_at`, what is there without waiting is given all the same, and a
        task that is cancelled from outside gets its CancelledError.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None and self._waiting is None
        if self._at_s is not None and self._at_s <= loop.time():
            async with asyncio.timeout_at(self._at_s):
                return await thing
        if self._timer is None and self._at_s is not None:
            self._timer = loop.call_at(self._at_s, self.ring)
        num_cancels, self._waiting = task.cancelling(), task
        try:
            return await thing
        except asyncio.CancelledError:
            if self._woke and task.cancelling() - 1 <= num_cancels:
                raise TimeoutError from None
            raise
        finally:
            self._waiting = None
            if self._woke:
                self._woke = False
                task.uncancel()
