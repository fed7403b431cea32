"""What a worker's channel knows of each ingress, of each request on its way, and of its own pace.

Knows nothing of engines; what messages mean is for the channel's server.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.channel.framing import MessageConnection
from penstock.workers.channel.outbox import Outbox
from penstock.workers.request import Delta
from penstock.workers.stats import EngineStats

MAX_HELLO_BYTES = 4096


@dataclass(slots=True)
class RequestRoute:
    """Where the deltas of one running request go, and how far it has come."""

    peer: IngressPeer
    stream_id: int
    name: str  # as its ingress calls it
    num_prompt: int
    max_tokens: int  # 0: no limit was given
    num_expected: int  # tokens still to compute, as far as one can guess
    num_generated: int = 0

    def count(self, delta: Delta) -> None:
        # The first delta says that the whole prompt is computed.
        num_computed = len(delta.token_ids) + (self.num_prompt if not self.num_generated else 0)
        self.num_expected = max(0, self.num_expected - num_computed)
        self.num_generated += len(delta.token_ids)


class IngressPeer:
    """The connection of one ingress."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        number: int,
        *,
        on_message: Callable[[IngressPeer, bytes], None],
        on_end: Callable[[IngressPeer, str], None],
        as_message: Callable[[Mapping[int, Delta]], bytes],
        max_pending_tokens: int,
    ):
        """`as_message`: the deltas of one step, by stream id, as an ingress reads them."""
        self.number = number
        self.name = ""  # of the ingress, once it has said who it is
        self.num_silent_ticks = 0
        self.connection = MessageConnection(
            loop,
            connection,
            on_message=lambda message: on_message(self, message),
            on_end=lambda why: on_end(self, why),
            on_room=lambda: self.outbox.flush(),
            max_bytes=MAX_HELLO_BYTES,
        )
        self.outbox = Outbox(self.connection, as_message, max_pending_tokens)

    def request_id(self, message: pb.Submit | pb.Cancel) -> str:
        """The engine's id: a second attempt is kept apart from the first one's late deltas."""
        return f"{message.request_id}#{self.number}.{message.stream_id}"


class StepTimeAverage:
    """How long a step takes of late, from the engine's totals."""

    WEIGHT = 0.3  # of the steps since the last look

    def __init__(self) -> None:
        self.step_s = 0.0
        self._num_steps, self._seconds = 0, 0.0

    def observe(self, stats: EngineStats) -> None:
        seconds, num = sum(stats.step_seconds.values()), stats.num_steps - self._num_steps
        if num > 0:
            newest = (seconds - self._seconds) / num
            self.step_s += (StepTimeAverage.WEIGHT if self.step_s else 1.0) * (newest - self.step_s)
        self._num_steps, self._seconds = stats.num_steps, seconds
