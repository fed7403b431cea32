"""What a worker's channel keeps for each connected ingress, and for each of its requests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.channel.framing import MessageConnection
from penstock.workers.channel.outbox import Outbox
from penstock.workers.request import Delta

MAX_HELLO_BYTES = 4096


@dataclass(slots=True)
class RequestRoute:
    """Where the deltas of one request go, and how many tokens it has so far."""

    peer: IngressPeer
    stream_id: int
    name: str  # request id at the ingress
    num_prompt: int
    max_tokens: int  # 0: not given
    num_expected: int  # predicted tokens still to compute
    num_generated: int = 0

    def count(self, delta: Delta) -> None:
        # With the first delta, the whole prompt has been computed.
        num_computed = len(delta.token_ids) + (self.num_prompt if not self.num_generated else 0)
        self.num_expected = max(0, self.num_expected - num_computed)
        self.num_generated += len(delta.token_ids)


class IngressPeer:
    """One connected ingress."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        number: int,
        *,
        on_message: Callable[[IngressPeer, bytes], None],
        on_end: Callable[[IngressPeer, str], None],
        epoch: int,
        max_pending_tokens: int,
    ):
        """`epoch`: of the worker. Callbacks: those of MessageConnection, with this peer."""
        self.number = number
        self.name = ""  # of the ingress, once it has sent Hello
        self.num_silent_ticks = 0
        self.connection = MessageConnection(
            loop,
            connection,
            on_message=lambda message: on_message(self, message),
            on_end=lambda why: on_end(self, why),
            on_room=lambda: self.outbox.flush(),
            max_bytes=MAX_HELLO_BYTES,
        )
        self.outbox = Outbox(self.connection, epoch, max_pending_tokens)

    def request_id(self, message: pb.Submit | pb.Cancel) -> str:
        """The engine's id: separates a second attempt from late deltas of the first."""
        return f"{message.request_id}#{self.number}.{message.stream_id}"
