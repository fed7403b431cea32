"""A connection to a peer that never reads: what is buffered for it is bounded."""

from __future__ import annotations

import asyncio
import socket

from penstock.workers.channel.framing import (
    MAX_UNSENT_BYTES,
    MessageConnection,
    connected,
    listening,
)

MESSAGE = bytes(1 << 16)


async def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection whose far end takes in little."""
    listener, address = listening("127.0.0.1")
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # accepted ones inherit it
        near = await connected(address)
        far, _ = await asyncio.get_running_loop().sock_accept(listener)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    far.setblocking(False)
    return near, far


async def end_of(max_unsent_bytes: int, message: bytes) -> tuple[int, int, str]:
    """Messages that were taken, most bytes that were buffered, and why the connection ended."""
    near, far = await tcp_pair()
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    connection = MessageConnection(
        asyncio.get_running_loop(),
        near,
        on_message=lambda _: None,
        on_end=ended.set_result,
        max_unsent_bytes=max_unsent_bytes,
    )
    num_sent, most = 0, 0
    with far:
        async with asyncio.timeout(60):
            while not ended.done():
                connection.send(message)
                most = max(most, connection.num_unsent_bytes)
                num_sent += 1
                await asyncio.sleep(0)
    return num_sent, most, ended.result()


def test_a_peer_that_never_reads_is_cut_off_at_the_limit():
    num_sent, most, why = asyncio.run(end_of(1 << 20, MESSAGE))
    assert why == "the other end does not read what is sent to it"
    assert (1 << 20) - 2 * len(MESSAGE) < most <= 1 << 20 and num_sent < 64


def test_sending_on_between_the_limit_and_the_end_grows_nothing():
    """The sender is another thread: the end comes a turn of the loop later."""

    async def scenario() -> int:
        near, far = await tcp_pair()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[str] = loop.create_future()
        connection = MessageConnection(
            loop, near, on_message=lambda _: None, on_end=ended.set_result
        )
        with far:
            for _ in range(2 * MAX_UNSENT_BYTES // len(MESSAGE)):  # in one turn
                connection.send(MESSAGE)
            size = connection.num_unsent_bytes
            await asyncio.wait_for(ended, 60)
        return size

    assert asyncio.run(scenario()) <= MAX_UNSENT_BYTES


def test_one_message_may_be_larger_than_the_limit():
    async def scenario() -> bytes:
        near, far = await tcp_pair()
        loop = asyncio.get_running_loop()
        connection = MessageConnection(
            loop, near, on_message=lambda _: None, on_end=lambda _: None, max_unsent_bytes=1000
        )
        connection.send(MESSAGE * 16)
        received = bytearray()
        async with asyncio.timeout(60):
            while len(received) < 8 + 16 * len(MESSAGE):
                received += await loop.sock_recv(far, 1 << 18)
        connection.end("done")
        far.close()
        return bytes(received[8:])

    assert asyncio.run(scenario()) == MESSAGE * 16
