"""`RedisStore`: the verbs on the event loop, on connections of their own kinds.

One connection takes all calls that are one step on the server. Reads that wait have connections of
their own, since they block them. Where functions are forbidden, what checks before it writes has a
third one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from penstock.deployments.state import arguments
from penstock.deployments.state.redis import plans, transactions
from penstock.deployments.state.redis.dial import CONNECT_S, check_files, dial
from penstock.deployments.state.redis.link import ANSWER_S, Link
from penstock.deployments.state.redis.plans import Keys, Plan
from penstock.deployments.state.redis.refusals import Refusals
from penstock.deployments.state.redis.survey import Survey
from penstock.deployments.state.store import (
    ANY,
    Bucket,
    Expect,
    Slice,
    StateDown,
    StoreStatus,
    Taken,
    Versioned,
)
from penstock.deployments.state.url import RedisAddress

MOST_BLOCKING = 16  # connections for reads that wait; further ones look again now and then
BLOCK_S = 1.0  # longest that the server waits in one command
LOOK_AGAIN_S = 0.2


class RedisStore:
    """Implements store.Store on a Redis server of version 7 or later."""

    def __init__(self, address: RedisAddress) -> None:
        """On the event loop that will use it; connects in the background."""
        self._address = address
        self._keys = Keys(address.prefix)
        self._survey = Survey()
        self._refusals = Refusals()
        self._dial = partial(dial, address)
        self._calls = Link(self._dial, on_connect=self._survey.ask)
        self._alone: Link | None = None
        self._blocking: list[Link] = []
        self._free: list[Link] = []
        self._waits: set[asyncio.Task[Slice]] = set()
        self._is_closed = False

    @staticmethod
    async def open(address: RedisAddress) -> RedisStore:
        """Returns once it is connected, or the first attempt failed. Raises ConfigError."""
        await asyncio.to_thread(check_files, address)
        store = RedisStore(address)
        await store._calls.has_tried.wait()
        return store

    async def get(self, name: str, *, budget_s: float) -> Versioned | None:
        arguments.check_name(name)
        with self._refusals.noted("get"):
            return await self._calls.run(plans.get(self._keys, name), budget_s)

    async def put(
        self,
        name: str,
        value: bytes,
        *,
        ttl_s: float | None = None,
        expect: Expect | int = ANY,
        budget_s: float,
    ) -> int:
        arguments.check_put(name, value, ttl_s, expect)
        make = plans.put if self._survey.has_functions else transactions.put
        plan = make(self._keys, name, value, ttl_s, expect)
        with self._refusals.noted("put"):
            return await self._writer().run(plan, budget_s, len(value))

    async def append(
        self,
        name: str,
        first: int,
        records: Sequence[bytes],
        *,
        fence: int = 0,
        ttl_s: float | None = None,
        keep: int | None = None,
        budget_s: float,
    ) -> int:
        size = arguments.check_append(name, first, records, fence, ttl_s, keep)
        make = plans.append if self._survey.has_functions else transactions.append
        plan = make(self._keys, name, first, records, fence, ttl_s, keep)
        with self._refusals.noted("append"):
            return await self._writer().run(plan, budget_s, size)

    async def read(
        self, name: str, start: int = 0, *, limit: int = 1000, wait_s: float = 0.0, budget_s: float
    ) -> Slice:
        arguments.check_read(name, start, limit, wait_s)
        with self._refusals.noted("read"):
            return await self._read(name, start, limit, wait_s, budget_s)

    async def _read(
        self, name: str, start: int, limit: int, wait_s: float, budget_s: float
    ) -> Slice:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            found = await self._calls.run(plans.read(self._keys, name, start, limit), budget_s)
            left_s = deadline - loop.time()
            if found.records or left_s <= 0:
                return found
            if (link := self._blocking_link()) is None:
                await asyncio.sleep(min(left_s, LOOK_AGAIN_S))
                continue
            block_ms = max(1, int(min(left_s, BLOCK_S) * 1000))
            plan = plans.wait(self._keys, name, start, limit, block_ms)
            task = asyncio.create_task(self._wait(link, plan))
            self._waits.add(task)
            task.add_done_callback(self._waited)
            try:
                async with asyncio.timeout(left_s + budget_s):
                    found = await asyncio.shield(task)  # the server waits on without its caller
            except TimeoutError:
                raise StateDown(f"Redis did not answer within {budget_s:.3g} s") from None
            if found.records:
                return found

    async def take(self, buckets: Sequence[Bucket], *, budget_s: float) -> Taken:
        arguments.check_buckets(buckets)
        make = plans.take if self._survey.has_functions else transactions.take
        with self._refusals.noted("take"):
            return await self._writer().run(make(self._keys, buckets), budget_s)

    async def delete(self, name: str, *, expect: Expect | int = ANY, budget_s: float) -> None:
        arguments.check_name(name)
        arguments.check_expect(expect)
        is_one_step = expect is ANY or self._survey.has_functions
        make = plans.delete if is_one_step else transactions.delete
        link = self._calls if is_one_step else self._writer()
        with self._refusals.noted("delete"):
            await link.run(make(self._keys, name, expect), budget_s)

    def status(self) -> StoreStatus:
        kind = f"Redis {self._survey.version} at {self._address}"
        fault = self._calls.fault or self._refusals.fault
        return StoreStatus(kind, self._calls.is_up, self._survey.notes, fault)

    async def close(self) -> None:
        self._is_closed = True
        links = [self._calls, *self._blocking, *([self._alone] if self._alone else [])]
        await asyncio.gather(*(link.close() for link in links))
        await asyncio.gather(*self._waits, return_exceptions=True)

    def _writer(self) -> Link:
        """The connection for what checks before it writes."""
        if self._survey.has_functions:
            return self._calls
        if self._alone is None:
            self._check_open()
            self._alone = Link(self._dial, most_together=1)
        return self._alone

    def _blocking_link(self) -> Link | None:
        self._check_open()
        if self._free:
            return self._free.pop()
        if len(self._blocking) == MOST_BLOCKING:
            return None
        link = Link(self._dial, most_together=1, answer_s=BLOCK_S + ANSWER_S)
        self._blocking.append(link)
        return link

    def _check_open(self) -> None:
        if self._is_closed:
            raise StateDown("the store is closed")

    async def _wait(self, link: Link, plan: Plan[Slice]) -> Slice:
        try:
            return await link.run(plan, BLOCK_S + ANSWER_S + CONNECT_S)
        finally:
            self._free.append(link)

    def _waited(self, task: asyncio.Task[Slice]) -> None:
        self._waits.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may have left
