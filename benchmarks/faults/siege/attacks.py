"""Hostile clients: each an endless coroutine that counts what it sent and how it was answered.

Counted by attack and outcome: an HTTP status, a gRPC status, `closed` (the server ended the
connection), `held` (a connection that is open and silent). What a server may not do, answer
500 or hang, is under its own outcome and fails the run.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio

from benchmarks.faults.siege import wire
from benchmarks.faults.table.hostile import GOOD, hostile_bodies
from penstock.deployments.ingress.grpc import inference
from penstock.protos.penstock.v1 import inference_pb2 as pb

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GENERATE = f"/{inference.SERVICE}/Generate"
BOMB = gzip.compress(bytes(32 << 20), 9)
PIPELINED = 6  # requests that are sent before the first answer is read
RESETS = 100  # streams of HTTP/2 that are opened and reset in one write
STREAMS_A_CONNECTION = 5000


@dataclass
class Siege:
    """What the attacks of one process share.

    rate: requests a second of this process, over all attacks, each of which has its share of it.
    counts: by (attack, outcome).
    """

    host: str
    http_port: int
    grpc_port: int
    key: str
    rate: float
    rng: random.Random
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _due_s: dict[str, float] = field(default_factory=dict)

    async def pace(self, attack: str, num: int) -> None:
        """Wait until `num` more requests are within the share of the attack."""
        now_s = time.monotonic()
        late_s = max(self._due_s.get(attack, 0.0), now_s - 1.0)
        due_s = self._due_s[attack] = late_s + num / (self.rate * ATTACKS[attack].share)
        await asyncio.sleep(max(0.0, due_s - now_s))

    def count(self, attack: str, outcome: str | int, num: int = 1) -> None:
        self.counts[attack, str(outcome)] += num


Attack = Callable[[Siege, str], Awaitable[None]]


async def wrong_keys(siege: Siege, name: str) -> None:
    body = json.dumps({**GOOD, "prompt": "x" * 200}).encode()

    def request() -> bytes:
        key = siege.rng.choice(
            ["", "none", siege.key[:-1], siege.key + "x", f"{siege.rng.random()}"]
        )
        path = siege.rng.choice([COMPLETIONS, CHAT, "/v1/models", "/v1/penstock/status"])
        return wire.post(path, body, key)

    await _pipelined(siege, name, request)


async def bad_bodies(siege: Siege, name: str) -> None:
    bodies = hostile_bodies(siege.rng, 1 << 60)

    def request() -> bytes:
        _, content = next(bodies)
        return wire.post(siege.rng.choice([COMPLETIONS, CHAT]), content[:4096], siege.key)

    await _pipelined(siege, name, request)


async def mutated_bodies(siege: Siege, name: str) -> None:
    """Good bodies with some bytes changed: a few are still good, and are answered."""
    good = json.dumps({**GOOD, "max_tokens": 1, "stop": ["x"], "logit_bias": {"5": 1.5}}).encode()

    def request() -> bytes:
        body = bytearray(good)
        for _ in range(siege.rng.randrange(1, 6)):
            body[siege.rng.randrange(len(body))] = siege.rng.randrange(256)
        return wire.post(COMPLETIONS, bytes(body), siege.key)

    await _pipelined(siege, name, request)


async def _pipelined(siege: Siege, name: str, request: Callable[[], bytes]) -> None:
    while True:
        try:
            connection = await wire.Connection.open(siege.host, siege.http_port)
        except OSError:
            siege.count(name, "closed")
            await asyncio.sleep(0.1)
            continue
        try:
            while True:
                await siege.pace(name, PIPELINED)
                await connection.send(b"".join(request() for _ in range(PIPELINED)))
                for _ in range(PIPELINED):
                    siege.count(name, await connection.answer())
        except (OSError, EOFError):
            siege.count(name, "closed")
        except TimeoutError:
            siege.count(name, "HANGS")
        finally:
            connection.close()


async def bad_heads(siege: Siege, name: str) -> None:
    """Heads that are too long, have too many fields, or are none; a connection for each."""
    while True:
        await siege.pace(name, 1)
        content = siege.rng.choice(
            [
                b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
                b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 4000 + b"\r\n",
                b"GET / HTTP/1.1\r\nhost: " + b"x" * 40_000 + b"\r\n\r\n",
                siege.rng.randbytes(2000),
                b"POST / HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
                b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
                b"GET / HTTP/9.9\r\n\r\n",
            ]
        )
        await _once(siege, name, content)


async def gzip_bombs(siege: Siege, name: str) -> None:
    while True:
        await siege.pace(name, 1)
        request = wire.post(COMPLETIONS, BOMB, siege.key, {"content-encoding": "gzip"})
        await _once(siege, name, request)
        await asyncio.sleep(0.05)


async def _once(siege: Siege, name: str, request: bytes) -> None:
    try:
        connection = await wire.Connection.open(siege.host, siege.http_port)
    except OSError:
        siege.count(name, "closed")
        return
    try:
        await connection.send(request)
        siege.count(name, await connection.answer())
    except (OSError, EOFError):
        siege.count(name, "closed")
    except TimeoutError:
        siege.count(name, "HANGS")
    finally:
        connection.close()


async def slow_heads(siege: Siege, name: str) -> None:
    """One byte of a head a second, until the server has enough of it."""
    while True:
        await siege.pace(name, 1)
        try:
            connection = await wire.Connection.open(siege.host, siege.http_port, _source(siege))
            for byte in b"GET / HTTP/1.1\r\nhost: " + b"x" * 1000:
                await connection.send(bytes([byte]))
                await asyncio.sleep(1.0)
            siege.count(name, "HANGS")
        except OSError:
            siege.count(name, "closed")
        finally:
            connection.close()


async def slow_bodies(siege: Siege, name: str) -> None:
    """A body that was announced and does not come."""
    request = wire.post(COMPLETIONS, b"x" * 100_000, siege.key)[:-99_000]
    while True:
        await siege.pace(name, 1)
        await _once(siege, name, request)


async def unread_streams(siege: Siege, name: str) -> None:
    """Streams whose client reads nothing."""
    body = {**GOOD, "stream": True, "max_tokens": 64, "ignore_eos": True}
    while True:
        await siege.pace(name, 1)
        try:
            connection = await wire.Connection.open(siege.host, siege.http_port)
            await connection.send(wire.post(COMPLETIONS, json.dumps(body).encode(), siege.key))
            siege.count(name, "held")
            await asyncio.sleep(2.0)
            connection.close()
        except OSError:
            siege.count(name, "closed")


async def rapid_resets(siege: Siege, name: str) -> None:
    """Streams of HTTP/2 that are reset as soon as they are opened (CVE-2023-44487)."""
    fields = {":method": "POST", ":scheme": "http", ":path": GENERATE, ":authority": "x"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    block = wire.header_block({**fields, "authorization": f"Bearer {siege.key}"})
    while True:
        try:
            connection = await wire.Connection.open(siege.host, siege.grpc_port)
            await connection.send(wire.PREFACE + wire.frame(wire.SETTINGS, 0, 0, b""))
            for first in range(1, 2 * STREAMS_A_CONNECTION, 2 * RESETS):
                await siege.pace(name, RESETS)
                ids = range(first, first + 2 * RESETS, 2)
                reset = wire.CANCEL.to_bytes(4, "big")
                await connection.send(
                    b"".join(
                        wire.frame(wire.HEADERS, wire.END_HEADERS, each, block)
                        + wire.frame(wire.RST_STREAM, 0, each, reset)
                        for each in ids
                    )
                )
                siege.count(name, "reset", RESETS)
        except OSError:
            siege.count(name, "closed")
            await asyncio.sleep(0.2)
        finally:
            connection.close()


async def mutated_messages(siege: Siege, name: str) -> None:
    """Messages of gRPC with some bytes changed."""
    good = pb.GenerateRequest(text="It was", sampling=pb.SamplingParams(max_tokens=1, seed=5))
    content = good.SerializeToString()
    metadata = [("authorization", f"Bearer {siege.key}")]
    async with grpc.aio.insecure_channel(f"{siege.host}:{siege.grpc_port}") as channel:
        method = channel.unary_stream(GENERATE)
        while True:
            await siege.pace(name, 1)
            body = bytearray(content)
            for _ in range(siege.rng.randrange(1, 4)):
                body[siege.rng.randrange(len(body))] = siege.rng.randrange(256)
            try:
                async for _ in method(bytes(body), metadata=metadata, timeout=wire.ANSWER_S):
                    pass
                siege.count(name, "OK")
            except grpc.aio.AioRpcError as error:
                siege.count(name, error.code().name)


async def silent_connections(siege: Siege, name: str) -> None:
    """A connection that says nothing; a new one once it was closed."""
    while True:
        try:
            source = _source(siege)
            connection = await wire.Connection.open(siege.host, siege.http_port, source)
        except OSError:
            siege.count(name, "closed")
            await asyncio.sleep(1.0)
            continue
        siege.counts[name, "open now"] += 1
        try:
            await connection.answer()
        except (OSError, EOFError, TimeoutError):
            siege.count(name, "closed")
        finally:
            siege.counts[name, "open now"] -= 1
            connection.close()


def _source(siege: Siege) -> str:
    """One of many addresses of this machine: as from many clients."""
    return f"127.0.{siege.rng.randrange(1, 4)}.{siege.rng.randrange(1, 255)}"


@dataclass(frozen=True)
class Part:
    """number: how many of it run at a time. share: of the requests of all."""

    attack: Attack
    number: int
    share: float


ATTACKS: dict[str, Part] = {
    "wrong keys": Part(wrong_keys, 4, 0.30),
    "bad bodies": Part(bad_bodies, 4, 0.16),
    "mutated bodies": Part(mutated_bodies, 2, 0.08),
    "bad heads": Part(bad_heads, 8, 0.10),
    "gzip bombs": Part(gzip_bombs, 1, 0.002),
    "slow heads": Part(slow_heads, 200, 0.008),
    "slow bodies": Part(slow_bodies, 100, 0.01),
    "unread streams": Part(unread_streams, 4, 0.002),
    "rapid resets": Part(rapid_resets, 1, 0.30),
    "mutated messages": Part(mutated_messages, 4, 0.04),
}
