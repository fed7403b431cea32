"""The same connection under TLS 1.3, for machines whose network others can read.

TLS runs in memory between the framing and the socket: `send` encrypts and writes on the sender's
thread, as without TLS, and what is read is decrypted on the loop. One lock covers both, because
OpenSSL forbids two threads in one session, and because the order of encryption must be the order
of bytes in the socket. It is held for one record at a time when reading.

Behind a peer that reads slowly, messages wait in the clear: they are encrypted when there is room,
many small ones in one record, and a large one in pieces, so that no thread encrypts for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from penstock.workers.channel.framing import CLOSED, MessageConnection

VERSION = "TLSv1.3"
HANDSHAKE_S = 3.0
MAX_HANDSHAKE_BYTES = 32 << 10  # received before its end
RECORD_BYTES = 1 << 14  # most plaintext of a TLS record
PIECE_BYTES = 1 << 16  # that are encrypted at a time


@dataclass(frozen=True, slots=True)
class TlsEnd:
    """One end's part in a TLS connection. Made for each connection: certificates are replaced.

    `context` has this end's certificate and asks for the other's. `check_peer` gets the other end's
    certificate (DER), which its CA has signed, and raises an exception unless it is the right one.
    `certificate`: this end's own (DER), which the server needs.
    """

    context: ssl.SSLContext
    check_peer: Callable[[bytes], Any]
    is_server: bool = False
    certificate: bytes = b""


TlsSource = Callable[[], TlsEnd]


class _Broken(Exception):
    """The session is over; says why."""


class EncryptedConnection(MessageConnection):
    """A MessageConnection under TLS; messages that are sent before the handshake ends wait."""

    AT_END = "the connection was cut"  # an end that closes it says so first

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        tls: TlsEnd,
        **rest: Any,
    ):
        """`rest`: as MessageConnection has it."""
        self._tls, self._is_ready, self._binding = tls, False, b""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = tls.context.wrap_bio(
            self._incoming, self._outgoing, server_side=tls.is_server
        )
        self._num_handshake_bytes = 0
        self._waiting = bytearray()  # in the clear; after the handshake, only behind `_unsent`
        self._record = bytearray(RECORD_BYTES)
        self._timer = loop.call_later(HANDSHAKE_S, self._end_handshake)
        super().__init__(loop, connection, **rest)
        if not tls.is_server:
            with self.lock:
                self._decrypted()  # begins the handshake

    @property
    def binding(self) -> bytes:
        return self._binding

    @property
    def num_unsent_bytes(self) -> int:
        return len(self._unsent) + len(self._waiting)

    def end(self, why: str) -> None:
        with self.lock:
            self._timer.cancel()
            if self._is_open and self._is_ready and not self._unsent:
                with contextlib.suppress(ssl.SSLError):  # it does not wait for the other end's
                    self._session.unwrap()
                self._flush()
        super().end(why)

    def _end_handshake(self) -> None:
        if not self._is_ready:
            self.end(f"no TLS handshake within {HANDSHAKE_S:g} s")

    def _put(self, data: bytes) -> None:
        if not self._is_ready:
            self._waiting += data
            return
        super()._put(self._encrypted(data[:PIECE_BYTES]))
        if len(data) > PIECE_BYTES:
            self._waiting += data[PIECE_BYTES:]
            if not self._unsent:
                self._refill()
                self._loop.call_soon_threadsafe(self._watch_for_room)

    def _keep(self, data: bytes) -> None:
        self._waiting += data

    def _refill(self) -> None:
        if self._waiting and self._is_ready:
            piece = bytes(self._waiting[:PIECE_BYTES])
            del self._waiting[:PIECE_BYTES]
            self._unsent += self._encrypted(piece)

    def _encrypted(self, data: bytes) -> bytes:
        try:
            num = self._session.write(data)
            while num < len(data):
                num += self._session.write(data[num:])
        except ssl.SSLError as error:
            self.end_soon(_reason_of(error))
        return self._outgoing.read()

    def _flush(self) -> None:
        """Send what TLS itself has to say: the handshake, an alert, the end."""
        if said := self._outgoing.read():
            if self._unsent:
                self._unsent += said
            else:
                super()._put(said)

    def _take(self, data: bytes | memoryview) -> None:
        try:
            for start in range(0, len(data), RECORD_BYTES):
                self._take_piece(data[start : start + RECORD_BYTES])
        except _Broken as broken:
            self.end(str(broken))

    def _take_piece(self, data: bytes | memoryview) -> None:
        if not self._is_ready:
            self._num_handshake_bytes += len(data)
            if self._num_handshake_bytes > MAX_HANDSHAKE_BYTES:
                raise _Broken(f"a TLS handshake of more than {MAX_HANDSHAKE_BYTES} bytes")
        with self.lock:
            self._incoming.write(data)
        while self._is_open and self._incoming.pending:
            with self.lock:
                num_bytes = self._decrypted()
            super()._take(memoryview(self._record)[:num_bytes])

    def _decrypted(self) -> int:
        """Go on with the handshake, or have the next record in `_record`: its number of bytes.

        0: it has not arrived as a whole. With the lock held. Raises _Broken.
        """
        try:
            if not self._is_ready:
                self._session.do_handshake()
                self._begin()
                return 0
            # With a buffer it returns a number; the stubs do not know.
            num_bytes = cast(int, self._session.read(RECORD_BYTES, self._record))
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLError as error:
            raise _Broken(_reason_of(error)) from None
        finally:
            self._flush()
        if not num_bytes:
            raise _Broken(CLOSED)
        return num_bytes

    def _begin(self) -> None:
        """The handshake is over: check who the other end is, and send what waits."""
        certificate = self._session.getpeercert(binary_form=True)
        if not certificate or self._session.version() != VERSION:
            raise _Broken(f"it shows no certificate, or does not speak {VERSION}")
        try:
            self._tls.check_peer(certificate)
        except Exception as error:
            raise _Broken(f"its certificate is refused: {error}") from error
        servers = self._tls.certificate if self._tls.is_server else certificate
        self._binding = hashlib.sha256(servers).digest()
        self._timer.cancel()
        self._flush()  # the end of the handshake goes first
        self._is_ready = True
        if not self._unsent:
            self._refill()
            self._watch_for_room()


def message_connection(
    loop: asyncio.AbstractEventLoop, connection: socket.socket, tls: TlsEnd | None, **rest: Any
) -> MessageConnection:
    """A connection, under TLS if there is `tls`. `rest`: as MessageConnection has it."""
    if tls is None:
        return MessageConnection(loop, connection, **rest)
    return EncryptedConnection(loop, connection, tls, **rest)


def _reason_of(error: ssl.SSLError) -> str:
    """What is wrong, without the place in OpenSSL."""
    why = getattr(error, "verify_message", None) or error.reason or type(error).__name__
    return f"TLS failed: {why}"
