"""The first messages of a connection with a worker: each end proves that it knows its token.

Whatever listens on the address of a worker that is gone learns from them neither the token nor a
prompt: requests are sent after the proof alone.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.channel.proof import Proof
from penstock.workers.stats import WorkerInfo

REASON_LENGTH = 200  # most that is logged of what an unproven end says


class Refused(Exception):
    """The other end is not the worker that the registry lists, or refuses this ingress."""


class WorkerGreeting:
    """Of one connection, at the ingress."""

    def __init__(self, info: WorkerInfo, ingress_id: str):
        self._proof = Proof(info.token, own="ingress", peer="worker", epoch=info.epoch)
        self._ingress_id = ingress_id
        self._challenge: bytes | None = None  # the worker's nonce

    def take(self, data: bytes, binding: bytes = b"") -> pb.Hello | None:
        """What to answer to a message; None: the worker has proven itself.

        `binding`: as in Proof. Raises Refused.
        """
        try:
            message = pb.DownMessage.FromString(data)
        except DecodeError:
            raise Refused("it does not speak this protocol") from None
        if message.HasField("challenge") and self._challenge is None:
            self._challenge = message.challenge.nonce
            proof = self._proof.of_own(self._challenge, binding)
            return pb.Hello(ingress_id=self._ingress_id, nonce=self._proof.nonce, proof=proof)
        if message.HasField("rejection"):
            reason = message.rejection.reason[:REASON_LENGTH]
            raise Refused(f"it refuses this ingress: {reason!r}")
        if not message.HasField("welcome") or self._challenge is None:
            raise Refused("it does not speak this protocol")
        if not self._proof.is_of_peer(message.welcome.proof, self._challenge, binding):
            raise Refused("it has not proven that it is the worker that the registry lists")
        return None
