"""Clients that behave badly, for slow_readers.py: they do not read, or leave, or come too late."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import numpy as np

from penstock.deployments.client import AsyncClient, ClientError

NUM_SLOTS = 16
PROMPT_LEN = 24
LONG = 1800  # tokens of an answer that no client waits for
OFTEN_S = 0.05  # between clients that come and go: more than all that the neighbours ask for
SELDOM_S = 0.5
WATCH_S = 3.0  # to see what the worker does for one
STAY_S = 5.0  # how long a long answer is held on to
SETTLE_S = 2.5  # until the worker has announced itself anew
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


class Server:
    """The addresses of the server, and what the benchmark does with them."""

    def __init__(self, urls: dict[str, str]):
        self.urls = urls
        self.http = httpx.AsyncClient(base_url=urls["HTTP, SSE"], timeout=60)
        self.grpc_target = urls["gRPC"].removeprefix("grpc://")
        self.rng = np.random.default_rng(0)

    def prompt(self) -> list[int]:
        """Ids of a new prompt: no hit in the prefix cache."""
        return [int(n) for n in self.rng.integers(3, 2000, size=PROMPT_LEN)]

    async def worker(self) -> dict[str, int]:
        """What the worker last announced."""
        status = (await self.http.get("/v1/penstock/status")).json()
        worker: dict[str, int] = status["workers"][0]
        return worker

    async def idle(self) -> dict[str, int]:
        """What the worker announces once nothing runs. Raises TimeoutError."""
        async with asyncio.timeout(60):
            while True:
                await asyncio.sleep(SETTLE_S)
                worker = await self.worker()
                if worker["num_running"] == worker["num_waiting"] == 0:
                    return worker

    async def open_http(self, max_tokens: int, *, reads: bool = True, **more: Any) -> socket.socket:
        """A stream over a plain socket, which takes next to nothing in unless it is read."""
        sock = socket.socket()
        if not reads:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        host, port = self.urls["HTTP, SSE"].removeprefix("http://").split(":")
        await loop.sock_connect(sock, (host, int(port)))
        body = json.dumps(
            {
                "prompt": self.prompt(),
                "max_tokens": max_tokens,
                "stream": True,
                **GREEDY,
                **more,
            }
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            "connection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        await loop.sock_sendall(sock, head.encode() + body)
        if reads:
            await loop.sock_recv(sock, 4096)  # the first token is there
        return sock


def reset(sock: socket.socket) -> None:
    """Break a connection off without a goodbye."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


# Bad company: each runs until it is cancelled, and tells how often it did what it does.


async def take_long(server: Server, counts: dict[str, int], *, reads: bool) -> None:
    """On half the slots: ask for a long answer, of many bytes, and read all of it or nothing."""

    async def over_http() -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock = await server.open_http(LONG, reads=reads, logprobs=5)
            counts["streams"] += 1
            try:
                async with asyncio.timeout(STAY_S):
                    while not reads or await loop.sock_recv(sock, 1 << 16):
                        await asyncio.sleep(0 if reads else STAY_S)
            except TimeoutError:
                pass
            finally:
                reset(sock)

    async def over_grpc() -> None:
        async with AsyncClient(server.grpc_target) as client:
            while True:
                prompt = server.prompt()
                stream = client.generate(prompt, max_tokens=LONG, logprobs=5, **GREEDY)
                counts["streams"] += 1
                try:
                    async with asyncio.timeout(STAY_S):
                        async for _ in stream:
                            await asyncio.sleep(0 if reads else STAY_S)
                except TimeoutError:
                    pass
                finally:
                    await stream.aclose()

    half = NUM_SLOTS // 4
    await asyncio.gather(*(each() for each in (over_http, over_grpc) for _ in range(half)))


async def read_on(server: Server, counts: dict[str, int]) -> None:
    await take_long(server, counts, reads=True)


async def stop_reading(server: Server, counts: dict[str, int]) -> None:
    await take_long(server, counts, reads=False)


async def take_few(
    server: Server, counts: dict[str, int], *, num: int, every_s: float, is_grpc: bool
) -> None:
    """Request `num` tokens and read all of them; over gRPC, or HTTP."""
    await _leave_soon(server, counts, every_s, max_tokens=num, is_grpc=is_grpc)


async def disconnect(server: Server, counts: dict[str, int], *, every_s: float) -> None:
    """A stream is begun, and broken off at its first token."""
    await _leave_soon(server, counts, every_s, max_tokens=LONG)


async def _leave_soon(
    server: Server,
    counts: dict[str, int],
    every_s: float,
    max_tokens: int,
    *,
    is_grpc: bool = False,
) -> None:
    async def over_grpc(client: AsyncClient) -> None:
        stream = client.generate(server.prompt(), max_tokens=max_tokens, **GREEDY)
        await anext(stream)
        if max_tokens < LONG:
            async for _ in stream:
                pass
        await stream.aclose()

    async def over_http() -> None:
        sock = await server.open_http(max_tokens)
        if max_tokens < LONG:
            while await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
                pass
        reset(sock)

    async with AsyncClient(server.grpc_target) as client, asyncio.TaskGroup() as group:
        while True:
            takes_grpc = is_grpc or counts["streams"] % 2
            group.create_task(over_grpc(client) if takes_grpc else over_http())
            counts["streams"] += 1
            await asyncio.sleep(every_s)


async def expire(server: Server, counts: dict[str, int], *, every_s: float) -> None:
    """A call with ten milliseconds to live."""

    async def one(client: AsyncClient) -> None:
        with contextlib.suppress(ClientError):
            await client.complete(server.prompt(), max_tokens=LONG, **GREEDY)

    async with (
        AsyncClient(server.grpc_target, timeout_s=0.01) as client,
        asyncio.TaskGroup() as group,
    ):
        while True:
            group.create_task(one(client))
            counts["streams"] += 1
            await asyncio.sleep(every_s)


Company = Callable[[Server, dict[str, int]], Awaitable[None]]


@dataclass(frozen=True)
class Likewise:
    """Well-behaved calls, as many, each of as many tokens as the worker makes for a bad one."""

    is_grpc: bool = False  # all of them; else every other one


# What the neighbours are compared with: well-behaved requests that are as much work, or no other
# client.
COMPANY: dict[str, tuple[Company | Likewise | None, Company | None]] = {
    "nobody (against nobody: what the host does)": (None, None),
    "clients that do not read (against the same, reading)": (read_on, stop_reading),
    "20 a second disconnect (against as many that end)": (
        Likewise(),
        partial(disconnect, every_s=OFTEN_S),
    ),
    "20 deadlines a second expire (against as many that end)": (
        Likewise(is_grpc=True),
        partial(expire, every_s=OFTEN_S),
    ),
    "2 a second disconnect (against nobody)": (None, partial(disconnect, every_s=SELDOM_S)),
    "2 deadlines a second expire (against nobody)": (None, partial(expire, every_s=SELDOM_S)),
}


async def tokens_of_each(company: Company, server: Server) -> int:
    """How many the worker makes for one of its calls, before it hears that it is over."""
    before = await server.idle()
    async with beside(company, server) as counts:
        await asyncio.sleep(WATCH_S)
    after = await server.idle()
    made = after["num_generated_tokens"] - before["num_generated_tokens"]
    return max(1, round(made / counts["streams"]))


@contextlib.asynccontextmanager
async def beside(company: Company | None, server: Server) -> AsyncIterator[dict[str, int]]:
    counts = {"streams": 0}
    if company is None:
        yield counts
        return
    task = asyncio.ensure_future(company(server, counts))
    try:
        await asyncio.sleep(0.5)
        yield counts
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
