"""Reads the header of a GGUF file: its metadata, and the type and place of each tensor.

No size in a file is trusted: each is compared with the bytes that are left before anything is read
or made, and tensors must lie inside the file without overlap. The format: magic, version, counts;
`count` pairs of key and typed value; `count` entries of name, dimensions (innermost first), type
and offset; padding to `general.alignment`; data. Little endian.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from penstock.workers.errors import ConfigError
from penstock.workers.gguf.header_reader import HeaderReader

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)  # which differ in nothing that a little-endian machine reads
MAX_NAME_BYTES = 1 << 16
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

# Types of metadata values.
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class BlockType:
    """How elements of a tensor are stored: `num_bytes` for each `elements` in a row."""

    name: str
    elements: int
    num_bytes: int


BLOCK_TYPES: Mapping[int, BlockType] = MappingProxyType(
    {
        0: BlockType("F32", 1, 4),
        1: BlockType("F16", 1, 2),
        2: BlockType("Q4_0", 32, 18),
        3: BlockType("Q4_1", 32, 20),
        6: BlockType("Q5_0", 32, 22),
        7: BlockType("Q5_1", 32, 24),
        8: BlockType("Q8_0", 32, 34),
        12: BlockType("Q4_K", 256, 144),
        13: BlockType("Q5_K", 256, 176),
        14: BlockType("Q6_K", 256, 210),
        30: BlockType("BF16", 1, 2),
    }
)
# Named in the refusal.
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `num_bytes` from `offset` on, counted from the file's start."""

    name: str
    type: BlockType
    shape: tuple[int, ...]  # outermost first, as elsewhere here: a linear layer is [out, in]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says before its data. Arrays in `metadata` are lists, or tuples of numbers."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


