"""Messages over a connection: whole, in order, each once; else the connection ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from penstock.workers.channel.framing import HEADER, MessageConnection


class End:
    """A MessageConnection, what came, and why it ended."""

    def __init__(self, connection: socket.socket):
        self.messages: list[bytes] = []
        self.reasons: list[str] = []
        self.connection = MessageConnection(
            asyncio.get_running_loop(),
            connection,
            on_message=self.messages.append,
            on_end=self.reasons.append,
        )


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def received(*frames: tuple[int, bytes]) -> tuple[list[bytes], list[str]]:
    """What one end gets of frames with such numbers, and why it ended."""

    async def scenario() -> tuple[list[bytes], list[str]]:
        ours, theirs = pair()
        end = End(theirs)
        ours.sendall(b"".join(HEADER.pack(len(each), number) + each for number, each in frames))
        ours.close()
        await until(lambda: end.reasons)
        return end.messages, end.reasons

    return asyncio.run(scenario())


def test_messages_arrive_whole_and_in_order() -> None:
    async def scenario() -> list[bytes]:
        one, other = (End(each) for each in pair())
        sent = [bytes([n % 256]) * (n * 37 % 5000) for n in range(2000)]
        for message in sent:
            one.connection.send(message)
        await until(lambda: len(other.messages) == len(sent))
        assert other.messages == sent
        other.connection.send(b"and back")  # each direction has numbers of its own
        await until(lambda: one.messages)
        one.connection.end("enough")
        await until(lambda: other.reasons)
        return one.messages

    assert asyncio.run(scenario()) == [b"and back"]


@pytest.mark.parametrize(
    ("numbers", "num_taken"),
    [((0, 1, 1, 2), 2), ((0, 2), 1), ((0, 1, 0), 2), ((1,), 0), ((0, 1, 2), 3)],
)
def test_a_message_that_is_not_the_next_one_ends_the_connection(
    numbers: tuple[int, ...], num_taken: int
) -> None:
    messages, (reason,) = received(*((number, b"m%d" % number) for number in numbers))
    assert messages == [b"m%d" % number for number in numbers[:num_taken]]
    is_whole = num_taken == len(numbers)
    assert reason == ("the other end closed it" if is_whole else reason)
    assert ("was lost, or an earlier one repeated" in reason) is not is_whole


def test_numbers_begin_again_after_four_billion() -> None:
    async def scenario() -> list[bytes]:
        one, other = (End(each) for each in pair())
        one.connection._num_sent = other.connection._num_received = 2**32 - 1
        for message in (b"a", b"b", b"c"):
            one.connection.send(message)
        await until(lambda: len(other.messages) == 3 or other.reasons)
        return other.messages

    assert asyncio.run(scenario()) == [b"a", b"b", b"c"]
