"""Threads for long work on text: templates, tokenizing, and the reverse; shared fairly by callers.

The event loop must not do it: all streams would wait. Callers with much of it wait for each other.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.streams import MAX_INLINE_SIZE

NUM_THREADS = 2  # rendering holds the interpreter's lock: more would delay the event loop
MAX_WAITING = 256
MAX_WAITING_OF_OWNER = 64  # where callers have keys

T = TypeVar("T")


class TextPool:
    """Lives on one event loop. Owners take turns, however much each of them has brought."""

    def __init__(self, num_threads: int = NUM_THREADS):
        self.num_waiting = 0
        self._num_free = num_threads
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")

    async def run(
        self, owner: str, size: int, convert: Callable[..., T], /, *args: Any, **options: Any
    ) -> T:
        """`convert(…)`, on a thread unless `size` (characters or tokens) is small.

        `owner`: the principal of the call. Raises ServiceError if too much waits already.
        """
        if size <= MAX_INLINE_SIZE:
            return convert(*args, **options)
        await self._turn(owner)
        loop = asyncio.get_running_loop()
        running = self._threads.submit(partial(convert, *args, **options))
        # Its thread is free when it has ended, which a client that leaves does not hasten.
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._leave))
        return await asyncio.wrap_future(running)

    async def _turn(self, owner: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        of_owner = self._waiting.get(owner)
        if owner and of_owner is not None and len(of_owner) >= MAX_WAITING_OF_OWNER:
            raise ServiceError("over_share", retry_after_s=1.0)
        if self.num_waiting >= MAX_WAITING:
            raise ServiceError("overloaded", retry_after_s=2.0)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self.num_waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given the turn meanwhile
                self._leave()
            raise

    def _leave(self) -> None:
        """A thread is free: for the next owner's first, that has not gone meanwhile."""
        while self._waiting:
            owner, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            self.num_waiting -= 1
            if turns:
                self._waiting[owner] = turns  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
