"""HTTP/1.1 and HTTP/2 as hostile clients speak them: bytes over plain sockets, few checks.

A client library would refuse to send most of it.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping

SMALL_READ = 1 << 16
ANSWER_S = 60.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, HEADERS, RST_STREAM, GOAWAY = 4, 1, 3, 7
END_STREAM, END_HEADERS = 1, 4
CANCEL = 8


class Connection:
    """One connection with an HTTP/1.1 server. Raises OSError and EOFError when it is cut."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, host: str, port: int, source: str | None = None) -> Connection:
        """source: the address that the connection comes from; None: the system's choice."""
        local = None if source is None else (source, 0)
        return cls(*await asyncio.open_connection(host, port, local_addr=local))

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> int:
        """The status of the next answer, whose body is read. Raises TimeoutError."""
        async with asyncio.timeout(ANSWER_S):
            try:
                head = await self._reader.readuntil(b"\r\n\r\n")
                status = int(head.split(b" ", 2)[1])
                length = _content_length(head)
                if length is None:  # chunked, or until the end
                    while await self._reader.read(SMALL_READ):
                        pass
                else:
                    await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, IndexError, ValueError) as error:
                raise EOFError("the server closed the connection") from error
        return status

    def close(self) -> None:
        self._writer.transport.abort()


def _content_length(head: bytes) -> int | None:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return None


def post(
    path: str, body: bytes, key: str | None, headers: Mapping[str, str] | None = None
) -> bytes:
    """A POST of JSON."""
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
    if key is not None:
        lines.append(f"authorization: Bearer {key}")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2 (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header_block(fields: Mapping[str, str]) -> bytes:
    """Literal fields without indexing (RFC 7541, 6.2.2); names and values of < 127 bytes."""
    out = bytearray()
    for name, value in fields.items():
        out.append(0)
        for text in (name.encode(), value.encode()):
            if len(text) >= 127:
                raise ValueError(f"{name}: {len(text)} bytes; less than 127 can be written here")
            out.append(len(text))
            out += text
    return bytes(out)
