"""Bounds of one HTTP connection, over real sockets: sizes, times, and how many there may be."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
import pytest
import uvicorn

from penstock.deployments.ingress.core.bounds.connections import Connections
from penstock.deployments.ingress.http.listener import protocol
from penstock.deployments.ingress.http.listener.protocol import HttpLimits, bounded_protocol
from tests.deployments.waiting import undisturbed, until

QUICK = HttpLimits(head_s=0.4, body_gap_s=0.3, body_s=1.2, write_s=0.5)


@dataclass
class Served:
    port: int
    connections: Connections
    errors: Counter[str] = field(default_factory=Counter)
    bodies: list[int] = field(default_factory=list)


async def _app(served: Served, scope: Any, receive: Any, send: Any) -> None:
    """Reads the body, and answers with its size; /big: with 64 MB; /early: before the body; /slow:
    after a second; /known: with a content-length."""
    num_bytes = 0
    while scope["path"] != "/early":
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    served.bodies.append(num_bytes)
    if scope["path"] == "/slow":
        await asyncio.sleep(1.0)
    text = b"%d bytes" % num_bytes
    headers = [(b"content-length", b"%d" % len(text))] if scope["path"] == "/known" else []
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if scope["path"] == "/big":
        for _ in range(64):
            await send({"type": "http.response.body", "body": b"x" * 2**20, "more_body": True})
    await send({"type": "http.response.body", "body": text})


@contextlib.asynccontextmanager
async def serving(
    limits: HttpLimits | None = None, most: int = 1000, per_address: int | None = None
) -> AsyncIterator[Served]:
    listener = socket.create_server(("127.0.0.1", 0))
    served = Served(listener.getsockname()[1], Connections(most, per_address or most))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await _app(served, scope, receive, send)

    config = uvicorn.Config(
        app,
        http=bounded_protocol(served.connections, served.errors, limits),
        ws="none",
        lifespan="off",
        log_config=None,
    )
    server = uvicorn.Server(config)
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        yield served
    finally:
        server.should_exit = server.force_exit = True
        await task


class Peer:
    """A client's socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def status(self) -> int | None:
        """Of the next answer, which is read whole; None: the connection has ended."""
        try:
            head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        lines = head.decode().split("\r\n")
        length = next((int(x[15:]) for x in lines if x.lower().startswith("content-length:")), None)
        if length is not None:
            await self.reader.readexactly(length)
        else:
            await self.reader.readuntil(b"0\r\n\r\n")
        return int(lines[0].split()[1])

    async def ended(self, within_s: float = 10.0) -> bool:
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(self.reader.read(1), within_s) == b""
        return True


def has_busy(served: Served, num: int) -> bool:
    """Whether `num` connections are in the middle of a request."""
    return served.connections.num - len(served.connections._idle) == num


async def peer_of(served: Served) -> Peer:
    return Peer(*await asyncio.open_connection("127.0.0.1", served.port))


HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (HEAD + b"a: b\r\n" * 100 + b"\r\n", 431, "head_too_large"),
        (HEAD + b"a: " + b"b" * 17_000 + b"\r\n\r\n", 431, "head_too_large"),
        (HEAD + b"a" * 40_000, 431, "head_too_large"),  # a header that does not end
        (b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414, "url_too_long"),
        (b"GET /" + b"a" * 90_000, 414, "url_too_long"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400, "invalid_http"),  # TLS
        (
            HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx-trailer: y\r\n\r\n",
            400,
            "invalid_http",
        ),
    ],
)
def test_what_is_too_large_or_wrong_is_refused_and_the_connection_closed(sent, status, code):
    async def scenario() -> None:
        async with serving() as served:
            peer = await peer_of(served)
            await peer.send(sent)
            assert await peer.status() == status
            assert await peer.ended()
            assert served.errors == {code: 1} and served.bodies == []
            other = await peer_of(served)
            await other.send(HEAD + b"content-length: 2\r\n\r\nok")
            assert await other.status() == 200

    asyncio.run(scenario())


def test_a_head_at_the_limits_passes_however_it_is_cut():
    head = b"GET /" + b"u" * 4000 + b" HTTP/1.1\r\nhost: x\r\n"
    head += b"".join(b"h%d: %s\r\n" % (n, b"v" * 80) for n in range(98)) + b"\r\n"

    async def scenario() -> None:
        async with serving() as served:
            for size in (1, 7, 4096, len(head)):
                peer = await peer_of(served)
                for at in range(0, len(head), size):
                    await peer.send(head[at : at + size])
                    if size > 1:
                        await asyncio.sleep(0)
                assert await peer.status() == 200
                await peer.send(head)  # the connection is kept, and the counts begin anew
                assert await peer.status() == 200

    asyncio.run(scenario())


