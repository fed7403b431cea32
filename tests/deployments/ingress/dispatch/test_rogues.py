"""What is no worker, and what is no ingress, learns nothing on the channel and changes nothing.

Without TLS: who reads the network sees prompts all the same (test_encrypted_links.py).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable

import pytest

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.channel import unproven
from penstock.workers.channel.framing import HEADER, connected
from penstock.workers.channel.unproven import MAX_UNPROVEN
from penstock.workers.request import FinishReason
from penstock.workers.stats import WorkerInfo
from tests.deployments.ingress.dispatch.peers.raw_ingress import challenged, framed, heard, hello
from tests.deployments.ingress.dispatch.peers.relay import Relay
from tests.deployments.ingress.dispatch.test_pool import Node, alone, collect, pool_of, request
from tests.deployments.waiting import until


class Rogue:
    """Listens where a worker was, and says what it is told to."""

    def __init__(self, info: WorkerInfo, answers: Callable[[pb.UpMessage], list[pb.DownMessage]]):
        self.info, self._answers = info, answers
        self.heard = b""
        self.messages: list[pb.UpMessage] = []
        self.num_connections = 0

    async def __aenter__(self) -> Rogue:
        host, _, port = self.info.address.rpartition(":")
        self._server = await asyncio.start_server(self._serve, host, int(port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        numbers = iter(range(1 << 20))

        def say(message: pb.DownMessage) -> None:
            data = message.SerializeToString()
            writer.write(HEADER.pack(len(data), next(numbers)) + data)

        say(pb.DownMessage(challenge=pb.Challenge(nonce=bytes(32))))
        try:
            while True:
                head = await reader.readexactly(HEADER.size)
                body = await reader.readexactly(HEADER.unpack(head)[0])
                self.heard += head + body
                self.messages.append(pb.UpMessage.FromString(body))
                for message in self._answers(self.messages[-1]):
                    say(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


def knows(heard: bytes, info: WorkerInfo) -> bool:
    """Whether the token is in what was heard, in one form or another."""
    return info.token.encode() in heard or bytes.fromhex(info.token) in heard


def as_worker(message: pb.UpMessage) -> list[pb.DownMessage]:
    """All that a worker would say, but for the proof."""
    epoch = message.epoch
    if message.HasField("hello"):
        own = pb.Welcome(model="test", max_model_len=2048, proof=message.hello.proof)
        report = pb.Report(num_blocks=100, block_size=16, max_num_seqs=8)
        return [
            pb.DownMessage(epoch=epoch, heard=1, welcome=own),
            pb.DownMessage(epoch=epoch, heard=1, report=report),
        ]
    if message.HasField("submit"):
        done = pb.Delta(
            stream_id=message.submit.stream_id,
            token_ids=[666],
            finish_reason=pb.FINISH_REASON_STOP,
        )
        return [pb.DownMessage(epoch=epoch, heard=2, step=pb.Step(deltas=[done]))]
    return []


def straight_to_tokens(message: pb.UpMessage) -> list[pb.DownMessage]:
    """No Welcome at all."""
    return as_worker(message)[1:] or [pb.DownMessage(epoch=message.epoch, heard=1)]


@pytest.mark.parametrize("answers", [as_worker, straight_to_tokens])
def test_a_listener_at_a_dead_workers_address_gets_neither_token_nor_prompt(
    model, nodes, run, caplog, answers
):
    first, second = nodes
    info = first.channel.info
    submitted = request(7)

    async def scenario() -> tuple[list[int], Rogue]:
        pool = WorkerPool("test", lost_wait_s=0.0)
        pool.update([info])
        await until(lambda: pool.num_connected == 1)
        await asyncio.to_thread(first.channel.stop)  # the registry lists it for 3 s more
        async with Rogue(info, answers) as rogue:
            await until(lambda: rogue.num_connections >= 3)
            assert pool.num_connected == 0 and not pool.ready()
            last = [delta async for delta in pool.generate(AdmissionRequest(submitted))][-1]
            assert last.error == "no_worker"  # as of any worker that is lost
            pool.update([info, second.channel.info])
            await until(lambda: pool.num_connected == 1)
            ids, _ = await collect(pool, submitted)
            await pool.close()
            return ids, rogue

    with caplog.at_level(logging.WARNING, "penstock.channel"):
        ids, rogue = run(scenario())
    assert ids == alone(model, submitted)
    assert {each.WhichOneof("body") for each in rogue.messages} == {"hello"}
    assert not knows(rogue.heard, info)
    lines = [each.message for each in caplog.records if "refused the worker" in each.message]
    assert len(lines) == 1 and info.address in lines[0]  # of three connections or more


@pytest.mark.parametrize(
    "said",
    [
        struct.pack("<II", 5000, 0),  # more than it may say
        struct.pack("<II", 4, 0) + b"\xff\xff\xff\xff",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)
def test_an_ingress_leaves_what_speaks_no_protocol(nodes, run, said):
    info = nodes[0].channel.info

    async def scenario() -> list[bytes]:
        got: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(said)
            got.append(await reader.read())
            writer.close()

        host, _, port = info.address.rpartition(":")
        await asyncio.to_thread(nodes[0].channel.stop)
        server = await asyncio.start_server(serve, host, int(port))
        pool = WorkerPool("test")
        pool.update([info])
        await until(lambda: len(got) >= 2)
        assert pool.num_connected == 0
        await pool.close()
        server.close()
        return got

    assert set(run(scenario())) == {b""}  # nothing was said to it


def test_what_a_relay_records_gives_no_token_and_opens_no_connection(nodes, run):
    """It passes the bytes of a proof on, and both ends trust each other: but it never can again."""
    node = nodes[0]
    info = node.channel.info
    recorded: list[bytes] = []

    def passes(message: bytes) -> bool:
        recorded.append(message)
        return True

    async def scenario() -> tuple[str, int]:
        relay, pool = Relay(info), WorkerPool("test")
        relay.filters_up = passes
        await relay.start()
        pool.update([relay.info])
        await until(lambda: pool.num_connected == 1)
        await collect(pool, request(1))
        await pool.close()
        await relay.close()
        num_before = node.thread.stats().num_finished["length"]
        connection = await connected(info.address)
        with connection:
            await challenged(connection)
            replayed = b"".join(
                HEADER.pack(len(each), number) + each for number, each in enumerate(recorded)
            )
            await asyncio.get_running_loop().sock_sendall(connection, replayed)
            answer = await heard(connection)
            assert answer is not None and await heard(connection) is None
        return answer.rejection.reason, node.thread.stats().num_finished["length"] - num_before

    reason, num_run = run(scenario())
    first = pb.UpMessage.FromString(recorded[0])
    assert first.HasField("hello") and not knows(b"".join(recorded), info)
    assert reason == "it does not know this worker's token" and num_run == 0


def test_a_changed_byte_of_a_proof_is_refused(nodes, run):
    info = nodes[0].channel.info

    async def scenario() -> list[str]:
        reasons = []
        for place in range(32):
            connection = await connected(info.address)
            with connection:
                message = hello(info, await challenged(connection))
                changed = pb.UpMessage.FromString(message[HEADER.size :])
                proof = bytearray(changed.hello.proof)
                proof[place] ^= 1 << place % 8
                changed.hello.proof = bytes(proof)
                said = framed(epoch=info.epoch, hello=changed.hello)
                await asyncio.get_running_loop().sock_sendall(connection, said)
                answer = await heard(connection)
                assert answer is not None
                reasons.append(answer.rejection.reason)
        return reasons

    assert run(scenario()) == ["it does not know this worker's token"] * 32


def test_strangers_by_the_hundred_keep_no_ingress_out(nodes, run, caplog, monkeypatch):
    monkeypatch.setattr(unproven, "HELLO_S", 60.0)  # all of them are there at a time
    node: Node = nodes[0]
    info = node.channel.info

    async def scenario() -> FinishReason | None:
        strangers: list[socket.socket] = []
        for _ in range(5 * MAX_UNPROVEN):
            strangers.append(await connected(info.address))
        connections = node.channel._connections
        await until(lambda: len(connections._unproven) == MAX_UNPROVEN)
        async with pool_of(node) as pool:
            _, last = await collect(pool, request(1))
        for stranger in strangers:
            stranger.close()
        await until(lambda: not len(connections._unproven) and not connections.peers)
        return last.finish_reason

    with caplog.at_level(logging.WARNING, "penstock.worker"):
        assert run(scenario()) is FinishReason.LENGTH
    refused = [each.message for each in caplog.records if "refused the ingress" in each.message]
    assert len(refused) == 1 and "127.0.0.1" in refused[0]
