"""An ingress's end of the channel byte by byte: for tests that say what no ingress says."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.channel.framing import connected
from penstock.workers.channel.proof import Proof
from penstock.workers.stats import WorkerInfo


def framed(number: int = 1, **body: Any) -> bytes:
    """Message `number` of a connection, with its length."""
    message = pb.UpMessage(number=number, **body).SerializeToString()
    return struct.pack("<II", len(message), number - 1) + message


async def heard(connection: socket.socket) -> pb.DownMessage | None:
    """The next message, or None once the connection is closed."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < 8 or len(data) < 8 + struct.unpack_from("<I", data)[0]:
        try:
            part = await loop.sock_recv(connection, 1)
        except ConnectionResetError:
            part = b""
        if not part:
            assert not data, "cut off within a message"
            return None
        data += part
    return pb.DownMessage.FromString(data[8:])


def hello(info: WorkerInfo, challenge: bytes, *, token: str | None = None) -> bytes:
    """The framed Hello that answers `challenge`, with the proof for `token` (the worker's)."""
    proof = Proof(token or info.token, own="ingress", peer="worker", epoch=info.epoch)
    body = pb.Hello(ingress_id="raw", nonce=proof.nonce, proof=proof.of_own(challenge))
    return framed(epoch=info.epoch, hello=body)


async def challenged(connection: socket.socket) -> bytes:
    """The nonce that the worker begins with."""
    first = await heard(connection)
    assert first is not None and first.HasField("challenge")
    return first.challenge.nonce


async def greeted(info: WorkerInfo) -> socket.socket:
    """A connection on which Hello has been sent."""
    connection = await connected(info.address)
    said = hello(info, await challenged(connection))
    await asyncio.get_running_loop().sock_sendall(connection, said)
    return connection
