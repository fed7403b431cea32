"""A gate that does only what a test has it do: it takes offers, and never decides by itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from penstock.deployments.gate.links.greeting import greeted
from penstock.deployments.gate.wire import GateAddress
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb
from penstock.protos.penstock.internal.v1 import gate_pb2_grpc

TOKEN = "token"
BEAT_S = 0.2  # it sends something so often, while it is not silent


class ScriptedGate(gate_pb2_grpc.GateServicer):
    """`queues`: it replies to each offer that the request waits. `is_silent`: it sends nothing."""

    def __init__(self) -> None:
        self.queues, self.is_silent = True, False
        self.offered: list[str] = []
        self.ended: list[str] = []
        self._streams: list[Any] = []
        self._writing = asyncio.Lock()  # gRPC takes one message of a stream at a time

    async def Connect(self, _: Any, context: Any) -> None:
        while self.is_silent:
            await asyncio.sleep(0.02)
        message = await greeted(context, TOKEN)
        if message is None:
            return
        self._streams.append(context)
        await self._write(context, pb.ToIngress())
        beating = asyncio.ensure_future(self._beat(context))
        try:
            while message is not grpc.aio.EOF:
                names = [offer.request_id for offer in message.offers]
                self.offered += names
                self.ended += [ended.request_id for ended in message.ended]
                if self.queues and not self.is_silent and names:
                    await self._write(context, pb.ToIngress(queued=names))
                message = await context.read()
        finally:
            beating.cancel()
            self._streams.remove(context)

    async def admit(self, names: list[str], epoch: int) -> None:
        """Tickets for these requests."""
        tickets = [pb.Ticket(request_id=name, epoch=epoch) for name in names]
        for context in self._streams:
            await self._write(context, pb.ToIngress(tickets=tickets))

    async def _beat(self, context: Any) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            if not self.is_silent:
                await self._write(context, pb.ToIngress())

    async def _write(self, context: Any, message: pb.ToIngress) -> None:
        async with self._writing:
            await context.write(message)


@contextlib.asynccontextmanager
async def serving(gate: ScriptedGate) -> AsyncIterator[GateAddress]:
    """`gate` on a port of its own."""
    server = grpc.aio.server()
    gate_pb2_grpc.add_GateServicer_to_server(gate, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield GateAddress(f"127.0.0.1:{port}", TOKEN, 0)
    finally:
        await server.stop(0)
