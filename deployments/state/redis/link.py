"""`Link`: one connection, owned by one task. Callers hand over plans and wait for futures.

So no caller's cancellation reaches the socket in the middle of a command, and the commands of
several callers are sent in one write. redis-py's own retries are off: it would repeat an append
that was done. While the server cannot be reached, calls are refused at once, and the task tries to
connect about once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.asyncio.connection import Connection
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from penstock.deployments.state.redis.plans import Command, Plan, Stale
from penstock.deployments.state.store import StateDown, StateError

T = TypeVar("T")

log = logging.getLogger("penstock.state")

# Without a byte of an answer a connection is given up: after ANSWER_S, or when the last of the
# callers has left. A server that waits for its disk answers nothing for a second or two.
ANSWER_S = 1.0
MOST_PATIENCE_S = 5.0
RETRY_S = 1.0  # between attempts to connect; random from half of it on
PING_S = 1.0  # idle time after which a PING checks the connection
MOST_WAITING = 10_000
MOST_WAITING_BYTES = 32 << 20


@dataclass(slots=True, eq=False)
class _Job:
    plan: Plan[Any]
    size: int
    deadline: float  # on the loop's clock
    future: asyncio.Future[Any]

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def finish(self, result: Any) -> None:
        if not self.future.done():
            self.future.set_result(result)


class Link:
    """Belongs to one event loop.

    most_together: plans that run at the same time; 1 for plans that need the connection alone.
    answer_s: above ANSWER_S for plans that make the server wait.
    on_connect: makes the plan that checks each new connection, before any call.
    """

    def __init__(
        self,
        dial: Callable[[], Awaitable[Connection]],
        *,
        most_together: int = 256,
        answer_s: float = ANSWER_S,
        on_connect: Callable[[], Plan[None]] | None = None,
    ) -> None:
        self._dial = dial
        self._most_together = most_together
        self._answer_s = answer_s
        self._on_connect = on_connect
        self._jobs: deque[_Job] = deque()
        self._size = 0
        self._filled = asyncio.Event()
        self._connection: Connection | None = None
        self.fault: str | None = "not connected yet"
        self._is_down = False  # the last attempt to connect failed
        self._is_closed = False
        self.has_tried = asyncio.Event()  # to connect, once
        self._owner = asyncio.create_task(self._own())

    @property
    def is_up(self) -> bool:
        return self._connection is not None

    async def run(self, plan: Plan[T], budget_s: float, size: int = 0) -> T:
        """Run `plan`, and return its result. Raises its errors, and StateDown."""
        if self._is_closed:
            raise StateDown("the store is closed")
        if self._is_down:
            raise StateDown(f"{self.fault}; tried again each second")
        if len(self._jobs) >= MOST_WAITING or self._size + size > MOST_WAITING_BYTES:
            raise StateDown(f"{len(self._jobs)} calls wait for Redis already")
        loop = asyncio.get_running_loop()
        job = _Job(plan, size, loop.time() + budget_s, loop.create_future())
        self._jobs.append(job)
        self._size += size
        self._filled.set()
        try:
            async with asyncio.timeout(budget_s):
                result: T = await job.future
                return result
        except TimeoutError:
            raise StateDown(f"Redis did not answer within {budget_s:.3g} s") from None

    async def close(self) -> None:
        self._is_closed = True
        self._owner.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._owner

    async def _own(self) -> None:
        try:
            while True:
                try:
                    await self._serve()
                except (StateDown, RedisError, OSError, TimeoutError) as error:
                    await self._drop(error)
                except Exception as error:
                    log.exception("unexpected error on a connection to Redis")
                    await self._drop(error)
                self.has_tried.set()
                if self._is_down:
                    await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.0))
        finally:
            await self._drop(StateDown("the store is closed"))

    async def _serve(self) -> None:
        """Connect, and run jobs until one fails."""
        connection = self._connection or await self._connect()
        while True:
            try:
                async with asyncio.timeout(PING_S):
                    await self._filled.wait()
            except TimeoutError:
                await self._exchange(connection, [("PING",)])
                continue
            await self._run(connection, self._next())

    async def _connect(self) -> Connection:
        try:
            connection = await self._dial()
        except BaseException:
            self._is_down = True
            raise
        self._connection = connection
        if self._on_connect is not None:
            try:
                await self._through(connection, self._on_connect())
            except AuthenticationError:
                self._is_down = True
                raise StateDown("Redis requires a password (state_password_file)") from None
            except BaseException:
                self._is_down = True
                raise
        if self._is_down:
            log.info("Redis answers again")
        self._is_down, self.fault = False, None
        self.has_tried.set()
        return connection

    async def _drop(self, error: BaseException) -> None:
        """Close the connection; the outcome of running calls is not known."""
        text = str(error) or "Redis does not answer"
        is_news = self.fault is None or (self._is_down and self.fault != text)
        if is_news and not self._is_closed:
            log.warning("%s", text)
        self.fault = text
        if self._is_down or self._is_closed:
            for job in self._take(len(self._jobs)):
                job.fail(StateDown(text))
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await connection.disconnect(nowait=True)

    def _next(self) -> list[_Job]:
        jobs = self._take(self._most_together)
        return [job for job in jobs if not job.future.done()]  # the others have no caller

    def _take(self, most: int) -> list[_Job]:
        jobs = [self._jobs.popleft() for _ in range(min(most, len(self._jobs)))]
        self._size -= sum(job.size for job in jobs)
        if not self._jobs:
            self._filled.clear()
        return jobs

    async def _run(self, connection: Connection, jobs: list[_Job]) -> None:
        """Send the commands of all plans, and the replies to the plans, until all have ended."""
        going = [(job, next(job.plan)) for job in jobs]
        last_s = max((job.deadline for job in jobs), default=0.0)
        stale: Stale | None = None
        try:
            while going:
                commands = [command for _, wanted in going for command in wanted]
                replies = await self._exchange(connection, commands, last_s)
                at, still = 0, []
                for job, wanted in going:
                    part = replies[at : at + len(wanted)]
                    at += len(wanted)
                    try:
                        still.append((job, job.plan.send(part)))
                    except StopIteration as stopped:
                        job.finish(stopped.value)
                    except StateError as error:
                        job.fail(error)
                        stale = error if isinstance(error, Stale) else stale
                going = still
        except BaseException as error:
            text = str(error) or "Redis does not answer"
            for job in jobs:
                job.fail(StateDown(f"{text}; whether the call was done is not known"))
            raise
        if stale is not None:
            raise stale

    async def _through(self, connection: Connection, plan: Plan[None]) -> None:
        commands = next(plan)
        with contextlib.suppress(StopIteration):
            while True:
                commands = plan.send(await self._exchange(connection, commands))

    async def _exchange(
        self, connection: Connection, commands: list[Command], last_s: float = 0.0
    ) -> list[Any]:
        """The replies; errors of the server as values. Raises TimeoutError, and redis-py's.

        last_s: when the last caller stops waiting, on the loop's clock.
        """
        loop, replies = asyncio.get_running_loop(), []
        patience_s = max(self._answer_s, min(last_s - loop.time(), MOST_PATIENCE_S))
        async with asyncio.timeout(patience_s) as limit:
            await connection.send_packed_command(
                connection.pack_commands(commands), check_health=False
            )
            for _ in commands:
                try:
                    replies.append(await connection.read_response(disable_decoding=True))
                except ResponseError as error:
                    replies.append(error)
                limit.reschedule(loop.time() + patience_s)
        return replies
