"""Finished tensors on the disk until their checkpoint is written: memory holds one layer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from penstock.workers.weights.checkpoint import StoredTensor
from penstock.workers.weights.quantized_layout import DTYPE_NAMES


class Spool:
    """Lists of tensors by name, appended to one file. The last list of a name counts."""

    def __init__(self, file: Path):
        self.file = file
        self._found: dict[str, tuple[StoredTensor, ...]] = {}

    def put(self, name: str, *tensors: Tensor) -> None:
        found = []
        with self.file.open("ab") as file:
            for tensor in tensors:
                raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
                shape = tuple(tensor.shape)
                found.append(
                    StoredTensor(
                        name, self.file, DTYPE_NAMES[tensor.dtype], shape, file.tell(), raw.nbytes
                    )
                )
                file.write(raw.data)
        self._found[name] = tuple(found)

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def take(self, name: str) -> list[Tensor]:
        return [stored.read(codes=True) for stored in self._found[name]]
