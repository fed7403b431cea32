"""A TCP relay between an ingress and a worker that loses what goes one way.

What it swallows it has acknowledged, as a broken router's neighbour or a full proxy does: neither
end sees more than silence of the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable
from dataclasses import replace

from penstock.workers.stats import WorkerInfo

_HEADER = struct.Struct("<II")  # as in workers/channel/framing.py


class Relay:
    """Lies before one worker. `loses` is "", "up" (ingress to worker) or "down"; `filters_up` says
    of each whole message that goes up whether it passes."""

    def __init__(self, info: WorkerInfo):
        self._target = info.address.rpartition(":")
        self.info = info  # under the relay's address, once it has started
        self.loses = ""
        self.filters_up: Callable[[bytes], bool] = lambda _: True
        self.num_connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.info = replace(self.info, address=f"127.0.0.1:{port}")

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(
        self, from_ingress: asyncio.StreamReader, to_ingress: asyncio.StreamWriter
    ) -> None:
        self.num_connections += 1
        from_worker, to_worker = await asyncio.open_connection(
            self._target[0], int(self._target[2])
        )
        for copy in (self._up(from_ingress, to_worker), self._down(from_worker, to_ingress)):
            self._tasks.add(asyncio.ensure_future(copy))

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readexactly(_HEADER.size)
                body = await reader.readexactly(_HEADER.unpack(head)[0])
                if self.loses != "up" and self.filters_up(body):
                    writer.write(head + body)
        writer.close()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if self.loses != "down":
                    writer.write(data)
        writer.close()
