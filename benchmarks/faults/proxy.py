"""A TCP relay with faults on demand: those of a network, or of a host behind it.

A `Proxy` listens on a port of its own and connects each client with `target`. Each direction has a
`Programme`, which may be replaced while connections are open; `cut`, `finish`, `refuse` and
`detach` act at once. The relay carries any bytes; `frames` alone sees whole messages of the token
channel, each with its header (HEADER: its length, and its number).

TCP neither repeats nor reorders bytes. So a repeated or withheld message is made by `frames`, and
a late one by `detach`: the client loses the connection, and what it had sent reaches the server
after the client has connected again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Literal

READ_BYTES = 1 << 16
LIMIT_BYTES = 1 << 14  # that a stalled direction takes in, about
POLL_S = 0.005
HEADER = struct.Struct("<II")  # workers/channel/framing.py
Verb = Literal["pass", "stall", "swallow"]
Direction = Literal["up", "down"]  # from the client to the target, and back


@dataclass(frozen=True)
class Programme:
    """What happens to the bytes of one direction.

    verb: "stall" reads nothing, so that the sender's window closes; "swallow" reads and drops.
    delay_s, jitter_s: added to each read; bytes keep their order.
    cut_at: both ends get a reset after so many more bytes, perhaps within a message.
    frames: what to send for each message of the token channel; with headers, as they came.
    """

    verb: Verb = "pass"
    delay_s: float = 0.0
    jitter_s: float = 0.0
    cut_at: int | None = None
    frames: Callable[[bytes], list[bytes]] | None = None


@dataclass(eq=False)
class _Connection:
    """Two ends, and a task for each direction."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    is_detached: bool = False

    def reset(self) -> None:
        """Both ends get a reset."""
        for each in (self.client, self.server):
            _reset(each)


class Proxy:
    """One listener. Use `proxy` to make one; lives on one event loop."""

    def __init__(self, target: str):
        self.target = target
        self.accept_late_s = 0.0  # from a connect to the connection with the target
        self.num_accepted = 0
        self.programmes: dict[Direction, Programme] = {"up": Programme(), "down": Programme()}
        self.num_bytes: dict[Direction, int] = {"up": 0, "down": 0}
        self.port = 0
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def num_open(self) -> int:
        return len(self._connections)

    def set(self, direction: Direction | Literal["both"], programme: Programme) -> None:
        """From now on, also for connections that are open."""
        directions: tuple[Direction, ...] = ("up", "down") if direction == "both" else (direction,)
        for each in directions:
            self.programmes[each] = programme

    def heal(self) -> None:
        """Pass everything again."""
        self.set("both", Programme())
        self.accept_late_s = 0.0

    def cut(self) -> None:
        """Reset every open connection."""
        for each in list(self._connections):
            each.reset()

    def finish(self, direction: Direction) -> None:
        """Half-close: no more bytes come in this direction, by a FIN."""
        for each in list(self._connections):
            _finish(each.server if direction == "up" else each.client)

    def detach(self) -> None:
        """Reset the clients; what they have sent still goes to the target, which sees no end."""
        for each in self._connections:
            each.is_detached = True
            _reset(each.client)

    def refuse(self) -> None:
        """Close the port, as if nothing listened; open connections stay. `listen` reverts it."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def listen(self) -> None:
        """Open the port, which stays the same. Raises OSError."""
        if self._server is None:
            listener = socket.create_server(("127.0.0.1", self.port), backlog=1024)
            self.port = listener.getsockname()[1]
            self._server = await asyncio.start_server(self._serve, sock=listener, limit=LIMIT_BYTES)

    async def close(self) -> None:
        self.refuse()
        while self._connections:
            self.heal()
            self.cut()
            await asyncio.sleep(POLL_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        if self.accept_late_s:
            await asyncio.sleep(self.accept_late_s)
        host, _, port = self.target.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(
                host, int(port), limit=LIMIT_BYTES
            )
        except OSError:
            _reset(writer)
            return
        connection = _Connection(writer, far_writer)
        self._connections.add(connection)
        try:
            await asyncio.gather(
                self._relay(connection, "up", reader, far_writer),
                self._relay(connection, "down", far_reader, writer),
            )
        finally:
            self._connections.discard(connection)
            connection.reset()

    async def _relay(
        self,
        connection: _Connection,
        direction: Direction,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
    ) -> None:
        """Read until the end; a task of its own sends, so that a delay holds back no later read."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sending = asyncio.ensure_future(self._send(connection, direction, sink, queue))
        loop, partial, due_s = asyncio.get_running_loop(), b"", 0.0
        try:
            while data := await source.read(READ_BYTES):
                programme = self.programmes[direction]
                while self.programmes[direction].verb == "stall":
                    await asyncio.sleep(POLL_S)
                if programme.verb == "swallow":
                    continue
                if programme.frames is not None:
                    data, partial = _by_frame(partial + data, programme.frames)
                wait_s = programme.delay_s + random.uniform(0.0, programme.jitter_s)
                due_s = max(due_s, loop.time() + wait_s)
                if data:
                    queue.put_nowait((due_s, data))
        except OSError:
            if not connection.is_detached:
                connection.reset()
        queue.put_nowait((due_s, b""))
        await sending

    async def _send(
        self,
        connection: _Connection,
        direction: Direction,
        sink: asyncio.StreamWriter,
        queue: asyncio.Queue[tuple[float, bytes]],
    ) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while True:
                due_s, data = await queue.get()
                if (wait_s := due_s - loop.time()) > 0:
                    await asyncio.sleep(wait_s)
                if not data:
                    break
                programme = self.programmes[direction]
                if programme.cut_at is not None:
                    data = data[: programme.cut_at]
                sink.write(data)
                await sink.drain()
                self.num_bytes[direction] += len(data)
                if programme.cut_at is not None:
                    left = programme.cut_at - len(data)
                    self.set(direction, replace(programme, cut_at=left) if left else Programme())
                    if not left:
                        await asyncio.sleep(POLL_S)  # a reset would overtake what was written
                        connection.reset()
                        return
        while connection.is_detached and direction == "up" and self.programmes["up"].delay_s:
            await asyncio.sleep(POLL_S)  # until `heal`: the target sees no end
        if self.programmes[direction].verb != "swallow":
            _finish(sink)


@contextlib.asynccontextmanager
async def proxy(target: str) -> AsyncIterator[Proxy]:
    """A proxy that listens; `target` is host:port, and may be changed for later connections."""
    made = Proxy(target)
    await made.listen()
    try:
        yield made
    finally:
        await made.close()


def _by_frame(data: bytes, sent: Callable[[bytes], list[bytes]]) -> tuple[bytes, bytes]:
    """What to send for the whole messages in `data`, and the rest of it."""
    out = bytearray()
    while len(data) >= HEADER.size:
        end = HEADER.size + HEADER.unpack_from(data)[0]
        if len(data) < end:
            break
        for frame in sent(data[:end]):
            out += frame
        data = data[end:]
    return bytes(out), data


def _finish(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        if writer.can_write_eof() and not writer.transport.is_closing():
            writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        found = writer.get_extra_info("socket")
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
