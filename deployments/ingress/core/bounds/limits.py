"""How many calls may be open at an ingress at a time, and how many bytes they hold: their bodies,
and the scores of their prompts.

The last bound of memory, in front of all parsing and tokenising: calls of every connection and of
both front ends count, also while their bodies arrive. What waits at the gate is bounded there.

Turns spread a burst of calls over many passes of the event loop. To check a call and to ask for its
admission takes the loop about a millisecond: a thousand calls at once would hold up all streams,
and /health, for a second.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from penstock.deployments.ingress.core.errors import ServiceError

MAX_OPEN_CALLS = 4096
MAX_OPEN_BYTES = 256 << 20
RETRY_S = (1.0, 60.0)  # least and most
CALLS_PER_PASS = 8


class OpenCalls:
    """The calls of one ingress. Lives on one event loop."""

    def __init__(
        self,
        max_calls: int = MAX_OPEN_CALLS,
        max_bytes: int = MAX_OPEN_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.num = 0
        self.num_bytes = 0
        self.num_refused = 0
        self.max_calls = max_calls
        self._max_bytes = max_bytes
        self._clock = clock
        self._mean_s = RETRY_S[0]  # that calls are open

    def enter(self, num_bytes: int = 0) -> OpenCall:
        """A further call, which has to `leave`. Raises ServiceError overloaded without room."""
        self.check_room()
        call = OpenCall(self, self._clock())
        self.num += 1
        try:
            call.add(num_bytes)
        except ServiceError:
            call.leave()
            raise
        return call

    def check_room(self) -> None:
        """Raise ServiceError overloaded if no further call may be open."""
        if self.num >= self.max_calls:
            self._refuse(f"this server has {self.num} open requests, as many as it may")

    def add(self, num_bytes: int) -> None:
        """A body grows. Raises ServiceError overloaded, and counts nothing, without room."""
        if self.num_bytes + num_bytes > self._max_bytes:
            self._refuse("the open requests of this server hold as many bytes as they may")
        self.num_bytes += num_bytes

    @contextmanager
    def holding(self, num_bytes: int = 0) -> Iterator[Callable[[int], None]]:
        """Count what an answer holds beside the body of its call; the function that is given counts
        further bytes. Both raise ServiceError overloaded without room."""
        held = 0

        def hold(more: int) -> None:
            nonlocal held
            self.add(more)
            held += more

        try:
            hold(num_bytes)
            yield hold
        finally:
            self.num_bytes -= held

    def left(self, num_bytes: int, began_s: float) -> None:
        """A call has ended."""
        self.num -= 1
        self.num_bytes -= num_bytes
        self._mean_s += 0.05 * (self._clock() - began_s - self._mean_s)

    def _refuse(self, message: str) -> None:
        """Those that are open now have ended after about the time that a call is open; clients that
        were refused together return spread over half of it."""
        self.num_refused += 1
        least_s, most_s = RETRY_S
        after_s = min(max(self._mean_s, least_s), most_s) * random.uniform(1.0, 1.5)
        raise ServiceError("overloaded", message, retry_after_s=after_s)


class OpenCall:
    """One open call, and the bytes of its body. A context manager, which leaves."""

    __slots__ = ("_began_s", "_calls", "_has_left", "_num_bytes")

    def __init__(self, calls: OpenCalls, began_s: float):
        self._calls, self._began_s = calls, began_s
        self._num_bytes, self._has_left = 0, False

    def add(self, num_bytes: int) -> None:
        """More of its body has arrived. Raises ServiceError overloaded."""
        self._calls.add(num_bytes)
        self._num_bytes += num_bytes

    def leave(self) -> None:
        """It has ended, or was refused."""
        if not self._has_left:
            self._has_left = True
            self._calls.left(self._num_bytes, self._began_s)

    def __enter__(self) -> OpenCall:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.leave()


class Turns:
    """At most `CALLS_PER_PASS` calls begin in one pass of the event loop; the others, in order of
    arrival, in later ones. Lives on one event loop."""

    def __init__(self, calls_per_pass: int = CALLS_PER_PASS):
        self._calls_per_pass = calls_per_pass
        self._left = calls_per_pass
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None  # while a next pass is awaited

    async def wait(self) -> None:
        """Until this call may begin: at once, unless many do."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.call_soon(self._next_pass)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn  # if it is cancelled, its turn passes

    def _next_pass(self) -> None:
        assert self._loop is not None
        self._left = self._calls_per_pass
        if not self._waiting:
            self._loop = None
            return
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        self._loop.call_soon(self._next_pass)
