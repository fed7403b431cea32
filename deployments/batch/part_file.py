"""The results of an unfinished batch: an append-only file with one record for each finished line.

A record is one line of text: a checksum, the input line's number, whether it goes to the output or
the errors, its token counts, and the JSON of the result. A process that is killed leaves at most
one torn record at the end, and a machine that loses power some records after the last `sync`:
`PartFile` cuts the file at the first record that is not whole, and those lines run again.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("penstock.batch")

OUTPUT, ERROR = "o", "e"
_CHECKSUM_BYTES = 9  # eight hex digits and a space


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of one result, or of several."""

    prompt: int = 0
    cached: int = 0  # of the prompt's, from the prefix cache
    completion: int = 0
    reasoning: int = 0  # of the completion's

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            self.prompt + other.prompt,
            self.cached + other.cached,
            self.completion + other.completion,
            self.reasoning + other.reasoning,
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a result's JSON in the file."""

    offset: int
    num_bytes: int
    kind: str


class PartFile:
    """The records of one batch. One process writes to it; see lease.py."""

    def __init__(self, path: Path):
        """Open or create the file, cut a torn end, and read the records. Raises OSError."""
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._places: dict[int, _Place] = {}
        self.num_completed = self.num_failed = 0
        self.tokens = TokenCounts()
        self.num_unsynced = 0
        self._end = self._load()

    def __contains__(self, number: object) -> bool:
        return number in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def append(self, number: int, kind: str, content: bytes, tokens: TokenCounts) -> None:
        """Add the result of a line. `content`: JSON without line breaks. Raises OSError.

        A second result of the same line is dropped.
        """
        if number in self._places:
            return
        counts = f"{tokens.prompt} {tokens.cached} {tokens.completion} {tokens.reasoning}"
        checked = f"{number} {kind} {counts} ".encode() + content
        record = b"%08x %b\n" % (zlib.crc32(checked), checked)
        try:
            _write_at(self._fd, record, self._end)
        except OSError:
            os.ftruncate(self._fd, self._end)
            raise
        self._note(number, kind, tokens, self._end + len(record) - 1 - len(content), len(content))
        self._end += len(record)
        self.num_unsynced += 1

    def sync(self) -> None:
        """Flush everything that was appended to the disk. May run on another thread."""
        self.num_unsynced = 0
        os.fsync(self._fd)

    def rename(self, path: Path) -> None:
        """Rename the file to `path`, in place of an earlier file."""
        os.replace(self.path, path)
        sync_folder(path.parent)
        self.path = path

    def write_sorted(self, kind: str, path: Path) -> int:
        """Write the results of this kind to `path`, by line number, on disk; the number of them."""
        numbers = sorted(number for number, place in self._places.items() if place.kind == kind)
        with open(path, "wb") as file:
            for number in numbers:
                place = self._places[number]
                file.write(os.pread(self._fd, place.num_bytes, place.offset) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return len(numbers)

    def close(self) -> None:
        os.close(self._fd)

    def _load(self) -> int:
        """Read all whole records; the offset of their end, where the file is cut."""
        end = 0
        with open(self._fd, "rb", closefd=False) as file:
            for record in file:
                if not self._take(record, end):
                    break
                end += len(record)
        num_cut = os.fstat(self._fd).st_size - end
        if num_cut:
            log.warning("%s: cut %d bytes of unfinished records", self.path, num_cut)
            os.ftruncate(self._fd, end)
            os.fsync(self._fd)
        return end

    def _take(self, record: bytes, offset: int) -> bool:
        """Note a record at `offset`; False if it is not whole."""
        checked = record[_CHECKSUM_BYTES:-1]
        if record[:_CHECKSUM_BYTES] != b"%08x " % zlib.crc32(checked) or record[-1:] != b"\n":
            return False
        number, kind, prompt, cached, completion, reasoning, content = checked.split(b" ", 6)
        tokens = TokenCounts(int(prompt), int(cached), int(completion), int(reasoning))
        start = offset + len(record) - 1 - len(content)
        self._note(int(number), kind.decode(), tokens, start, len(content))
        return True

    def _note(
        self, number: int, kind: str, tokens: TokenCounts, offset: int, num_bytes: int
    ) -> None:
        self._places[number] = _Place(offset, num_bytes, kind)
        self.tokens += tokens
        if kind == OUTPUT:
            self.num_completed += 1
        else:
            self.num_failed += 1


def sync_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk: a loss of power would undo renames."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_at(fd: int, content: bytes, offset: int) -> None:
    left = memoryview(content)
    while left:
        num_written = os.pwrite(fd, left, offset)
        left, offset = left[num_written:], offset + num_written
