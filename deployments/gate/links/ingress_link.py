"""One ingress's stream at the gate: what is to be sent on it next, and when it is to end."""

from __future__ import annotations

import asyncio

from penstock.protos.penstock.internal.v1 import gate_pb2 as pb


class IngressLink:
    """Lives on the gate's event loop."""

    def __init__(self) -> None:
        self.ingress = ""  # its id, once it has proven itself
        self.message = pb.ToIngress()  # that is being filled
        self.filled = asyncio.Event()  # and is to be sent
        self.left = asyncio.Event()  # the stream is to end
        self.refused = ""  # why, if it has not proven itself

    def refuse(self, why: str) -> None:
        """End the stream: it has not proven itself."""
        self.refused = why
        self.left.set()
