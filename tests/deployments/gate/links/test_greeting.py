"""Gate and ingress prove to each other that they know the gate's token, which is never sent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from penstock.deployments.gate.server import GateServer
from penstock.deployments.gate.types import GateSetup
from penstock.deployments.gate.wire import GateAddress
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.protos.penstock.internal.v1 import channel_pb2, gate_pb2_grpc
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb
from penstock.workers.channel import unproven
from penstock.workers.channel.proof import Proof
from penstock.workers.channel.unproven import MAX_UNPROVEN
from tests.deployments.waiting import until

SETUP = GateSetup(host="127.0.0.1")


@contextlib.asynccontextmanager
async def gate_and_address() -> AsyncIterator[tuple[GateServer, GateAddress]]:
    gate = GateServer(SETUP)
    try:
        yield gate, await gate.where(SETUP)
    finally:
        await gate.close()


@contextlib.asynccontextmanager
async def client_of(address: GateAddress) -> AsyncIterator[GateClient]:
    async def where() -> GateAddress:
        return address

    client = GateClient("test", where)
    running = asyncio.ensure_future(client.run())
    try:
        yield client
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@contextlib.asynccontextmanager
async def stream_to(address: GateAddress) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(address.address) as channel:
        yield gate_pb2_grpc.GateStub(channel).Connect()


async def asked(stream: Any, nonce: bytes) -> pb.ToIngress:
    """What the gate says to a challenge."""
    await stream.write(pb.FromIngress(challenge=channel_pb2.Challenge(nonce=nonce)))
    message: pb.ToIngress = await stream.read()
    return message


async def refusal(stream: Any) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(20):
        return await stream.code(), await stream.details()


def test_an_ingress_and_the_gate_prove_themselves() -> None:
    async def scenario() -> None:
        async with gate_and_address() as (gate, address), client_of(address) as client:
            await until(lambda: client.is_connected)
            assert list(gate._links) == ["test"] and not len(gate._unproven)
            answers = await asyncio.gather(*(client.explain(limit) for limit in (1, 2, 3)))
            assert [type(each) for each in answers] == [pb.ExplainResponse] * 3
        assert await client.explain(1) is None  # the gate is away

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["wrong token", "no proof", "reflected", "no challenge"])
def test_an_ingress_without_the_token_is_refused(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> tuple[tuple[grpc.StatusCode, str], list[str]]:
        async with gate_and_address() as (gate, address), stream_to(address) as stream:
            token = "wrong" if kind == "wrong token" else address.token
            proof = Proof(token, own="ingress", peer="gate")
            message = pb.FromIngress(number=1, ingress_id="rogue")
            if kind == "no challenge":
                await stream.write(message)
                answer = await stream.read()
            else:
                answer = await asked(stream, proof.nonce)
            if kind == "wrong token":
                message.proof = proof.of_own(answer.challenge.nonce)
            elif kind == "reflected":
                message.proof = answer.proof
            await stream.write(message)
            return await refusal(stream), list(gate._links)

    with caplog.at_level(logging.WARNING, "penstock.gate"):
        (code, details), joined = asyncio.run(scenario())
    assert (code, joined) == (grpc.StatusCode.UNAUTHENTICATED, [])
    assert details == "it does not know the gate's token"
    assert [each.message for each in caplog.records if "refused" in each.message] == [
        "refused the ingress at ipv4:127.0.0.1: it does not know the gate's token"
    ]


def test_a_recorded_proof_opens_no_stream() -> None:
    async def scenario() -> tuple[grpc.StatusCode, str]:
        async with gate_and_address() as (gate, address):
            proof = Proof(address.token, own="ingress", peer="gate")
            recorded = pb.FromIngress(number=1, ingress_id="replayed")
            async with stream_to(address) as stream:
                answer = await asked(stream, proof.nonce)
                recorded.proof = proof.of_own(answer.challenge.nonce)
                await stream.write(recorded)
                await until(lambda: gate._links)
            await until(lambda: not gate._links)
            async with stream_to(address) as stream:
                await asked(stream, proof.nonce)
                await stream.write(recorded)
                return await refusal(stream)

    code, _ = asyncio.run(scenario())
    assert code == grpc.StatusCode.UNAUTHENTICATED


class RogueGate(gate_pb2_grpc.GateServicer):
    """Listens where the gate was. It keeps what it hears, and knows no token."""

    def __init__(self, answer: Any) -> None:
        self.heard: list[pb.FromIngress] = []
        self._answer = answer

    async def Connect(self, _: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            self.heard.append(message)
            await context.write(self._answer(message))


def _reflecting(message: pb.FromIngress) -> pb.ToIngress:
    return pb.ToIngress(challenge=message.challenge, proof=message.challenge.nonce)


def _with_credits(_: pb.FromIngress) -> pb.ToIngress:
    return pb.ToIngress(credits=pb.Credits(as_of=1, epochs=[1], tokens=[1000], slots=[8]))


@pytest.mark.parametrize("answer", [_reflecting, _with_credits])
def test_a_listener_at_the_gates_address_is_told_nothing(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> tuple[list[pb.FromIngress], GateClient]:
        rogue, server = RogueGate(answer), grpc.aio.server()
        gate_pb2_grpc.add_GateServicer_to_server(rogue, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with client_of(GateAddress(f"127.0.0.1:{port}", "secret", 0)) as client:
            client.report("worker", 5, channel_pb2.Report(num_blocks=10))
            await until(lambda: len(rogue.heard) >= 3)
            assert not client.is_connected and not client.answers
        await server.stop(0)
        return rogue.heard, client

    with caplog.at_level(logging.WARNING, "penstock.gate"):
        heard, client = asyncio.run(scenario())
    for message in heard:  # the challenge, and nothing else
        assert [field.name for field, _ in message.ListFields()] == ["challenge"]
        assert b"secret" not in message.SerializeToString()
    assert len({message.challenge.nonce for message in heard}) == len(heard)
    refused = [each.message for each in caplog.records if "refused" in each.message]
    assert len(refused) == 1 and "it has not proven that it is the gate" in refused[0]


def test_silent_streams_keep_no_ingress_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> tuple[grpc.StatusCode, str]:
        async with gate_and_address() as (gate, address):
            async with grpc.aio.insecure_channel(address.address) as channel:
                stub = gate_pb2_grpc.GateStub(channel)
                streams = [stub.Connect() for _ in range(2 * MAX_UNPROVEN)]
                await until(lambda: len(gate._unproven) == MAX_UNPROVEN)
                async with client_of(address) as client:
                    await until(lambda: client.is_connected)
                for stream in streams:
                    stream.cancel()
            await until(lambda: not len(gate._unproven))
            monkeypatch.setattr(unproven, "HELLO_S", 0.1)
            async with stream_to(address) as stream:
                await stream.wait_for_connection()
                return await refusal(stream)

    code, details = asyncio.run(scenario())
    assert code == grpc.StatusCode.UNAUTHENTICATED
    assert details == "it did not prove itself within 0.1 s"
