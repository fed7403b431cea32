"""Reads the numbers and strings of which header.py makes the header of a GGUF file."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

from penstock.workers.errors import ConfigError

CHUNK_BYTES = 1 << 18
MAX_HEADER_BYTES = 1 << 28  # vocabularies of real files take 1 to 30 MB
_LENGTH = struct.Struct("<Q")  # of a string


class HeaderReader:
    """Reads from a file's start on, never past its end or MAX_HEADER_BYTES; CHUNK_BYTES at a time,
    as a vocabulary is some hundred thousand short strings."""

    def __init__(self, file: Path, opened: BinaryIO):
        self.file = file
        self.size = opened.seek(0, os.SEEK_END)
        opened.seek(0)
        self._opened = opened
        self._end = min(self.size, MAX_HEADER_BYTES)
        self._chunk, self._chunk_start, self._place = b"", 0, 0

    @property
    def position(self) -> int:
        """Bytes from the file's start."""
        return self._chunk_start + self._place

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes; `what` they are, for the message."""
        place = self._place
        if place + count > len(self._chunk):
            self._fill(count, what)
            place = 0
        self._place = place + count
        return self._chunk[place : place + count]

    def _fill(self, count: int, what: str) -> None:
        """Have at least `count` bytes in the chunk, from the next one on."""
        left = self._chunk[self._place :]
        start = self.position
        if count <= self._end - start:  # else no more is read
            wanted = min(max(count, CHUNK_BYTES), self._end - start) - len(left)
            self._chunk = left + self._opened.read(wanted)
            self._chunk_start, self._place = start, 0
        if len(self._chunk) - self._place < count:
            raise ConfigError(
                f"{self.file}: {what} needs {count} bytes at byte {start} of a header that "
                f"ends by byte {self._end}; the file is truncated or damaged: fetch it again"
            )

    def number(self, code: str, what: str) -> Any:
        """A number of the struct module's type `code`."""
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def count(self, least: int, what: str) -> int:
        """A number of things that follow, each of at least `least` bytes."""
        count: int = self.number("Q", what)
        if count * least > self._end - self.position:
            raise ConfigError(
                f"{self.file}: {what} is {count}, more than fit in the rest of the file; it is "
                "truncated or damaged: fetch it again"
            )
        return count

    def texts(self, count: int, what: str) -> list[str]:
        """`count` strings in a row."""
        texts: list[str] = []
        while len(texts) < count:
            chunk, place = self._chunk, self._place
            with contextlib.suppress(struct.error, UnicodeDecodeError):  # `text` says what it is
                for _ in range(count - len(texts)):
                    start = place + 8
                    end = start + _LENGTH.unpack_from(chunk, place)[0]
                    if end > len(chunk):
                        break
                    texts.append(chunk[start:end].decode())
                    place = end
            self._place = place
            if len(texts) < count:  # it ends beyond the chunk, or is none
                texts.append(self.text(what))
        return texts

    def text(self, what: str, longest: int = MAX_HEADER_BYTES) -> str:
        length = int.from_bytes(self.take(8, what), "little")
        if length > longest:
            raise ConfigError(f"{self.file}: {what} has {length} bytes; {longest} are the most")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.file}: {what} is not UTF-8: {error}") from error
