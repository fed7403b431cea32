"""A TCP connection that carries whole messages both ways, each after its length and its number.

TCP loses, repeats and reorders nothing; a fault in what lies between (a proxy, or this program)
may. Messages are numbered 0, 1, 2... in each direction, and one that is not the next one ends the
connection: whatever was sent on it is sent again on another, and is never taken twice.

The sending thread writes straight into the socket: no other thread has to wake for it, and none
ever blocks. Bytes that the socket has no room for are buffered and sent when it has. Reads and all
callbacks run on one event loop. encrypted.py has the same connection under TLS.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
from collections.abc import Callable

log = logging.getLogger("penstock.channel")

MAX_MESSAGE_BYTES = 64 << 20
# To an end that does not read, beside one message: eight of the largest requests that a client may
# send, or thousands of common ones, in the 5 s after which its silence ends the connection anyway.
MAX_UNSENT_BYTES = 32 << 20
READ_BYTES = 1 << 16  # the allocator asks the kernel for larger buffers, at each read
# A host that is gone acknowledges nothing, and TCP would take a quarter of an hour to report it.
UNANSWERED_MS = 10_000
HEADER = struct.Struct("<II")  # bytes of the message, and its number modulo 2^32
CLOSED = "the other end closed it"


class MessageConnection:
    """One end of a connection. Made, read and ended on `loop`; `send` is for any thread.

    `lock` is held while bytes are sent; an owner that decides by `is_stuck` what to send must hold
    it, too.
    """

    AT_END = CLOSED  # why it ends when nothing more can be read

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        *,
        on_message: Callable[[bytes], None],
        on_end: Callable[[str], None],
        on_room: Callable[[], None] | None = None,
        max_bytes: int = MAX_MESSAGE_BYTES,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
    ):
        """`on_end`: called once, with the reason. `on_room`: called with the lock held, when all
        buffered bytes are sent. `max_bytes`: of a received message; the owner may change it.
        `max_unsent_bytes`: with more than that buffered, the connection ends."""
        self.lock = threading.RLock()
        self.max_bytes = max_bytes
        self._loop = loop
        self._socket = connection
        self._on_message, self._on_end, self._on_room = on_message, on_end, on_room
        self._received = bytearray()
        self._num_sent = self._num_received = 0  # messages, modulo 2^32
        self._unsent = bytearray()  # may begin within a message
        self._max_unsent_bytes = max_unsent_bytes
        self._is_open = True
        self._takes_more = True  # False between a full buffer and the end
        _prepare(connection)
        loop.add_reader(connection, self._read)

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def binding(self) -> bytes:
        """SHA-256 of the server's certificate, for the proofs of both ends; empty: no TLS."""
        return b""

    @property
    def is_stuck(self) -> bool:
        """Whether bytes are buffered because the other end does not read."""
        return bool(self._unsent)

    @property
    def num_unsent_bytes(self) -> int:
        return len(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a message; it is dropped if the connection has ended, or ends because the other end
        does not read. Never blocks."""
        with self.lock:
            if not self._is_open or not self._takes_more:
                return
            framed = HEADER.pack(len(message), self._num_sent) + message
            self._num_sent = (self._num_sent + 1) & 0xFFFFFFFF
            if not self._unsent:
                self._put(framed)
            elif self.num_unsent_bytes + len(framed) > self._max_unsent_bytes:
                self._takes_more = False
                self.end_soon("the other end does not read what is sent to it")
            else:
                self._keep(framed)

    def end(self, why: str) -> None:
        """Close, and report the reason to the owner; on the loop."""
        with self.lock:
            if not self._is_open:
                return
            self._is_open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
        self._on_end(why)

    def end_soon(self, why: str) -> None:
        """`end`, from any thread."""
        self._loop.call_soon_threadsafe(self.end, why)

    def _put(self, data: bytes) -> None:
        """Write `data`, and keep what the socket has no room for. With the lock held, as all of
        the following."""
        num_sent = self._write(data)
        if num_sent < len(data):
            self._unsent += data[num_sent:]
            self._loop.call_soon_threadsafe(self._watch_for_room)

    def _keep(self, data: bytes) -> None:
        """Keep `data` behind what is kept, of which `_unsent` has the first bytes."""
        self._unsent += data

    def _refill(self) -> None:
        """All of `_unsent` is sent: have there what is to be sent next, if there is any."""

    def _write(self, data: bytes | bytearray) -> int:
        """Write `data`; returns how many bytes the socket took."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self.end_soon(_reason_of(error))
            return len(data)

    def _watch_for_room(self) -> None:
        with self.lock:
            if self._is_open and self._unsent:
                self._loop.add_writer(self._socket, self._send_unsent)

    def _send_unsent(self) -> None:
        with self.lock:
            del self._unsent[: self._write(self._unsent)]
            if not self._unsent:
                self._refill()
            if not self._unsent:
                self._loop.remove_writer(self._socket)
                if self._on_room is not None:
                    self._on_room()

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.end(_reason_of(error))
            return
        if not data:
            self.end(self.AT_END)
            return
        try:
            self._take(data)
        except Exception:
            log.exception("a message could not be handled")
            self.end("a message could not be handled")

    def _take(self, data: bytes | memoryview) -> None:
        """Received bytes: pass every complete message to the owner."""
        self._received += data
        received, start = self._received, 0
        while self._is_open and len(received) - start >= HEADER.size:
            num_bytes, number = HEADER.unpack_from(received, start)
            if num_bytes > self.max_bytes:
                self.end(f"a message of {num_bytes} bytes exceeds {self.max_bytes}")
                return
            if number != self._num_received:
                self.end(f"message {self._num_received} was lost, or an earlier one repeated")
                return
            begin = start + HEADER.size
            if len(received) - begin < num_bytes:
                break
            start = begin + num_bytes
            self._num_received = (number + 1) & 0xFFFFFFFF
            self._on_message(bytes(received[begin:start]))
        del received[:start]


async def connected(address: str) -> socket.socket:
    """A connected, non-blocking socket to `address`, host:port. Raises OSError."""
    loop = asyncio.get_running_loop()
    host, _, port = address.rpartition(":")
    found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    family, kind, protocol, _, place = found[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        await loop.sock_connect(connection, place)
    except BaseException:
        connection.close()
        raise
    return connection


def listening(host: str) -> tuple[socket.socket, str]:
    """A listener on a free port of `host`, and its address, host:port. Raises OSError."""
    is_v6 = ":" in host
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=128)
    listener.setblocking(False)
    port = listener.getsockname()[1]
    return listener, f"[{host}]:{port}" if is_v6 else f"{host}:{port}"


def _prepare(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_MS)


def _reason_of(error: OSError) -> str:
    return error.strerror or type(error).__name__
