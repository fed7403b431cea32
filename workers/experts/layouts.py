"""How rows of the expert file become an expert in device memory.

Rows of plain experts are neurons: each can be copied alone, and is unpacked into the layout that
`linear` reads. Rows of quantised experts are pieces of that layout itself: they are only copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.expert_image import ExpertImage
from penstock.kernels.expert_rows import (
    dequantize_neurons,
    empty_expert,
    expert_bytes,
    write_neurons,
)
from penstock.kernels.moe import Expert
from penstock.workers.experts.expert_file import INT8_GROUP, PIECE_BYTES, Manifest
from penstock.workers.weights.sources import DTYPES


class ExpertLayout(Protocol):
    """The layout of an expert in a slot of one device."""

    @property
    def device(self) -> torch.device: ...

    @property
    def num_bytes(self) -> int:
        """Device memory of one expert."""

    def place(self, memory: Tensor) -> Expert:
        """The expert in zeroed `memory`, uint8 [num_bytes], to be filled by `write`."""

    def write(
        self, memory: Tensor, expert: Expert, rows: Tensor, row_indices: Tensor, is_int8_copy: bool
    ) -> None:
        """Write `rows` of the expert file, uint8 [n, bytes of a row], into `expert`, which `place`
        put into `memory`; `row_indices` int64 [n] are their positions. All on the device."""


@dataclass(frozen=True, slots=True)
class NeuronLayout:
    """Experts by neurons, or int8 copies of neurons, for a model that computes in `dtype`."""

    facts: Manifest
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return expert_bytes(self.facts.hidden, self.facts.inner, self.dtype, self.device)

    def place(self, memory: Tensor) -> Expert:
        return empty_expert(self.facts.hidden, self.facts.inner, self.dtype, memory)

    def write(
        self, memory: Tensor, expert: Expert, rows: Tensor, row_indices: Tensor, is_int8_copy: bool
    ) -> None:
        if is_int8_copy:
            values = dequantize_neurons(rows, self.facts.hidden, INT8_GROUP)
        else:
            values = rows.view(DTYPES[self.facts.dtype])
        write_neurons(expert, values.to(self.dtype), row_indices)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Quantised experts, packed in the file as the device reads them."""

    image: ExpertImage
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return -(-self.image.num_bytes // PIECE_BYTES) * PIECE_BYTES

    def place(self, memory: Tensor) -> Expert:
        return self.image.view(memory)

    def write(
        self, memory: Tensor, expert: Expert, rows: Tensor, row_indices: Tensor, is_int8_copy: bool
    ) -> None:
        # By words: byte by byte, a CPU copies at a quarter of the speed.
        words = memory.view(torch.int64).view(-1, PIECE_BYTES // 8)
        words.index_copy_(0, row_indices, rows.view(torch.int64))
