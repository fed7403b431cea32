"""A request core in this process over workers in theirs, with a fault proxy before each worker.

For rows about workers and their connections: calls of all features, compared with the same calls
before any fault. `desk` makes one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.faults.proxy import Proxy, proxy
from benchmarks.faults.table import inside
from benchmarks.faults.table.rows import Seen
from benchmarks.faults.worker_process import CONFIG, MODEL, WorkerParts, WorkerProcess
from benchmarks.faults.workload import Answer, answer, make_call
from penstock.deployments.ingress.core.call import Call
from penstock.deployments.ingress.core.runtime import ModelRuntime
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.workers.config import EngineConfig
from penstock.workers.context_policy import ContextSettings
from penstock.workers.stats import WorkerInfo
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model

MAX_MODEL_LEN = 2048
CONNECT_S = 30.0
FREE_S = 15.0  # from the last answer until no block is held; a worker waits 10 s for a lost ingress
Told = Callable[[int], Awaitable[None]]  # gets the number of tokens that the client has


@dataclass(eq=False)
class Hand:
    """One worker, and the proxy that its ingress reaches it by."""

    process: WorkerProcess
    relay: Proxy
    info: WorkerInfo


@dataclass(eq=False)
class Watched:
    """One call as its client saw it: when tokens came, and the callbacks for them."""

    core: RequestCore
    told: Told | None
    arrivals: list[float] = field(default_factory=list)
    num_tokens: int = 0

    async def prepare_choices(self, call: Call, num_choices: int) -> Any:
        return await self.core.prepare_choices(call, num_choices)

    async def run_many(self, generations: Any) -> AsyncIterator[Any]:
        self.arrivals.append(time.monotonic())
        async for index, piece in self.core.run_many(generations):
            self.arrivals.append(time.monotonic())
            self.num_tokens += len(piece.token_ids)
            if self.told is not None:
                await self.told(self.num_tokens)
            yield index, piece

    @property
    def longest_gap_s(self) -> float:
        """Between two pieces."""
        times = self.arrivals[1:]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


class Desk:
    """The core, its pool, and the workers. Use `desk`."""

    def __init__(self, config: EngineConfig, prepare: Callable[[WorkerParts], None], wait_s: float):
        self.config, self._prepare = config, prepare
        self.pool = WorkerPool("faults", lost_wait_s=wait_s)
        self.core = RequestCore(
            ModelRuntime(
                Tokenizer.load(resolve_model("builtin")),
                self.pool,
                model_name="builtin",
                vocab_size=MODEL.config.vocab_size,
                max_model_len=MAX_MODEL_LEN,
                contexts=ContextSettings.of(CONFIG, MAX_MODEL_LEN),
            )
        )
        self.hands: list[Hand] = []
        self._stack = contextlib.AsyncExitStack()
        self._expected: dict[Any, Answer] = {}

    async def add(self, *, waits: bool = True) -> Hand:
        """Start a worker, and connect with it; without `waits`, it connects in its time."""
        process = await asyncio.to_thread(WorkerProcess, self.config, self._prepare)
        relay = await self._stack.enter_async_context(proxy(process.info.address))
        hand = Hand(process, relay, replace(process.info, address=relay.address))
        self.hands.append(hand)
        self.publish()
        if waits:
            await self.connected(len(self.hands))
        return hand

    async def connected(self, number: int, within_s: float = CONNECT_S) -> float:
        """Wait until so many workers take requests; returns the seconds."""
        began_s = time.monotonic()
        async with asyncio.timeout(within_s):
            while self.pool.num_connected < number:
                await asyncio.sleep(0.005)
        return time.monotonic() - began_s

    def publish(self) -> None:
        """What the registry would tell the pool."""
        self.pool.update([hand.info for hand in self.hands])

    async def kill(self, hand: Hand) -> None:
        await asyncio.to_thread(hand.process.kill)

    async def remove(self, hand: Hand) -> None:
        await self.kill(hand)
        self.hands.remove(hand)
        self.publish()

    async def busy(self, within_s: float = 10.0) -> Hand:
        """A worker that has a request now. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while True:
                for hand in self.hands:
                    stats = await asyncio.to_thread(hand.process.stats)
                    if stats.num_running + stats.num_waiting:
                        return hand
                await asyncio.sleep(0.005)

    async def expect(self, number: int) -> Answer:
        """The answer to call `number`, undisturbed; kept."""
        return await self.alone(number, *make_call(number)[1:])

    async def alone(self, key: Any, call: Call, num_choices: int = 1) -> Answer:
        """The same for any call, by `key`."""
        if key not in self._expected:
            self._expected[key] = await answer(self.core, call, num_choices)
        return self._expected[key]

    async def run(
        self, call: Call, num_choices: int = 1, told: Told | None = None
    ) -> tuple[Answer, Watched]:
        """A call to its end. Raises ServiceError and RequestError."""
        watched = Watched(self.core, told)
        got = await answer(watched, call, num_choices)  # type: ignore[arg-type]
        return got, watched

    async def held_blocks(self, within_s: float = FREE_S) -> int:
        """KV blocks that requests hold: 0, or the number after `within_s`."""
        until_s, held = time.monotonic() + within_s, -1
        while held and time.monotonic() < until_s:
            await asyncio.sleep(0.1)
            stats = [await asyncio.to_thread(hand.process.stats) for hand in self.hands]
            held = sum(each.num_live_blocks for each in stats)
        return held

    async def check_free(self, seen: Seen) -> None:
        held = await self.held_blocks()
        seen.note("blocks held at the end", held)
        seen.check(held == 0, f"{held} KV blocks are held although no request runs")

    async def close(self) -> None:
        await self.pool.close()
        for hand in self.hands:
            await self.kill(hand)
        await self._stack.aclose()


@contextlib.asynccontextmanager
async def desk(
    num_workers: int,
    *,
    config: EngineConfig = CONFIG,
    prepare: Callable[[WorkerParts], None] = inside.pace,
    lost_wait_s: float = 30.0,
) -> AsyncIterator[Desk]:
    """A desk with so many workers. `prepare`: called in each worker before it serves."""
    made = Desk(config, prepare, lost_wait_s)
    try:
        for _ in range(num_workers):
            await made.add()
        yield made
    finally:
        await made.close()


def same(got: Answer, expected: Answer) -> bool:
    """Whether a client would find no difference."""
    return got == expected
