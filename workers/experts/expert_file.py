"""Experts of a MoE checkpoint in one shared file: its manifest, and its reader.

An expert is a block of rows, followed by a CRC-32 of each row; blocks begin on page boundaries. A
row is one neuron, [Wg[j] | Wu[j] | Wd[:, j]], in order; for quantised experts, a row is a piece of
the bytes that the device multiplies (packed.py). Expert e of E may have a copy by neurons in int8
or int4 (kernels/neurons.py) with the id E + e. The file lies in memory
(/dev/shm), and every process of the node maps it read-only: one copy a node. This module loads no
torch: the ingress and the command line import it. writer.py writes the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.workers.errors import LoadError

Bytes = npt.NDArray[np.uint8]
RowIndices = npt.NDArray[np.int64]  # rows of an expert: neurons, or pieces of packed ones

PAGE_BYTES = 4096
CHECKSUM_BYTES = 4
COPIES = ("int8", "int4")  # number formats of copies by neurons
PIECE_BYTES = 1024  # a row of a packed expert
NAMED_ROWS = 8  # of a damaged expert, in its error
ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # of a number, by dtype


class CorruptedExpert(RuntimeError):
    """Rows of an expert do not match their digest. Names file, layer, expert and rows."""

    def __init__(self, message: str, layer: int, expert: int):
        super().__init__(message, layer, expert)  # all arguments, so that it can be unpickled
        self.layer, self.expert = layer, expert

    def __str__(self) -> str:
        return str(self.args[0])


class ExpertShare(NamedTuple):
    """What one rank of a group has of a model's experts: some of each of some layers."""

    first_layer: int
    end_layer: int
    first_expert: int
    end_expert: int

    def has(self, layer: int, expert: int) -> bool:
        is_in_layer = self.first_layer <= layer < self.end_layer
        return is_in_layer and self.first_expert <= expert < self.end_expert