# Of files and their versions; None: outside of `headers_kept`.
_kept: ContextVar[dict[Any, GgufHeader] | None] = ContextVar("kept headers", default=None)


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` is, or that is the model in the folder `path`; None: there is none.

    A folder with a config.json holds a checkpoint of another kind. Raises ConfigError if it is not
    clear which of several files is meant.
    """
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted(each for each in path.glob(f"*{SUFFIX}") if each.is_file())
    if len(files) > 1:
        names = ", ".join(each.name for each in files[:5])
        raise ConfigError(f"{path} holds {len(files)} GGUF files ({names}); give one of them")
    return files[0] if files else None


@contextmanager
def headers_kept() -> Iterator[None]:
    """Within it, the header of a file is read once, as long as the file stays the same.

    A header has the names of all tokens, which take a tenth of a second to read; they are some MB,
    which nothing needs once a model is loaded.
    """
    headers: dict[Any, GgufHeader] = {}
    token = _kept.set(headers)
    try:
        yield
    finally:
        _kept.reset(token)
        headers.clear()  # tasks that were begun meanwhile have it, too


def read_header(file: Path) -> GgufHeader:
    """The header of a GGUF file. Raises ConfigError naming the file, and the key or tensor."""
    kept = _kept.get()
    try:
        with file.open("rb") as opened:
            stat = os.fstat(opened.fileno())
            version = (file, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if kept is not None and version in kept:
                return kept[version]
            header = read_header_of(file, opened)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if kept is not None:
        kept[version] = header
    return header


def read_header_of(file: Path, opened: BinaryIO) -> GgufHeader:
    """The same of an `opened` file, which may be elsewhere; `file` is what it is called."""
    return _header(file, HeaderReader(file, opened))


def _header(file: Path, reader: HeaderReader) -> GgufHeader:
    if reader.take(4, "its first bytes") != MAGIC:
        raise ConfigError(f"{file} is not a GGUF file")
    version = reader.number("I", "its version")
    if version not in VERSIONS:
        big_endian = int.from_bytes(struct.pack("<I", version), "big") in VERSIONS
        what = "is big-endian" if big_endian else f"has version {version} of the format"
        raise ConfigError(
            f"{file} {what}; supported are versions {VERSIONS}, little-endian: convert the model "
            "again with a current llama.cpp"
        )
    num_tensors = reader.count(24, "the number of tensors")  # the least that an entry takes
    num_pairs = reader.count(13, "the number of metadata pairs")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = reader.text("a key", MAX_NAME_BYTES)
        if key in metadata:
            raise ConfigError(f"{file}: the key {key!r} occurs twice")
        metadata[key] = _value(reader, key)
    entries = [_entry(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_sound = type(alignment) is int and 1 <= alignment <= MAX_ALIGNMENT
    if not is_sound or alignment & (alignment - 1):
        raise ConfigError(
            f"{file}: general.alignment is {alignment!r}; a power of two up to {MAX_ALIGNMENT} "
            "was expected"
        )
    start = -(-reader.position // alignment) * alignment
    return GgufHeader(file, metadata, _placed(file, entries, start, alignment, reader.size))


def _value(reader: HeaderReader, key: str) -> Any:
    kind = reader.number("I", f"the type of {key!r}")
    if kind != _ARRAY:
        return _scalar(reader, kind, key)
    kind = reader.number("I", f"the type of {key!r}")
    if kind == _STRING:
        return reader.texts(reader.count(8, f"the length of {key!r}"), key)
    if kind not in _NUMBERS:
        raise ConfigError(f"{reader.file}: {key!r} is an array of type {kind}, which is unknown")
    width = struct.calcsize("<" + _NUMBERS[kind])
    count = reader.count(width, f"the length of {key!r}")
    return struct.unpack(f"<{count}{_NUMBERS[kind]}", reader.take(count * width, repr(key)))


def _scalar(reader: HeaderReader, kind: int, key: str) -> Any:
    if kind == _STRING:
        return reader.text(key)
    if kind not in _NUMBERS:
        raise ConfigError(f"{reader.file}: {key!r} is of type {kind}, which is unknown")
    return reader.number(_NUMBERS[kind], repr(key))


def _entry(reader: HeaderReader) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset of one tensor, as they stand there."""
    name = reader.text("the name of a tensor", MAX_NAME_BYTES)
    num_dimensions = reader.number("I", f"tensor {name!r}")
    if num_dimensions > MAX_DIMENSIONS:
        raise ConfigError(
            f"{reader.file}: tensor {name!r} has {num_dimensions} dimensions; the format has at "
            f"most {MAX_DIMENSIONS}"
        )
    shape = [reader.number("Q", f"tensor {name!r}") for _ in range(num_dimensions)]
    kind = reader.number("I", f"tensor {name!r}")
    return name, tuple(reversed(shape)), kind, reader.number("Q", f"tensor {name!r}")


def _placed(
    file: Path,
    entries: list[tuple[str, tuple[int, ...], int, int]],
    start: int,
    alignment: int,
    size: int,
) -> dict[str, TensorInfo]:
    """The tensors by name, whose data begins at byte `start` of `size`."""
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ConfigError(f"{file}: tensor {name!r} occurs twice")
        if kind not in BLOCK_TYPES:
            known = ", ".join(each.name for each in BLOCK_TYPES.values())
            raise ConfigError(
                f"{file}: tensor {name!r} is stored as {_OTHER_TYPES.get(kind, f'type {kind}')}, "
                f"which is not supported; give a file of the same model in {known}"
            )
        block = BLOCK_TYPES[kind]
        width = shape[-1] if shape else 1
        if width % block.elements:
            raise ConfigError(
                f"{file}: tensor {name!r} has rows of {width}, which is no multiple of the "
                f"{block.elements} elements in a block of {block.name}"
            )
        num_bytes = math.prod(shape) // block.elements * block.num_bytes
        if offset % alignment or start + offset + num_bytes > size:
            raise ConfigError(
                f"{file}: tensor {name!r} of {num_bytes} bytes at byte {start + offset} does not "
                f"lie in the file of {size} bytes; the file is truncated or damaged: fetch it again"
            )
        tensors[name] = TensorInfo(name, block, shape, start + offset, num_bytes)
    end, before = start, ""
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.num_bytes)):
        if info.offset < end:
            raise ConfigError(f"{file}: tensors {before!r} and {info.name!r} overlap")
        end, before = info.offset + info.num_bytes, info.name
    return tensors
