"""Writes an expert file straight from safetensors, one expert after another in bounded memory."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from penstock.kernels.neurons import quantize_neurons
from penstock.workers.errors import LoadError
from penstock.workers.experts.checkpoint import NAMES, CheckpointExperts, rows_of
from penstock.workers.experts.expert_file import (
    Bytes,
    ExpertEntry,
    ExpertShare,
    Manifest,
    block_bytes,
    checksums_of,
    digest_of,
)
from penstock.workers.experts.packed import PackedExperts

MANIFEST_SUFFIX = ".json"
PARTIAL_SUFFIX = ".partial"


def write_expert_file(
    experts: CheckpointExperts,
    path: Path,
    compute: torch.dtype,
    *,
    epoch: int = 1,
    copies: str = "",
    shares: Sequence[ExpertShare] = (),
    on_bytes: Callable[[int], object] = lambda _: None,
) -> Manifest:
    """Write the expert file for models that compute in `compute` to `path`, and its manifest next
    to it. `path` appears only when the file is complete; only this user can read it. With
    `copies`, one of COPIES, each expert is followed by its copy by neurons in that format. With
    `shares`, it has the experts of these only. `on_bytes` is called with the number of bytes after
    each write.

    Raises LoadError for a checkpoint that does not match its config, or where there is no room.
    """
    dtype, config = experts.dtype(compute), experts.config
    packed = PackedExperts(experts, compute) if experts.is_packed else None
    blank = Manifest(
        path=str(path),
        epoch=epoch,
        checkpoint=experts.identity(compute, copies),
        dtype=NAMES[dtype],
        hidden=config.hidden_size,
        inner=config.moe_intermediate_size,
        num_experts=config.num_experts,
        layers=experts.layers,
        num_bytes=0,
        entries=(),
        copies=copies,
        routers=experts.routers(),
        packed_bytes=0 if packed is None else packed.num_bytes,
    )
    blank = blank.part(shares)
    kinds = (0, config.num_experts) if copies else (0,)  # ids of an expert, and of its copy
    each_bytes = sum(block_bytes(blank.num_rows_of(e), blank.row_bytes_of(e)) for e in kinds)
    blank = replace(blank, num_bytes=blank.num_all * each_bytes)

    def all_rows() -> Iterator[tuple[int, int, Bytes]]:
        for layer, expert in blank.experts():
            rows = None
            if packed is None or copies:
                rows = rows_of(experts.parts(layer, expert), dtype)
            if packed is not None:
                yield layer, expert, packed.rows(layer, expert)
            elif rows is not None:
                yield layer, expert, rows.view(torch.uint8).numpy()
            if copies and rows is not None:
                copy = quantize_neurons(rows, copies)
                yield layer, config.num_experts + expert, copy.numpy()

    return write_rows(blank, all_rows(), on_bytes)


def write_rows(
    blank: Manifest,
    all_rows: Iterator[tuple[int, int, Bytes]],
    on_bytes: Callable[[int], object] = lambda _: None,
) -> Manifest:
    """Write `all_rows`, (layer, expert, rows), as the expert file that `blank` describes. Returns
    the manifest with its entries."""
    path, entries = Path(blank.path), []
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_partial_files(path.parent)
    partial, descriptor = _locked_file(path)
    try:
        _reserve(descriptor, blank.num_bytes, path.parent)
        offset = 0
        for layer, expert, rows in all_rows:
            _write(descriptor, rows.tobytes(), offset)
            _write(descriptor, checksums_of(rows).tobytes(), offset + rows.nbytes)
            entries.append(ExpertEntry(layer, expert, offset, rows.nbytes, digest_of(rows)))
            offset += block_bytes(*rows.shape)
            on_bytes(rows.nbytes)
        manifest = replace(blank, entries=tuple(entries))
        manifest.check()
        os.rename(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    _write_text(manifest_path(path), manifest.to_json())
    return manifest


def remove_partial_files(folder: Path) -> int:
    """Unlink the expert files whose writers ended before they were whole; how many there were.

    They have all their memory from the start, and on /dev/shm nothing else would ever free it. A
    writer holds a lock on its file, which ends with the process, also in another container.
    """
    num_removed = 0
    for partial in folder.glob(f".*{PARTIAL_SUFFIX}"):
        try:
            descriptor = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # it is whole, was removed, or is another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            partial.unlink()
            num_removed += 1
        except (BlockingIOError, FileNotFoundError):
            pass  # it is being written, or has just become whole
        finally:
            os.close(descriptor)
    return num_removed


def _locked_file(path: Path) -> tuple[Path, int]:
    """A new file beside `path`, to be renamed when it is whole, and its locked descriptor."""
    while True:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:  # else it was taken for a dead writer's meanwhile
            return partial, descriptor
        os.close(descriptor)


def read_manifest(path: Path) -> Manifest:
    """The manifest next to the expert file `path`. Raises LoadError if it is missing or invalid."""
    try:
        text = manifest_path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{manifest_path(path)} cannot be read: {error}") from error
    return replace(Manifest.from_json(text), path=str(path))


def remove_expert_file(path: Path) -> None:
    """Unlink the file and its manifest. Processes that have it mapped keep it; its memory is freed
    when the last one unmaps it."""
    path.unlink(missing_ok=True)
    manifest_path(path).unlink(missing_ok=True)


def manifest_path(path: Path) -> Path:
    return path.with_name(path.name + MANIFEST_SUFFIX)


def _reserve(descriptor: int, num_bytes: int, folder: Path) -> None:
    """Allocate the whole file now: on /dev/shm, running out of space later would kill the reader
    with SIGBUS."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise LoadError(f"{folder}: the expert store cannot be written: {error}") from error
        facts = os.statvfs(folder)
        free = facts.f_bavail * facts.f_frsize
        raise LoadError(
            f"{folder} has room for {free / 2**30:.1f} GiB, the experts of this model take "
            f"{num_bytes / 2**30:.1f} GiB; name another folder with expert_store_dir, or enlarge "
            "this one (mount -o remount,size=... /dev/shm)"
        ) from error


def _write(descriptor: int, content: bytes, offset: int) -> None:
    left = memoryview(content)
    while left:  # one call writes at most about 2 GiB
        count = os.pwrite(descriptor, left, offset)
        left, offset = left[count:], offset + count


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.rename(partial, path)