@dataclass(frozen=True, slots=True)
class ExpertEntry:
    """Where the rows of one expert lie, and what they hash to."""

    layer: int
    expert: int
    offset: int
    num_bytes: int  # of the rows; their checksums follow
    digest: str  # of the rows: BLAKE2b of 16 bytes, in hex


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of one expert file, published by its writer. Plain values: sent as JSON."""

    path: str
    epoch: int  # 1, 2, ...: counts how often one store has written the file
    checkpoint: str  # what it was made from: `checkpoint_identity`
    dtype: str  # a key of ITEM_BYTES
    hidden: int
    inner: int  # neurons of an expert
    num_experts: int  # of a layer
    layers: tuple[int, ...]  # those of the model that have experts
    num_bytes: int  # of the whole file
    entries: tuple[ExpertEntry, ...]
    copies: str = ""  # one of COPIES; "": experts have no copies
    routers: str = ""  # a digest of the model's routers: the same on every node
    packed_bytes: int = 0  # of an expert that lies as it is multiplied; 0: rows are neurons
    shares: tuple[ExpertShare, ...] = ()  # of the ranks that read it; empty: all experts

    @property
    def is_packed(self) -> bool:
        return self.packed_bytes > 0

    @property
    def num_rows(self) -> int:
        """Rows of an expert."""
        return math.ceil(self.packed_bytes / PIECE_BYTES) if self.is_packed else self.inner

    @property
    def row_bytes(self) -> int:
        return PIECE_BYTES if self.is_packed else 3 * self.hidden * ITEM_BYTES[self.dtype]

    @property
    def num_all(self) -> int:
        """Experts of all layers that the file has."""
        return sum(1 for _ in self.experts())

    def experts(self) -> Iterator[tuple[int, int]]:
        """(layer, expert) of each that the file has, in its order; not of copies."""
        for layer in self.layers:
            for expert in range(self.num_experts):
                if not self.shares or any(share.has(layer, expert) for share in self.shares):
                    yield layer, expert

    def part(self, shares: Sequence[ExpertShare]) -> Manifest:
        """The same file, for ranks that have `shares` of the experts; empty: all that it has.

        Raises LoadError if the file lacks some.
        """
        if not shares:
            return self
        wanted = replace(self, shares=tuple(shares))
        keys = set(wanted.experts())
        if not keys <= set(self.experts()):
            raise LoadError(f"{self.path} lacks experts that this rank computes")
        entries = tuple(e for e in self.entries if (e.layer, e.expert % self.num_experts) in keys)
        return replace(wanted, entries=entries)

    @property
    def num_known(self) -> int:
        """Expert ids of a layer, int8 copies included."""
        return self.num_experts * (2 if self.copies else 1)

    def is_copy(self, expert: int) -> bool:
        return expert >= self.num_experts

    def num_rows_of(self, expert: int) -> int:
        """Of `expert`, which may be a copy: those have a row a neuron."""
        return self.inner if self.is_copy(expert) else self.num_rows

    def row_bytes_of(self, expert: int) -> int:
        """Of one row of `expert`, which may be a copy."""
        return copy_bytes(self.hidden, self.copies) if self.is_copy(expert) else self.row_bytes

    def name_of(self, expert: int) -> str:
        """For messages."""
        copy = f", its {self.copies} copy," if self.is_copy(expert) else ""
        return f"expert {expert % self.num_experts}{copy}"

    def digests(self) -> dict[tuple[int, int], str]:
        return {(entry.layer, entry.expert): entry.digest for entry in self.entries}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Raises LoadError unless `text` is what `to_json` gave."""
        try:
            values = json.loads(text)
            entries = tuple(ExpertEntry(**entry) for entry in values.pop("entries"))
            layers = tuple(values.pop("layers"))
            shares = tuple(ExpertShare(*each) for each in values.pop("shares"))
            manifest = cls(entries=entries, layers=layers, shares=shares, **values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise LoadError(f"not a manifest of an expert store: {error}") from error
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raise LoadError unless each expert is there once, within the file."""
        if self.dtype not in ITEM_BYTES:
            raise LoadError(f"{self.path}: experts of an unknown dtype {self.dtype!r}")
        if self.copies not in ("", *COPIES):
            raise LoadError(f"{self.path}: copies in an unknown format {self.copies!r}")
        ids = (0, self.num_experts) if self.copies else (0,)  # of an expert, of its copy
        wanted = {(layer, expert + each) for layer, expert in self.experts() for each in ids}
        if set(self.digests()) != wanted or len(self.entries) != len(wanted):
            raise LoadError(f"{self.path}: the manifest does not name each expert exactly once")
        end = 0
        for entry in sorted(self.entries, key=lambda entry: entry.offset):
            row_bytes = self.row_bytes_of(entry.expert)
            num_rows = self.num_rows_of(entry.expert)
            if entry.num_bytes != num_rows * row_bytes or entry.offset < end:
                raise LoadError(
                    f"{self.path}: the manifest's entry of layer {entry.layer}, expert "
                    f"{entry.expert} does not fit the others"
                )
            end = entry.offset + block_bytes(num_rows, row_bytes)
        if end > self.num_bytes:
            raise LoadError(f"{self.path}: its experts end at byte {end} of {self.num_bytes}")


class RowSource(Protocol):
    """Where the rows of experts come from: a mapped file, or a store on another node."""

    manifest: Manifest

    @property
    def is_remote(self) -> bool:
        """Whether each call is a network round trip, so that rows of several experts are best
        requested together with `gather`. If false, `rows` costs nothing."""

    def gather(self, requests: Sequence[tuple[int, int, RowIndices]]) -> list[Bytes]:
        """Some rows of each (layer, expert, rows), in that order. Raises CorruptedExpert."""

    def rows(self, layer: int, expert: int) -> Bytes:
        """All rows, read-only [num_rows, row_bytes_of(expert)]. Raises CorruptedExpert."""

    def at(self, manifest: Manifest) -> RowSource:
        """A source for another epoch of the file. Raises LoadError if it cannot be opened."""


class ExpertFile:
    """A mapped expert file. Threads may share it; it stays readable after the file is unlinked."""

    is_remote = False

    def __init__(self, manifest: Manifest):
        """Raises LoadError if the file is missing, another user could write it, or its size is
        wrong."""
        self.manifest = manifest
        self._entries = {(entry.layer, entry.expert): entry for entry in manifest.entries}
        self._checked: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._all = _map(manifest)

    def at(self, manifest: Manifest) -> ExpertFile:
        return ExpertFile(manifest)

    def gather(self, requests: Sequence[tuple[int, int, RowIndices]]) -> list[Bytes]:
        """Copies of some rows of each (layer, expert, rows)."""
        return [self.rows(layer, expert)[row_indices] for layer, expert, row_indices in requests]

    def rows(self, layer: int, expert: int) -> Bytes:
        """All rows of one expert. The first time, their digest is checked."""
        entry = self._entries[layer, expert]
        rows = self._all[entry.offset : entry.offset + entry.num_bytes]
        rows = rows.reshape(self.manifest.num_rows_of(expert), self.manifest.row_bytes_of(expert))
        if (layer, expert) not in self._checked:
            self._check(entry, rows)
            with self._lock:
                self._checked.add((layer, expert))
        return rows

    def _check(self, entry: ExpertEntry, rows: Bytes) -> None:
        if digest_of(rows) == entry.digest:
            return
        end = entry.offset + entry.num_bytes
        stored = self._all[end : end + CHECKSUM_BYTES * len(rows)].view(np.uint32)
        bad = np.flatnonzero(checksums_of(rows) != stored).tolist()
        if not bad:
            where = "its digest does not match, although the checksums of its rows do"
        else:
            some = ", ".join(map(str, bad[:NAMED_ROWS])) + (", ..." if bad[NAMED_ROWS:] else "")
            is_whole = self.manifest.is_packed and not self.manifest.is_copy(entry.expert)
            what = f"pieces of {PIECE_BYTES} bytes" if is_whole else "neurons"
            where = f"{len(bad)} of its {len(rows)} {what} differ from what was written: {some}"
        raise CorruptedExpert(
            f"expert store {self.manifest.path} (epoch {self.manifest.epoch}): layer "
            f"{entry.layer}, {self.manifest.name_of(entry.expert)} is corrupted: {where}",
            entry.layer,
            entry.expert,
        )


def _map(manifest: Manifest) -> Bytes:
    path = Path(manifest.path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise LoadError(f"the expert store {path} cannot be opened: {error.strerror}") from error
    try:
        facts = os.fstat(descriptor)
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            raise LoadError(
                f"the expert store {path} is writable by other users, so it is not used"
            )
        if facts.st_size != manifest.num_bytes:
            raise LoadError(
                f"the expert store {path} has {facts.st_size} bytes; its manifest says "
                f"{manifest.num_bytes}"
            )
        mapped = mmap.mmap(descriptor, manifest.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(descriptor)
    return np.frombuffer(mapped, dtype=np.uint8)


def copies_for(mode: str, weights: str, copies: str) -> str:
    """The format of the copies that an expert file needs, for `moe_mode`, `weights` and
    `moe_copies`; "": none."""
    if mode == "quantized":
        return copies
    return weights if mode == "sparse" and weights in COPIES else ""


def copy_bytes(hidden: int, copies: str) -> int:
    """Of one neuron of a copy."""
    if copies == "int4":
        return 3 * math.ceil(hidden / 32) * (16 + 2)
    return 3 * (hidden + 4 * math.ceil(hidden / 64))


def block_bytes(num_rows: int, row_bytes: int) -> int:
    """Bytes of one expert in the file, a multiple of the page."""
    return math.ceil(num_rows * (row_bytes + CHECKSUM_BYTES) / PAGE_BYTES) * PAGE_BYTES


def digest_of(rows: Bytes) -> str:
    return hashlib.blake2b(rows.data, digest_size=16).hexdigest()


def checksums_of(rows: Bytes) -> npt.NDArray[np.uint32]:
    return np.array([zlib.crc32(row.data) for row in rows], dtype=np.uint32)
