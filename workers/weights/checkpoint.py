"""The tensors of a safetensors checkpoint: their place in its files, checked before any is read.

Pickle files are never opened: they can run code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor

from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.model_config import read_json

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
SCORE_HEAD = "score.weight"  # of a reranker, in the place of the LM head
PREFIX = "model."  # of the names of all tensors but the LM head
# Of a language model with other parts, images' for one, by older and by newer files.
_TEXT_PREFIXES = {
    "language_model.model.": PREFIX,
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": PREFIX,
}
INDEX_NAME = "model.safetensors.index.json"
BYTES_PER_ELEMENT = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2,
    "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
FLOAT_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
CODE_DTYPES = {  # of quantised weights, and what belongs to them
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file: `num_bytes` from `offset` on, counted from the file's start."""

    name: str
    file: Path
    dtype: str  # as the format spells it: F32, BF16, ...
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def read(self, *, codes: bool = False) -> Tensor:
        """The tensor as stored, on the CPU. Raises LoadError unless it is a float tensor.

        With `codes`, also codes of quantised weights are read.
        """
        known = FLOAT_DTYPES | CODE_DTYPES if codes else FLOAT_DTYPES
        if self.dtype not in known:
            raise LoadError(
                f"{self.file}: tensor {self.name!r} is {self.dtype}; "
                f"weights must be one of {', '.join(known)}"
            )
        return self.read_bytes().view(known[self.dtype]).view(self.shape)

    def part(self, first: int, end: int) -> Self:
        """Its rows [first, end), of the first dimension."""
        row_bytes = self.num_bytes // self.shape[0]
        return replace(
            self,
            shape=(end - first, *self.shape[1:]),
            offset=self.offset + first * row_bytes,
            num_bytes=(end - first) * row_bytes,
        )

    def read_bytes(self) -> Tensor:
        """The bytes of the tensor, uint8. Raises LoadError."""
        raw = torch.empty(self.num_bytes, dtype=torch.uint8)
        self.read_into(raw)
        return raw

    def read_into(self, memory: Tensor) -> None:
        """The same into `memory`, uint8 [num_bytes] on the CPU."""
        try:
            with self.file.open("rb", buffering=0) as file:
                file.seek(self.offset)
                _read_into(file.readinto, memory.numpy().data)
        except (OSError, EOFError) as error:
            raise LoadError(f"{self.file}: tensor {self.name!r} cannot be read: {error}") from error


def part_of(stored: StoredTensor, index: int) -> StoredTensor:
    """Part `index` of a tensor along its first dimension; no more than that is read."""
    return replace(stored.part(index, index + 1), shape=stored.shape[1:])


def open_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the checkpoint in `folder`, single or sharded, by name.

    Of a model that was saved without its LM head, the names are given the `model.` that they lack:
    see `is_headless`. Of a model of several parts, only its language model's are returned, as if
    they were all. Raises LoadError if there is no safetensors file, or if the headers, the
    index and the file sizes contradict each other.
    """
    tensors = _open(folder)
    if any(name.startswith(tuple(_TEXT_PREFIXES)) for name in tensors):
        return _of_text(tensors)
    if "embed_tokens.weight" not in tensors:
        return tensors
    return {
        name if name.startswith("lm_head") else f"{PREFIX}{name}": stored
        for name, stored in tensors.items()
    }


def _of_text(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    found = {name: each for name, each in tensors.items() if name.startswith("lm_head.")}
    for name, stored in tensors.items():
        for prefix, ours in _TEXT_PREFIXES.items():
            if name.startswith(prefix):
                found[f"{ours}{name.removeprefix(prefix)}"] = stored
    return found


def is_headless(tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a checkpoint was saved from the decoder without the LM head: alone, or with a head
    that scores."""
    if SCORE_HEAD in tensors:
        return "lm_head.weight" not in tensors
    embedding = tensors.get(f"{PREFIX}embed_tokens.weight")
    return embedding is not None and embedding.name == "embed_tokens.weight"