def test_memory_does_not_grow_with_a_head_that_does_not_end():
    """16 MiB of 4-byte headers took 480 MiB, and no key was asked for."""

    def send_for_ever(port: int) -> int:
        """Bytes that the server took, of 64 MiB at most."""
        num_sent = 0
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(HEAD)
            with contextlib.suppress(ConnectionError):
                while num_sent < 64 << 20:
                    num_sent += connection.send(b"a:\r\n" * 65_536)
        return num_sent

    async def scenario() -> tuple[list[int], int]:
        async with serving() as served:
            before = psutil.Process().memory_info().rss
            sent = [await asyncio.to_thread(send_for_ever, served.port) for _ in range(4)]
            return sent, psutil.Process().memory_info().rss - before

    sent, grown = asyncio.run(scenario())
    assert max(sent) < 16 << 20  # what buffers of sockets hold
    assert grown < 32 << 20


def test_a_body_may_pause_for_the_gap_and_no_longer():
    """It was looked at once each gap, so that a pause could take nearly two of them."""
    limits = HttpLimits(body_gap_s=2.0)

    async def scenario() -> tuple[float, int | None, int | None]:
        async with serving(limits) as served:
            stalled, resumed = await peer_of(served), await peer_of(served)
            for each in (stalled, resumed):
                await each.send(HEAD + b"content-length: 4\r\n\r\nab")
            began_s = asyncio.get_running_loop().time()
            await asyncio.sleep(1.5)
            await resumed.send(b"c")
            late = await stalled.status()
            took_s = asyncio.get_running_loop().time() - began_s
            await resumed.send(b"d")
            return took_s, late, await resumed.status()

    took_s, late, in_time = undisturbed(lambda: asyncio.run(scenario()), 0.3)
    assert late == 408 and in_time == 200
    assert 1.9 < took_s < 3.8  # the bound of the server, and not two of them


def test_silent_half_and_slow_requests_end_in_time():
    async def scenario() -> None:
        async with serving(QUICK) as served:
            silent, half, slow = [await peer_of(served) for _ in range(3)]
            await half.send(HEAD)
            await slow.send(HEAD + b"content-length: 1000\r\n\r\nabc")
            assert await silent.ended(2) and await half.status() == 408
            assert await slow.status() == 408
            drip = await peer_of(served)
            await drip.send(HEAD + b"content-length: 1000\r\n\r\n")

            async def one_byte_at_a_time() -> None:
                while True:
                    await drip.send(b"x")
                    await asyncio.sleep(0.05)

            dripping = asyncio.ensure_future(one_byte_at_a_time())
            assert await asyncio.wait_for(drip.status(), 5) == 408
            dripping.cancel()
            byte_head = await peer_of(served)
            began_s = asyncio.get_running_loop().time()
            for byte in HEAD[:6]:  # each byte comes in time, the head does not
                await byte_head.send(bytes([byte]))
                await asyncio.sleep(0.05)
            assert await byte_head.status() == 408
            assert asyncio.get_running_loop().time() - began_s < 0.6
            assert served.errors["request_timeout"] == 5 and served.connections.num == 0

    undisturbed(lambda: asyncio.run(scenario()))


def test_a_body_that_comes_steadily_and_a_kept_connection_are_let_be():
    async def scenario() -> None:
        async with serving(QUICK) as served:
            peer = await peer_of(served)
            await peer.send(HEAD + b"content-length: 8\r\n\r\n")
            for _ in range(8):
                await peer.send(b"x")
                await asyncio.sleep(0.1)  # 0.8 s: longer than a head may take, and than a gap
            assert await peer.status() == 200
            await asyncio.sleep(0.6)  # idle for longer than a head may take
            await peer.send(HEAD + b"content-length: 2\r\n\r\nok")
            assert await peer.status() == 200
            assert not served.errors

    undisturbed(lambda: asyncio.run(scenario()))


