"""The fault proxy on raw sockets: what each end sees of each fault."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.faults.proxy import HEADER, Programme, Proxy, proxy
from penstock.workers.channel import framing

SOON_S = 30.0


@dataclass
class Ends:
    """Both ends of one connection through a proxy: the client's, and that of the target."""

    relay: Proxy
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    target: tuple[asyncio.StreamReader, asyncio.StreamWriter]

    async def up(self, data: bytes, num: int | None = None) -> bytes:
        """What the target gets of `data`."""
        self.client[1].write(data)
        return await asyncio.wait_for(
            self.target[0].readexactly(len(data) if num is None else num), SOON_S
        )

    async def down(self, data: bytes) -> bytes:
        self.target[1].write(data)
        return await asyncio.wait_for(self.client[0].readexactly(len(data)), SOON_S)


@contextlib.asynccontextmanager
async def ends() -> AsyncIterator[Ends]:
    arrived: asyncio.Queue[Any] = asyncio.Queue()
    server = await asyncio.start_server(lambda *both: arrived.put_nowait(both), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with proxy(f"{host}:{port}") as relay:
        client = await asyncio.open_connection("127.0.0.1", relay.port)
        made = Ends(relay, client, await asyncio.wait_for(arrived.get(), SOON_S))
        yield made
    for _, writer in (made.client, made.target):
        writer.transport.abort()
    server.close()


def tried(scenario: Callable[[Ends], Coroutine[Any, Any, Any]]) -> Any:
    async def whole() -> Any:
        async with ends() as made:
            return await scenario(made)

    return asyncio.run(asyncio.wait_for(whole(), 120))


async def nothing(reader: asyncio.StreamReader, within_s: float = 0.2) -> bool:
    """Whether nothing comes, not even an end."""
    try:
        await asyncio.wait_for(reader.read(1), within_s)
    except TimeoutError:
        return True
    return False


def test_bytes_pass_both_ways_whole() -> None:
    async def scenario(made: Ends) -> None:
        data = bytes(range(256)) * 4000
        assert await made.up(data) == data
        assert await made.down(data) == data
        assert made.relay.num_bytes == {"up": len(data), "down": len(data)}
        made.client[1].write_eof()
        assert await asyncio.wait_for(made.target[0].read(), SOON_S) == b""
        assert await made.down(b"still") == b"still"  # half-closed

    tried(scenario)


def test_a_delay_keeps_the_order_and_is_one_way() -> None:
    async def scenario(made: Ends) -> None:
        made.relay.set("up", Programme(delay_s=0.1, jitter_s=0.1))
        began_s = time.monotonic()
        for n in range(20):
            made.client[1].write(bytes([n]))
            await asyncio.sleep(0.005)
        assert await made.up(b"", 20) == bytes(range(20))
        assert time.monotonic() - began_s >= 0.1
        began_s = time.monotonic()
        await made.down(b"x")
        assert time.monotonic() - began_s < 0.1

    tried(scenario)


def test_what_is_swallowed_never_comes_and_what_is_stalled_comes_later() -> None:
    async def scenario(made: Ends) -> None:
        made.relay.set("up", Programme("swallow"))
        made.client[1].write(b"gone")
        assert await nothing(made.target[0])
        assert await made.down(b"back") == b"back"  # one way only
        made.relay.heal()
        made.relay.set("down", Programme("stall"))
        await asyncio.sleep(0.05)
        made.target[1].write(b"late")
        assert await nothing(made.client[0])
        made.relay.heal()
        assert await asyncio.wait_for(made.client[0].readexactly(4), SOON_S) == b"late"
        assert await made.up(b"and on") == b"and on"

    tried(scenario)


def test_a_stalled_direction_fills_the_window_of_its_sender() -> None:
    async def scenario(made: Ends) -> None:
        made.relay.set("up", Programme("stall"))
        made.client[1].write(b"x" * (64 << 20))
        await asyncio.sleep(0.3)
        assert made.client[1].transport.get_write_buffer_size() > 32 << 20
        assert made.relay.num_bytes["up"] == 0

    tried(scenario)


def test_a_cut_falls_within_a_message_and_both_ends_see_a_reset() -> None:
    async def scenario(made: Ends) -> None:
        made.relay.set("down", Programme(cut_at=7))
        made.target[1].write(b"ab")
        await asyncio.sleep(0.05)
        made.target[1].write(b"cdefghijkl")
        assert await asyncio.wait_for(made.client[0].readexactly(7), SOON_S) == b"abcdefg"
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(made.client[0].readexactly(1), SOON_S)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(made.target[0].readexactly(1), SOON_S)
        assert made.relay.programmes["down"] == Programme()  # later connections pass

    tried(scenario)


def test_reset_and_fin_are_told_apart() -> None:
    async def finished(made: Ends) -> None:
        made.relay.finish("down")
        assert await asyncio.wait_for(made.client[0].read(), SOON_S) == b""
        assert await made.up(b"still") == b"still"

    async def cut(made: Ends) -> None:
        made.relay.cut()
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(made.client[0].readexactly(1), SOON_S)

    tried(finished)
    tried(cut)


def test_a_closed_port_refuses_and_opens_again_while_open_connections_stay() -> None:
    async def scenario(made: Ends) -> None:
        made.relay.refuse()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", made.relay.port)
        assert await made.up(b"open") == b"open"
        await made.relay.listen()
        made.relay.accept_late_s = 0.2
        _, writer = await asyncio.open_connection("127.0.0.1", made.relay.port)
        await asyncio.sleep(0.05)
        assert made.relay.num_open == 1
        async with asyncio.timeout(SOON_S):
            while made.relay.num_open < 2:
                await asyncio.sleep(0.01)
        writer.transport.abort()

    tried(scenario)


def test_a_detached_client_sees_a_reset_and_the_target_gets_its_bytes_late() -> None:
    async def scenario(made: Ends) -> None:
        made.relay.set("up", Programme(delay_s=0.3))
        made.client[1].write(b"of the old one")
        await asyncio.sleep(0.05)
        made.relay.detach()
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(made.client[0].readexactly(1), SOON_S)
        assert await nothing(made.target[0], 0.1)
        arrived = await asyncio.wait_for(made.target[0].readexactly(14), SOON_S)
        assert arrived == b"of the old one"
        assert await nothing(made.target[0])  # nor an end, until it heals
        made.relay.heal()
        assert await asyncio.wait_for(made.target[0].read(), SOON_S) == b""

    tried(scenario)


def test_messages_are_repeated_and_withheld_whole() -> None:
    def framed(*messages: tuple[int, bytes]) -> bytes:
        return b"".join(HEADER.pack(len(each), number) + each for number, each in messages)

    def sent(frame: bytes) -> list[bytes]:
        message = frame[HEADER.size :]
        return {b"twice": [frame, frame], b"never": []}.get(message, [frame])

    async def scenario(made: Ends) -> None:
        made.relay.set("up", Programme(frames=sent))
        data = framed((0, b"once"), (1, b"twice"), (2, b"never"), (3, b"last"))
        expected = framed((0, b"once"), (1, b"twice"), (1, b"twice"), (3, b"last"))
        for byte in data:  # in whatever pieces they come
            made.client[1].write(bytes([byte]))
            await asyncio.sleep(0.001)
        assert await made.up(b"", len(expected)) == expected

    tried(scenario)


def test_headers_are_those_of_the_token_channel() -> None:
    assert framing.HEADER.format == HEADER.format