def _open(folder: Path) -> dict[str, StoredTensor]:
    """By the names in its files."""
    if (folder / INDEX_NAME).is_file():
        return _open_sharded(folder)
    files = sorted(folder.glob("*.safetensors"))
    single = folder / "model.safetensors"
    if single in files or len(files) == 1:
        return read_header(single if single in files else files[0])
    if files:
        raise LoadError(f"{folder} holds {len(files)} safetensors files but no {INDEX_NAME}")
    pickled = sorted(path.name for path in folder.glob("*.bin")) + sorted(
        path.name for path in folder.glob("*.pt*")
    )
    if pickled:
        raise LoadError(
            f"{folder} holds only pickled weights ({pickled[0]}), which can run code when they are "
            "read and are never opened here; if you trust them, convert them once with "
            "transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise LoadError(f"{folder} holds no safetensors file")


def find_tensor(
    tensors: dict[str, StoredTensor], folder: Path, name: str, shape: tuple[int, ...] | None
) -> StoredTensor:
    """The tensor `name`. Raises LoadError if it is missing or has another shape."""
    stored = tensors.get(name)
    if stored is None:
        raise LoadError(f"{folder}: tensor {name!r} is missing from the checkpoint")
    if shape is not None and stored.shape != shape:
        raise LoadError(
            f"{stored.file}: tensor {name!r} has shape {list(stored.shape)}; its "
            f"configuration implies {list(shape)}"
        )
    return stored


def _open_sharded(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX_NAME
    try:
        weight_map = read_json(index).get("weight_map")
    except ConfigError as error:
        raise LoadError(str(error)) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{index} has no weight_map")
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted({str(value) for value in weight_map.values()}):
        # Shards lie next to their index: a path could point anywhere on the machine.
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise LoadError(f"{index}: {shard!r} is not the name of a safetensors file")
        for name, stored in read_header(folder / shard).items():
            if weight_map.get(name, shard) == shard and name not in tensors:
                tensors[name] = stored
    for name, shard in weight_map.items():
        if name not in tensors:
            raise LoadError(
                f"{folder / str(shard)}: tensor {name!r}, which the index names, is missing"
            )
    return tensors


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, after checking that they tile its data exactly.

    Format: header length (8 bytes, little-endian), JSON header, data. As in the format's
    reference implementation, tensors may neither overlap nor leave holes.
    """
    try:
        size = file.stat().st_size
        with file.open("rb", buffering=0) as opened:
            prefix = bytearray(8)
            _read_into(opened.readinto, memoryview(prefix))
            length = int.from_bytes(prefix, "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise LoadError(
                    f"{file}: not a safetensors file, or damaged: a header of {length} bytes is "
                    f"announced, and the file has {size}"
                )
            raw = bytearray(length)
            _read_into(opened.readinto, memoryview(raw))
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (OSError, EOFError) as error:
        raise LoadError(f"{file} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{file}: its header is damaged: {error}") from error
    if not isinstance(header, dict):
        raise LoadError(f"{file}: its header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _entry(file, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for stored in sorted(tensors.values(), key=lambda stored: (stored.offset, stored.num_bytes)):
        if stored.offset != end:
            raise LoadError(
                f"{file}: tensor {stored.name!r} begins at byte {stored.offset}, "
                f"where byte {end} was expected"
            )
        end += stored.num_bytes
        if end > size:
            raise LoadError(
                f"{file}: tensor {stored.name!r} ends at byte {end} of a file of {size}; the file "
                "is truncated: fetch it again"
            )
    if end != size:
        raise LoadError(f"{file}: {size - end} bytes follow its last tensor")
    return tensors


def _entry(file: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    def fail(why: str) -> LoadError:
        return LoadError(f"{file}: tensor {name!r}: {why}")

    if not isinstance(entry, dict):
        raise fail("its header entry is not a JSON object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BYTES_PER_ELEMENT:
        raise fail(f"unknown dtype {dtype!r}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise fail(f"shape {shape!r} with data_offsets {offsets!r} is not a valid entry")
    begin, end = offsets
    num_bytes = math.prod(shape) * BYTES_PER_ELEMENT[dtype]
    if end - begin != num_bytes:
        raise fail(f"{dtype} {shape} takes {num_bytes} bytes, but its entry spans {end - begin}")
    return StoredTensor(name, file, dtype, tuple(shape), data_start + begin, num_bytes)


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _read_into(readinto: Callable[[memoryview], int | None], buffer: memoryview) -> None:
    """Fill `buffer` or raise EOFError: one read call returns at most about 2 GiB."""
    while buffer:
        count = readinto(buffer)
        if not count:
            raise EOFError("unexpected end of file")
        buffer = buffer[count:]
