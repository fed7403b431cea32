"""Ingresses, a gate, a state store and workers, each a process of its own; clients beside them.

For rows about what clients reach. `house` makes one. No Ray: the run says which workers there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx

from benchmarks.faults.child import Child
from benchmarks.faults.front_processes import GateProcess, IngressParts, IngressProcess
from benchmarks.faults.table import inside
from benchmarks.faults.table.rows import Seen
from benchmarks.faults.worker_process import CONFIG, WorkerParts, WorkerProcess
from penstock.deployments.bench.own_server import free_port
from penstock.deployments.client import AsyncClient, ClientError
from penstock.deployments.config import ServeConfig
from penstock.deployments.gate.types import GateSetup
from penstock.workers.config import EngineConfig

FREE_S = 15.0
BODY: dict[str, Any] = {"model": "builtin", "temperature": 1.0, "ignore_eos": True}


@dataclass
class Streamed:
    """What a client got of one stream. `error`: a code, where it did not end well."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    error: str = ""
    num_tokens: int = 0  # as the server counts them
    arrivals: list[float] = field(default_factory=list)  # the first one is of the request

    @property
    def content(self) -> tuple[Any, ...]:
        return self.token_ids, self.text, self.finish, self.num_tokens

    @property
    def longest_gap_s(self) -> float:
        times = self.arrivals[1:]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)

    @property
    def wait_s(self) -> float:
        """To the first piece; infinite if none came."""
        return self.arrivals[1] - self.arrivals[0] if len(self.arrivals) > 1 else float("inf")


@dataclass(frozen=True)
class Plan:
    """What a house consists of. `settings`: of ServeConfig, for the ingresses."""

    num_workers: int = 2
    num_ingresses: int = 1
    engine: EngineConfig = CONFIG
    prepare: Callable[[WorkerParts], None] = inside.pace
    prepare_ingress: Callable[[IngressParts], None] | None = None
    gate: GateSetup | None = None
    settings: dict[str, Any] = field(default_factory=dict)


class House:
    """The processes. Use `house`."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.workers: list[WorkerProcess] = []
        self.ingresses: list[IngressProcess] = []
        self.gate: GateProcess | None = None
        self.http = httpx.AsyncClient(
            timeout=120, limits=httpx.Limits(max_connections=None, max_keepalive_connections=20)
        )

    @property
    def url(self) -> str:
        return self.ingresses[0].url

    @property
    def target(self) -> str:
        return self.ingresses[0].target

    async def add_worker(self) -> WorkerProcess:
        made = await asyncio.to_thread(WorkerProcess, self.plan.engine, self.plan.prepare)
        self.workers.append(made)
        await self.publish()
        return made

    async def add_ingress(self, **settings: Any) -> IngressProcess:
        given: dict[str, Any] = {"http_port": free_port(), "grpc_port": free_port()}
        given |= {"metrics_port": 0, **self.plan.settings, **settings}
        given.setdefault("unknown_fields", "refuse")  # a body with one is a bad request here
        config = ServeConfig(engine=self.plan.engine, **given)
        infos = [worker.info for worker in self.workers]
        address = None if self.gate is None else self.gate.address
        made = await asyncio.to_thread(
            IngressProcess, config, infos, address, self.plan.prepare_ingress
        )
        self.ingresses.append(made)
        return made

    async def publish(self) -> None:
        infos = [worker.info for worker in self.workers]
        for ingress in self.ingresses:
            await asyncio.to_thread(ingress.publish, infos)

    async def ready(self, within_s: float = 30.0) -> float:
        """Wait until the first ingress says so; returns the seconds. Raises TimeoutError."""
        began_s = time.monotonic()
        async with asyncio.timeout(within_s):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await self.http.get(f"{self.url}/ready")).status_code == 200:
                        return time.monotonic() - began_s
                await asyncio.sleep(0.02)

    async def post(self, prompt: Any, *, headers: Any = None, **fields: Any) -> httpx.Response:
        body = {**BODY, "prompt": prompt, "max_tokens": 20, **fields}
        return await self.http.post(f"{self.url}/v1/completions", json=body, headers=headers)

    async def held_blocks(self, within_s: float = FREE_S) -> int:
        """KV blocks that requests hold: 0, or the number after `within_s`."""
        until_s, held = time.monotonic() + within_s, -1
        while held and time.monotonic() < until_s:
            stats = [await asyncio.to_thread(each.stats) for each in self.workers if each.is_alive]
            held = sum(each.num_live_blocks for each in stats)
            if held:
                await asyncio.sleep(0.02)
        return held

    async def check_free(self, seen: Seen) -> None:
        held = await self.held_blocks()
        seen.note("blocks held at the end", held)
        seen.check(held == 0, f"{held} KV blocks are held although no request runs")

    async def close(self) -> None:
        await self.http.aclose()
        children: list[Child[Any]] = [*self.ingresses, *self.workers]
        if self.gate is not None:
            children.append(self.gate)
        for child in children:
            await asyncio.to_thread(child.kill)


@contextlib.asynccontextmanager
async def house(plan: Plan) -> AsyncIterator[House]:
    """Workers first, then the gate, then the ingresses."""
    made = House(plan)
    try:
        for _ in range(plan.num_workers):
            await made.add_worker()
        if plan.gate is not None:
            made.gate = await asyncio.to_thread(GateProcess, plan.gate)
        for _ in range(plan.num_ingresses):
            await made.add_ingress()
        await made.ready()
        yield made
    finally:
        await made.close()


Told = Callable[[int], Awaitable[None]]


async def over_grpc(
    target: str,
    prompt: Any,
    *,
    told: Told | None = None,
    timeout_s: float | None = None,
    resume_s: float = 60.0,
    **sampling: Any,
) -> Streamed:
    """A stream over gRPC, by Penstock's client."""
    got = Streamed(arrivals=[time.monotonic()])
    given = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 20, **sampling}
    async with AsyncClient(target, timeout_s=timeout_s, resume_s=resume_s) as client:
        try:
            async for piece in client.generate(prompt, **given):
                got.arrivals.append(time.monotonic())
                got.token_ids += piece.token_ids
                got.text += piece.text
                if piece.finish_reason is not None:
                    got.finish = str(piece.finish_reason)
                if piece.usage is not None:
                    got.num_tokens = piece.usage.completion_tokens
                if told is not None:
                    await told(len(got.token_ids))
        except ClientError as error:
            got.error = error.code
            if error.status is grpc.StatusCode.UNAVAILABLE:
                got.error = f"{error.code} (UNAVAILABLE)"
    return got


async def gathered(calls: Sequence[Awaitable[Streamed]]) -> list[Streamed]:
    return list(await asyncio.gather(*calls))
