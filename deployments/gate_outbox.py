"""What an ingress has to tell the gate, gathered: a message costs more than what is in it.

What somebody waits for goes at once; news that can wait goes with it, or a moment later. Knows
nothing of streams, or of what the news mean.
"""

from __future__ import annotations

import asyncio

from penstock.protos.penstock.internal.v1 import gate_pb2 as pb

GATHER_S = 0.01


class GateOutbox:
    """The message that is being made. Lives on one event loop."""

    def __init__(self) -> None:
        self.message = pb.FromIngress()
        self._number = 0
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def next_number(self) -> int:
        """Of the message that is being made."""
        return self._number + 1

    def begin(self, ingress_id: str) -> None:
        """A new stream: its first message, and nothing of what an earlier one was to say."""
        self.message, self._number = pb.FromIngress(ingress_id=ingress_id), 0

    def now(self) -> None:
        """The message is to go."""
        self._due.set()

    def soon(self) -> None:
        """The message is to go within GATHER_S."""
        if self._timer is None and not self._due.is_set():
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self.now)

    async def due(self) -> None:
        """Until the message is to go."""
        await self._due.wait()

    def take(self) -> pb.FromIngress:
        """The message as it is; the next one is begun."""
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        message, self.message = self.message, pb.FromIngress()
        self._number += 1
        message.number = self._number
        return message
