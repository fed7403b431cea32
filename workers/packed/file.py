"""One file of packed weights: a safetensors file, with all that is no tensor as JSON in a tensor.

A linear's tensors are `name/field`, a plain tensor is `name`. The data lie in the order in which
they were packed. Each is read into memory of its own, in huge pages: mapped from the file, weights
would be read through pages of 4 KiB (kernels/cpu/huge_pages.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from penstock.kernels.cpu import huge_pages
from penstock.kernels.packed import can_be_described, described, from_description, tensors_of
from penstock.kernels.types import PackedLinear
from penstock.workers.errors import LoadError
from penstock.workers.packed.parts import Part
from penstock.workers.progress import Report, counted
from penstock.workers.weights.checkpoint import CODE_DTYPES, FLOAT_DTYPES, StoredTensor, read_header
from penstock.workers.weights.quantized_layout import bytes_of, file_header

FACTS = "facts"  # the name of the tensor of JSON
_DTYPES = FLOAT_DTYPES | CODE_DTYPES


def storable(parts: Mapping[str, Part]) -> dict[str, Part]:
    """Those that a file can hold, on the CPU."""
    return {
        name: part
        for name, part in parts.items()
        if (can_be_described(part) if isinstance(part, PackedLinear) else part.is_cpu)
    }


def num_bytes_of(parts: Mapping[str, Part]) -> int:
    """Of their tensors."""
    return sum(each.numel() * each.element_size() for each in _tensors(parts).values())


def write(file: BinaryIO, parts: Mapping[str, Part], on_bytes: Callable[[int], object]) -> None:
    """Write `storable` parts. `on_bytes`: called with the bytes of each tensor. Raises OSError."""
    linears = {n: described(each) for n, each in parts.items() if isinstance(each, PackedLinear)}
    text = bytearray(json.dumps(linears).encode())
    tensors = {FACTS: torch.frombuffer(text, dtype=torch.uint8), **_tensors(parts)}
    file.write(file_header((name, each.dtype, each.shape) for name, each in tensors.items()))
    for tensor in tensors.values():
        file.write(data := bytes_of(tensor))
        on_bytes(data.nbytes)


def read(file: Path, report: Report, phase: str) -> dict[str, Part]:
    """The parts in a file that `write` made. `report`: told of the bytes, in this phase.

    Raises LoadError where the file is not whole, or is another's.
    """
    stored = read_header(file)
    facts = _facts(file, stored.pop(FACTS, None))
    on_bytes = counted(report, phase, sum(each.num_bytes for each in stored.values()))
    tensors = dict(zip(stored, _read_all(list(stored.values()), on_bytes), strict=True))
    by_part: dict[str, dict[str, Tensor]] = {}
    plain: dict[str, Part] = {}
    for name, tensor in tensors.items():
        part, is_of_linear, field = name.rpartition("/")
        if is_of_linear:
            by_part.setdefault(part, {})[field] = tensor
        else:
            plain[name] = tensor
    try:
        linears = {name: from_description(facts[name], own) for name, own in by_part.items()}
    except (KeyError, TypeError) as error:
        raise LoadError(f"{file}: a weight is not described as it is stored: {error!r}") from error
    return {**plain, **linears}


def _facts(file: Path, stored: StoredTensor | None) -> dict[str, Any]:
    if stored is None:
        raise LoadError(f"{file}: holds no packed weights")
    try:
        facts = json.loads(stored.read_bytes().numpy().tobytes())
    except ValueError as error:
        raise LoadError(f"{file}: its description is damaged: {error}") from error
    if not isinstance(facts, dict):
        raise LoadError(f"{file}: its description is not a JSON object")
    return facts


def _read_all(stored: list[StoredTensor], on_bytes: Callable[[int], object]) -> list[Tensor]:
    """Read by all threads: a good part of the time is that of the kernel's copying."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        found = []
        for each, tensor in zip(stored, pool.map(_tensor, stored), strict=True):
            found.append(tensor)
            on_bytes(each.num_bytes)
        return found


def _tensor(stored: StoredTensor) -> Tensor:
    if stored.dtype not in _DTYPES:
        raise LoadError(f"{stored.file}: tensor {stored.name!r} is {stored.dtype}")
    tensor = huge_pages.empty(stored.shape, _DTYPES[stored.dtype])
    stored.read_into(tensor.view(-1).view(torch.uint8))
    return tensor


def _tensors(parts: Mapping[str, Part]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, part in parts.items():
        if isinstance(part, PackedLinear):
            found |= {f"{name}/{field}": tensor for field, tensor in tensors_of(part).items()}
        else:
            found[name] = part
    return found
