"""The folder of packed weights: what a file there stands for, and what is deleted for room.

A file's name has two digests. The first is of the model's files, of the settings that decide what
is packed, and of this CPU; the second of the code that packs. Where either differs, another file is
meant. A file gets its name when it is whole and on the disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from penstock import kernels, workers
from penstock.kernels.cpu import native
from penstock.workers.config import ModelOptions
from penstock.workers.errors import LoadError
from penstock.workers.packed import file as packed_file
from penstock.workers.packed.parts import Part, are_quantized
from penstock.workers.progress import KEEPING, Report, counted, size
from penstock.workers.weights.model_digest import local_digest

log = logging.getLogger("penstock.loader")

LEAST_BYTES = 64 << 20  # what is smaller is packed in less than a second
MOST_GROWTH = 4  # of files by packing: an embedding in 4 bits becomes one in 16
SUFFIX, UNFINISHED = ".safetensors", ".part"


@dataclass(frozen=True, slots=True)
class PackedCache:
    """A folder with files of packed weights of `max_bytes` together."""

    folder: Path
    max_bytes: int
    least_bytes: int = LEAST_BYTES

    @classmethod
    def of(cls, options: ModelOptions, device: str) -> Self | None:
        """That of the settings; None: none is used, as on a GPU, which packs weights itself."""
        if not options.packed_cache_gb or device != "cpu" or native.bound.library is None:
            return None
        folder = options.packed_cache_dir
        path = native.cache_folder() / "packed" if folder is None else Path(folder).expanduser()
        return cls(path, int(options.packed_cache_gb * 2**30))

    def entry(self, model: Path, num_bytes: int, settings: str) -> PackedEntry | None:
        """What is kept of the model in `model`, whose tensors have `num_bytes`, packed by these
        `settings`; None: it is too small. Raises LoadError."""
        if MOST_GROWTH * num_bytes < self.least_bytes:
            return None
        try:
            meant = f"{local_digest(model)} {settings} {native.cpu_facts()}"
            code = f"{native.loaded_name()} {_code_digest()}"
        except (OSError, ValueError) as error:
            raise LoadError(f"{model} cannot be read: {error}") from error
        return PackedEntry(self, _digest(meant), _digest(code))


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """What the cache has, or will have, of one model as one machine reads it."""

    cache: PackedCache
    meant: str
    code: str

    @property
    def path(self) -> Path:
        return self.cache.folder / f"{self.meant}-{self.code}{SUFFIX}"

    def read(self, report: Report, phase: str) -> dict[str, Part]:
        """The parts that are kept; none where there is no file, or a damaged one, which is
        deleted."""
        if not self.path.is_file():
            return {}
        began_s = time.monotonic()
        try:
            parts = packed_file.read(self.path, report, phase)
        except LoadError as error:
            log.warning("packed weights cannot be read, so they are packed again: %s", error)
            with contextlib.suppress(OSError):
                self.path.unlink()
            return {}
        with contextlib.suppress(OSError):  # a folder that may only be read
            os.utime(self.path)  # the last to be deleted
        log.info(
            "read %s of packed weights in %.1f s: %s",
            *(size(packed_file.num_bytes_of(parts)), time.monotonic() - began_s, self.path),
        )
        return parts

    def keep(self, built: Mapping[str, Part], report: Report) -> None:
        """Write them, if they took work and there is room; what is not kept is logged."""
        parts = packed_file.storable(built)
        num_bytes = packed_file.num_bytes_of(parts)
        if num_bytes < self.cache.least_bytes or not are_quantized(parts):
            return
        try:
            self._keep(parts, num_bytes, report)
        except OSError as error:
            log.warning("packed weights are not kept in %s: %s", self.cache.folder, error)

    def _keep(self, parts: Mapping[str, Part], num_bytes: int, report: Report) -> None:
        folder = self.cache.folder
        if num_bytes > self.cache.max_bytes:
            log.info("packed weights of %s are not kept: packed_cache_gb allows %s",
                     size(num_bytes), size(self.cache.max_bytes))  # fmt: skip
            return
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _own(self.path.with_suffix(UNFINISHED)) as unfinished:
            if unfinished is None or self.path.exists():  # another process writes it, or has
                return
            self._make_room(num_bytes)
            if (free := shutil.disk_usage(folder).free) < 2 * num_bytes:
                log.info(
                    "packed weights of %s are not kept: their disk has %s free, and as much again "
                    "should stay free: %s",
                    *(size(num_bytes), size(free), folder),
                )
                return
            with os.fdopen(os.dup(unfinished), "wb") as opened:
                packed_file.write(opened, parts, counted(report, KEEPING, num_bytes))
                opened.flush()
                os.fsync(unfinished)
            os.replace(self.path.with_suffix(UNFINISHED), self.path)
        log.info("kept %s of packed weights for the next start: %s", size(num_bytes), self.path)

    def _make_room(self, num_bytes: int) -> None:
        """Delete what other code has packed of the same, what writers have left that were killed,
        and the files that were used longest ago."""
        for path in self.cache.folder.glob(f"*{UNFINISHED}"):
            with _own(path, create=False):
                pass
        files = sorted(self.cache.folder.glob(f"*{SUFFIX}"), key=lambda each: each.stat().st_mtime)
        total = num_bytes + sum(each.stat().st_size for each in files)
        for path in files:
            is_older = path.name.startswith(f"{self.meant}-")
            if is_older or total > self.cache.max_bytes:
                total -= path.stat().st_size
                path.unlink(missing_ok=True)
                log.info("removed packed weights%s: %s", " of other code" * is_older, path)


@contextlib.contextmanager
def _own(path: Path, *, create: bool = True) -> Iterator[int | None]:
    """A descriptor of the empty file `path`, which no other process writes meanwhile; None: one
    does, or it is gone. It is deleted at the end, if it has that name still."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        yield None
        return
    try:
        if not _is_locked(fd, path):
            yield None
            return
        os.ftruncate(fd, 0)
        try:
            yield fd
        finally:
            if _has_name(fd, path):
                path.unlink(missing_ok=True)
    finally:
        os.close(fd)  # frees the lock, too


def _is_locked(fd: int, path: Path) -> bool:
    """Lock an open file, if no other process has, nor has given the file another name since."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return _has_name(fd, path)


def _has_name(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def stated(settings: Any) -> str:
    """Settings as text that is the same in each process: the order of a set is not."""
    if isinstance(settings, frozenset | set):
        return stated(sorted(settings))
    if isinstance(settings, tuple | list):
        return f"[{', '.join(map(stated, settings))}]"
    if dataclasses.is_dataclass(settings):
        fields = (each.name for each in dataclasses.fields(settings))
        return ", ".join(f"{name}={stated(getattr(settings, name))}" for name in fields)
    return repr(settings)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


@functools.cache
def _code_digest() -> str:
    """Of the Python that quantises and packs, or might."""
    hashed = hashlib.blake2b(digest_size=12)
    for package in (kernels, workers):
        folder = Path(package.__path__[0])
        for path in sorted(folder.rglob("*.py")):
            hashed.update(f"{path.relative_to(folder)}:".encode() + path.read_bytes())
    return hashed.hexdigest()
