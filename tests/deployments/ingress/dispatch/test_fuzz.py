"""Any bytes and messages on the token path end the connection at most, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.channel.framing import MessageConnection, listening
from penstock.workers.channel.proof import Proof
from penstock.workers.stats import WorkerInfo
from tests.deployments.ingress.dispatch.peers.raw_ingress import framed
from tests.deployments.ingress.dispatch.test_pool import (
    Node,
    alone,
    collect,
    narrow,
    pool_of,
    request,
)
from tests.deployments.waiting import until
from tests.fuzzing import messages

FUZZ = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
EPOCH = 7


@pytest.fixture(scope="module")
def node(model: Any):
    made = Node(model)
    made.thread.start()
    yield made
    made.stop()


@st.composite
def frames(draw: st.DrawFn, kind: type[Any], epoch: int, first: int) -> bytes:
    """Some messages of a connection after its greeting, the last of them perhaps damaged.

    `first`: number of the first frame."""
    sent = b""
    for n in range(draw(st.integers(1, 4))):
        right: dict[str, Any] = {"epoch": st.just(epoch), "number": st.just(n + 2)}
        is_right = draw(st.integers(0, 3)) > 0
        message = draw(messages(kind, **right if is_right else {})).SerializeToString()
        sent += struct.pack("<II", len(message), first + n) + message
    if draw(st.booleans()):
        return sent
    place = draw(st.integers(0, max(0, len(sent) - 1)))
    return sent[:place] + draw(st.binary(max_size=12))


@FUZZ
@given(data=st.data())
def test_a_worker_serves_on_whatever_an_ingress_sends(model, node, run, data):
    """An ingress that has proved itself may send anything: its requests end with it."""
    info = node.channel.info
    sent = data.draw(frames(pb.UpMessage, info.epoch, 1))

    async def scenario() -> list[int]:
        loop = asyncio.get_running_loop()
        async with narrow(info) as connection:
            await loop.sock_sendall(connection, sent)
            async with pool_of(node) as pool:  # the neighbour
                ids, _ = await collect(pool, request(3, max_tokens=4))
        return ids

    assert run(scenario()) == alone(model, request(3, max_tokens=4))
    assert node.thread.alive and node.channel.alive


def test_the_worker_is_left_with_nothing(node, run):
    async def scenario() -> None:
        await until(lambda: node.channel.num_requests == 0, 60)
        await node.is_idle()

    run(scenario())


@FUZZ
@given(sent=st.binary(max_size=64))
def test_a_worker_serves_on_whatever_a_stranger_sends(node, run, sent):
    async def scenario() -> None:
        host, port = node.channel.info.address.split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        await writer.drain()
        writer.close()
        async with pool_of(node):
            pass

    run(scenario())
    assert node.channel.alive


@FUZZ
@given(data=st.data())
def test_an_ingress_lives_on_whatever_a_worker_sends(run, data):
    """After its greeting; the request on the connection ends, or waits for another worker."""
    sent = data.draw(frames(pb.DownMessage, EPOCH, 2))

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        listener, address = listening("127.0.0.1")
        pool = WorkerPool("test", lost_wait_s=0.2)
        info = WorkerInfo(address, EPOCH, "token", 1, "m", 512)
        running = None
        try:
            pool.update([info])
            far, _ = await loop.sock_accept(listener)
            await greet(far, info)
            await until(lambda: pool.num_connected == 1)
            running = asyncio.ensure_future(_all_of(pool))
            await asyncio.sleep(0)
            await loop.sock_sendall(far, sent)
            await asyncio.sleep(0.01)
            far.close()
            listener.close()
            await asyncio.wait([running], timeout=30)
            assert running.done()
            failure = running.exception()
            assert failure is None or isinstance(failure, ServiceError), failure
        finally:
            if running is not None:
                running.cancel()
            listener.close()
            await pool.close()

    run(scenario())


async def greet(connection: socket.socket, info: WorkerInfo) -> None:
    """As the worker of `info` does: two messages, the second with the proof that it is the one."""
    loop = asyncio.get_running_loop()
    proof = Proof(info.token, own="worker", peer="ingress", epoch=info.epoch)
    await loop.sock_sendall(connection, down(0, challenge=pb.Challenge(nonce=proof.nonce)))
    data = b""
    while len(data) < 8 or len(data) < 8 + struct.unpack_from("<I", data)[0]:
        data += await loop.sock_recv(connection, 4096)
    nonce = pb.UpMessage.FromString(data[8 : 8 + struct.unpack_from("<I", data)[0]]).hello.nonce
    welcome = pb.Welcome(model="m", max_model_len=512, proof=proof.of_own(nonce))
    await loop.sock_sendall(connection, down(1, epoch=info.epoch, heard=1, welcome=welcome))


def down(number: int, **body: Any) -> bytes:
    text = pb.DownMessage(**body).SerializeToString()
    return struct.pack("<II", len(text), number) + text


async def _all_of(pool: WorkerPool) -> list[Any]:
    return [delta async for delta in pool.generate(AdmissionRequest(request(1)))]


@FUZZ
@given(pieces=st.lists(st.binary(max_size=40), max_size=6), first=st.booleans())
def test_a_connection_takes_any_bytes_in_any_pieces(run, pieces, first):
    """What it holds is never more than what one message may be."""

    async def scenario() -> list[str]:
        loop = asyncio.get_running_loop()
        near, far = await _pair()
        ended: list[str] = []
        taken: list[pb.UpMessage] = []
        connection = MessageConnection(
            loop,
            near,
            on_message=lambda each: taken.append(pb.UpMessage.FromString(each)),
            on_end=ended.append,
            max_bytes=100,
        )
        with contextlib.suppress(OSError):  # it has ended already
            if first:
                await loop.sock_sendall(far, framed(1))
            for piece in pieces:
                await loop.sock_sendall(far, piece)
                await asyncio.sleep(0)
        far.close()
        await until(lambda: bool(ended))
        assert len(connection._received) <= 108 + (1 << 18)
        return ended

    (why,) = run(scenario())
    assert why


async def _pair() -> tuple[socket.socket, socket.socket]:
    loop = asyncio.get_running_loop()
    listener, address = listening("127.0.0.1")
    with listener:
        host, port = address.split(":")
        near = socket.socket()
        near.setblocking(False)
        await loop.sock_connect(near, (host, int(port)))
        far, _ = await loop.sock_accept(listener)
    far.setblocking(False)
    return near, far
