"""Connections whose other ends have not proven themselves: bounded in number and in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

MAX_UNPROVEN = 64
HELLO_S = 5.0  # an end that has not proven itself by then is let go

Connection = TypeVar("Connection")


class Unproven(Generic[Connection]):
    """At most MAX_UNPROVEN connections, each for HELLO_S. Lives on one event loop.

    One more ends the oldest: a proof takes one round trip, so that an end which can give one is
    among the youngest, however many others connect.
    """

    def __init__(self, end: Callable[[Connection, str], None]):
        """`end`: ends a connection, for a reason; it may call `discard`."""
        self._end = end
        self._timers: dict[Connection, asyncio.TimerHandle] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._timers)

    def __iter__(self) -> Iterator[Connection]:
        return iter(tuple(self._timers))

    def add(self, connection: Connection) -> None:
        if len(self._timers) >= MAX_UNPROVEN:
            oldest = next(iter(self._timers))
            self.discard(oldest)
            self._end(oldest, "there are too many connections that have not proven themselves")
        loop = asyncio.get_running_loop()
        self._timers[connection] = loop.call_later(HELLO_S, self._too_late, connection)

    def discard(self, connection: Connection) -> None:
        """It has proven itself, or has ended."""
        if (timer := self._timers.pop(connection, None)) is not None:
            timer.cancel()

    def _too_late(self, connection: Connection) -> None:
        self.discard(connection)
        self._end(connection, f"it did not prove itself within {HELLO_S:g} s")
