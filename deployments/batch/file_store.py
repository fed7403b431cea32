"""Uploaded files and the results of batches, in a data folder that ingresses share.

Layout: `OWNER/files/ID` is the content and `OWNER/files/ID.json` its record, written last: a file
without a record does not exist. OWNER is a digest of the principal, so one tenant cannot reach the
files of another. Ids are random and made here; no name from a client is part of a path.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from penstock.deployments.batch.part_file import sync_folder

MAX_FILE_BYTES = 200_000_000
MAX_OWNER_BYTES = 20 * MAX_FILE_BYTES  # of all the files of one tenant
MAX_OWNER_FILES = 10_000
MAX_FILENAME_CHARS = 255
DEFAULT_TTL_S = 30 * 86400
UPLOAD_TTL_S = 3600.0  # after which an interrupted upload is removed
PRIVATE = 0o700  # mode of folders that hold requests and answers
FILE_ID = re.compile(r"file-[0-9a-f]{32}")


class StoreFull(Exception):
    """One API key has reached its limit of files or of bytes."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The record of a file. Times are whole seconds of Unix time."""

    id: str
    filename: str  # the client's name for it; only shown, never part of a path
    purpose: str  # "batch" or "batch_output"
    num_bytes: int
    created_at: int
    expires_at: int | None


class FileStore:
    """The files of all owners below one folder. Every call may block on the disk."""

    def __init__(self, folder: Path):
        self._folder = folder

    def of(self, principal: str) -> OwnerFiles:
        """The files of one tenant; "" where the server has no keys."""
        return OwnerFiles(owner_folder(self._folder, principal))

    def sweep(self) -> None:
        """Remove expired files, and interrupted uploads."""
        for owner in sorted(self._folder.glob("*/files")):
            OwnerFiles(owner.parent).sweep()


def owner_folder(folder: Path, principal: str) -> Path:
    """The folder of one owner. `principal` may be any text."""
    return folder / hashlib.sha256(f"owner {principal}".encode()).hexdigest()[:32]


class OwnerFiles:
    """The files of one owner."""

    def __init__(self, folder: Path):
        self._folder = folder / "files"

    def list(self) -> list[StoredFile]:
        """All files that have not expired, the oldest first."""
        now_s = time.time()
        known = [self._read(path) for path in self._folder.glob("file-*.json")]
        found = [each for each in known if each is not None and not _is_over(each, now_s)]
        return sorted(found, key=lambda each: (each.created_at, each.id))

    def get(self, file_id: str) -> StoredFile | None:
        """The file of that id; None: there is none, or it has expired."""
        if FILE_ID.fullmatch(file_id) is None:
            return None
        file = self._read(self._folder / f"{file_id}.json")
        return None if file is None or _is_over(file, time.time()) else file

    def path(self, file: StoredFile) -> Path:
        """Where the content of a file is."""
        return self._folder / file.id

    def check_room(self, num_bytes: int) -> None:
        """Raise StoreFull if another file of `num_bytes` would exceed this owner's limits."""
        files = self.list()
        if len(files) >= MAX_OWNER_FILES:
            raise StoreFull(f"{len(files)} files are stored, the maximum; delete some of them")
        used = sum(each.num_bytes for each in files)
        if used + num_bytes > MAX_OWNER_BYTES:
            raise StoreFull(
                f"the stored files take {used} of at most {MAX_OWNER_BYTES} bytes, too many for "
                f"{num_bytes} more; delete some of them"
            )

    @contextlib.contextmanager
    def upload(self) -> Iterator[Upload]:
        """A new file to write to; it is removed in the end unless `Upload.keep` was called."""
        self._folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        file_id = new_file_id()
        path = self._folder / file_id
        with open(path, "xb") as content:
            upload = Upload(self, file_id, content)
            try:
                yield upload
            finally:
                if not upload.is_kept:
                    path.unlink(missing_ok=True)

    def adopt(self, file_id: str, source: Path, filename: str, ttl_s: int) -> StoredFile:
        """Make the finished file `source` the content of a file with this id. May be repeated."""
        if (known := self.get(file_id)) is not None:
            return known
        self._folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        link_or_copy(source, self._folder / file_id)
        num_bytes = source.stat().st_size
        return self.record(file_id, filename, "batch_output", num_bytes, ttl_s)

    def record(
        self, file_id: str, filename: str, purpose: str, num_bytes: int, ttl_s: int
    ) -> StoredFile:
        """Make the content that lies under `file_id` a file."""
        now = int(time.time())
        file = StoredFile(file_id, filename, purpose, num_bytes, now, now + ttl_s)
        write_json(self._folder / f"{file_id}.json", asdict(file))
        return file

    def delete(self, file: StoredFile) -> None:
        """Remove a file. A batch that reads it continues: it has the content open, or linked."""
        (self._folder / f"{file.id}.json").unlink(missing_ok=True)
        self.path(file).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove expired files, and contents of interrupted uploads."""
        now_s = time.time()
        for path in list(self._folder.glob("file-*.json")):
            file = self._read(path)
            if file is not None and _is_over(file, now_s):
                self.delete(file)
        for path in list(self._folder.glob("file-*")):
            with contextlib.suppress(FileNotFoundError):
                is_old = now_s - path.stat().st_mtime > UPLOAD_TTL_S
                if path.suffix != ".json" and is_old and self.get(path.name) is None:
                    path.unlink()

    def _read(self, path: Path) -> StoredFile | None:
        values = read_json(path)
        return None if values is None else StoredFile(**values)


class Upload:
    """A file that is being written."""

    def __init__(self, files: OwnerFiles, file_id: str, content: BinaryIO):
        self._files = files
        self._id = file_id
        self.content = content
        self.num_bytes = 0
        self.is_kept = False

    def write(self, data: bytes) -> None:
        self.content.write(data)
        self.num_bytes += len(data)

    def keep(self, filename: str, purpose: str, ttl_s: int) -> StoredFile:
        """Flush the content to the disk, and write its record."""
        self.content.flush()
        os.fsync(self.content.fileno())
        file = self._files.record(self._id, filename, purpose, self.num_bytes, ttl_s)
        self.is_kept = True
        return file


def new_file_id() -> str:
    return f"file-{ordered_hex()}"


def ordered_hex() -> str:
    """32 hexadecimal digits that sort by the time at which they were made: half of them nanoseconds
    of Unix time, half random. Lists, which are by whole seconds, are so in order within one."""
    return f"{time.time_ns():016x}{secrets.token_hex(8)}"


def link_or_copy(source: Path, to: Path) -> None:
    """Make `to` another name of the finished file `source`; a copy without hard links."""
    to.unlink(missing_ok=True)
    try:
        os.link(source, to)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(source, to)


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file that `write_json` wrote; None: there is no such file."""
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return values


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Replace the file by this content, atomically and durably."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with open(unfinished, "wb") as file:
        file.write(json.dumps(values).encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    sync_folder(path.parent)


def _is_over(file: StoredFile, now_s: float) -> bool:
    return file.expires_at is not None and file.expires_at <= now_s
