"""The first messages of an ingress's stream with the gate: each end proves that it knows the token.

The ingress asks, the gate proves itself and asks back, and the ingress's proof comes with its first
message proper. Ray tells the ingress the token; no message has it.
"""

from __future__ import annotations

from typing import Any

import grpc

from penstock.protos.penstock.internal.v1 import channel_pb2
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb
from penstock.workers.channel.proof import Proof


class Refused(Exception):
    """The other end of the stream has not proven that it is what it should be."""


async def greet_gate(stream: Any, token: str) -> bytes:
    """The proof that an ingress sends with message 1, once the gate has proven itself.

    `stream`: the ingress's end of it. Raises Refused.
    """
    proof = Proof(token, own="ingress", peer="gate")
    await stream.write(pb.FromIngress(challenge=channel_pb2.Challenge(nonce=proof.nonce)))
    asked = await stream.read()
    if asked is grpc.aio.EOF or not proof.is_of_peer(asked.proof, asked.challenge.nonce):
        raise Refused("it has not proven that it is the gate")
    return proof.of_own(asked.challenge.nonce)


async def greeted(context: Any, token: str) -> pb.FromIngress | None:
    """Message 1 of an ingress that has proven itself; None: it left before.

    `context`: of gRPC, for the stream. Raises Refused.
    """
    proof = Proof(token, own="gate", peer="ingress")
    asked = await context.read()
    if asked is grpc.aio.EOF:
        return None
    nonce = asked.challenge.nonce
    challenge = channel_pb2.Challenge(nonce=proof.nonce)
    await context.write(pb.ToIngress(challenge=challenge, proof=proof.of_own(nonce)))
    first: pb.FromIngress = await context.read()
    if first is grpc.aio.EOF:
        return None
    if not proof.is_of_peer(first.proof, nonce):
        raise Refused("it does not know the gate's token")
    return first