def test_an_empty_line_after_the_body_does_not_end_the_answer():
    async def scenario() -> None:
        async with serving(QUICK) as served:
            peer = await peer_of(served)
            await peer.send(b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nok\r\n")
            await asyncio.sleep(0.1)
            await peer.send(b"\r\n")  # another one, by itself
            assert await peer.status() == 200  # after 1 s: a head may take 0.4
            await asyncio.sleep(0.6)
            await peer.send(HEAD + b"content-length: 2\r\n\r\nok")
            assert await peer.status() == 200 and not served.errors

    undisturbed(lambda: asyncio.run(scenario()), 0.2)


def test_after_an_early_answer_a_body_that_stops_ends_the_connection_without_another():
    async def scenario() -> None:
        async with serving(QUICK) as served:
            peer = await peer_of(served)
            await peer.send(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nabc")
            assert await peer.status() == 200
            assert await peer.status() is None

    asyncio.run(scenario())


def test_a_client_that_reads_nothing_of_its_answer_is_left():
    async def scenario() -> None:
        async with serving(QUICK) as served:
            connection = socket.create_connection(("127.0.0.1", served.port))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(b"GET /big HTTP/1.1\r\nhost: x\r\n\r\n")
            await until(lambda: served.errors["client_too_slow"])
            await until(lambda: served.connections.num == 0)
            connection.close()

    asyncio.run(scenario())


def test_many_pipelined_requests_are_refused_and_a_few_answered_in_order():
    one = HEAD + b"content-length: 1\r\n\r\n"

    async def scenario() -> None:
        async with serving() as served:
            peer = await peer_of(served)
            await peer.send(b"".join(one + b"x" for _ in range(4)))
            assert [await peer.status() for _ in range(4)] == [200] * 4
            many = await peer_of(served)
            await many.send((one + b"x") * 2000)
            while await many.status() is not None:
                pass
            assert served.errors["invalid_http"] == 1 and len(served.bodies) < 20

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/", "/big"])
def test_an_answer_of_unknown_length_ends_with_the_connection_of_an_http_1_0_client(path):
    """Which knows no chunks (RFC 9112, 6.3 and 7.1)."""

    async def scenario() -> bytes:
        async with serving() as served:
            peer = await peer_of(served)
            await peer.send(b"GET %b HTTP/1.0\r\nconnection: keep-alive\r\n\r\n" % path.encode())
            return await asyncio.wait_for(peer.reader.read(-1), 30)

    head, _, body = asyncio.run(scenario()).partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert not any(line.startswith(b"transfer-encoding") for line in lines)
    assert b"connection: close" in lines
    assert body == b"x" * (2**26 if path == "/big" else 0) + b"0 bytes"


def test_a_length_that_is_known_is_told_to_an_http_1_0_client_too():
    """And it is not told to go on, whatever it expects (RFC 9110, 10.1.1)."""

    async def scenario() -> bytes:
        async with serving() as served:
            peer = await peer_of(served)
            await peer.send(b"GET /known HTTP/1.0\r\nexpect: 100-continue\r\n\r\n")
            return await asyncio.wait_for(peer.reader.read(-1), 30)

    head, _, body = asyncio.run(scenario()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"content-length: 7" in head and b"transfer-encoding" not in head
    assert body == b"0 bytes"


def test_idle_connections_make_room_for_new_ones():
    """Before, 60 idle connections used up the descriptors, and no client could connect."""

    async def scenario() -> None:
        async with serving(most=16) as served:
            busy = await peer_of(served)
            await busy.send(HEAD + b"content-length: 2\r\n\r\no")  # half a body: it is not idle
            await until(partial(has_busy, served, 1))
            idle = [await peer_of(served) for _ in range(60)]
            new = await peer_of(served)
            await new.send(HEAD + b"content-length: 2\r\n\r\nok")
            assert await new.status() == 200
            await busy.send(b"k")
            assert await busy.status() == 200
            assert await idle[0].ended() and served.connections.num <= 16
            assert served.connections.num_evicted >= 45

    asyncio.run(scenario())


def test_the_bounds_of_an_idle_connection_take_half_a_kilobyte():
    """With a hash table for the attributes of each connection they took 1.6 KiB."""
    num = 200

    async def scenario() -> int:
        async with serving() as served:
            tracemalloc.start()
            silent = [await peer_of(served) for _ in range(num)]
            while served.connections.num < len(silent):
                await asyncio.sleep(0.01)
            taken = tracemalloc.take_snapshot()
            tracemalloc.stop()
        mine = taken.filter_traces([tracemalloc.Filter(True, protocol.__file__)])
        return sum(each.size for each in mine.traces)

    assert asyncio.run(scenario()) < 512 * num


def test_one_address_has_no_more_than_its_share():
    async def scenario() -> None:
        async with serving(most=16, per_address=4) as served:
            peers = []
            for most in (1, 2, 3, 4, 4, 4):
                peers.append(await peer_of(served))
                await peers[-1].send(HEAD + b"content-length: 2\r\n\r\no")
                await until(partial(has_busy, served, most))
            assert [await each.ended() for each in peers[4:]] == [True, True]
            await peers[0].send(b"k")
            assert await peers[0].status() == 200
            assert served.connections.num == 4 and served.connections.num_refused == 2

    asyncio.run(scenario())
