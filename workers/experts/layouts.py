"""How rows of the expert file become an expert in device memory.

Rows of plain experts are neurons: each can be copied alone, and is unpacked into the layout that
`linear` reads. Rows of quantised experts are pieces of that layout itself: they are only copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.moe.image import ExpertImage
from penstock.kernels.moe.mlp import Expert
from penstock.kernels.moe.rows import empty_expert, expert_bytes, write_neurons
from penstock.kernels.neurons import dequantize_neurons
from penstock.workers.experts.expert_file import PIECE_BYTES, Manifest
from penstock.workers.weights.sources import DTYPES


class ExpertLayout(Protocol):
    """The layout of an expert in a slot of one device."""

    @property
    def device(self) -> torch.device: ...

    @property
    def num_bytes(self) -> int:
        """Device memory of one expert."""

    def place(self, memory: Tensor) -> tuple[Expert, ...]:
        """The expert in zeroed `memory`, uint8 [num_bytes], to be filled by `write`: once for each
        kind of layer."""

    def kind_of(self, layer: int) -> int:
        """Which of them an expert of `layer` is."""

    def write(
        self, memory: Tensor, expert: Expert, rows: Tensor, row_indices: Tensor, is_copy: bool
    ) -> None:
        """Write `rows` of the expert file, uint8 [n, bytes of a row], into `expert`, which `place`
        put into `memory`; `row_indices` int64 [n] are their positions. All on the device."""


@dataclass(frozen=True, slots=True)
class NeuronLayout:
    """Experts by neurons, or copies of neurons in codes, for a model that computes in `dtype`."""

    facts: Manifest
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return expert_bytes(self.facts.hidden, self.facts.inner, self.dtype, self.device)

    def place(self, memory: Tensor) -> tuple[Expert, ...]:
        return (empty_expert(self.facts.hidden, self.facts.inner, self.dtype, memory),)

    def kind_of(self, layer: int) -> int:
        return 0

    def write(
        self, memory: Tensor, expert: Expert, rows: Tensor, row_indices: Tensor, is_copy: bool
    ) -> None:
        if is_copy:
            values = dequantize_neurons(rows, self.facts.hidden, self.facts.copies)
        else:
            values = rows.view(DTYPES[self.facts.dtype])
        write_neurons(expert, values.to(self.dtype), row_indices)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Quantised experts, packed in the file as the device reads them.

    `images`: by kind of layer. `kinds`: the kind of each layer that has experts.
    """

    images: tuple[ExpertImage, ...]
    kinds: Mapping[int, int]
    device: torch.device

    @property
    def num_bytes(self) -> int:
        widest = max(image.num_bytes for image in self.images)
        return -(-widest // PIECE_BYTES) * PIECE_BYTES

    def place(self, memory: Tensor) -> tuple[Expert, ...]:
        return tuple(image.view(memory) for image in self.images)

    def kind_of(self, layer: int) -> int:
        return self.kinds[layer]

    def write(
        self, memory: Tensor, expert: Expert, rows: Tensor, row_indices: Tensor, is_copy: bool
    ) -> None:
        # By words: byte by byte, a CPU copies at a quarter of the speed.
        words = memory.view(torch.int64).view(-1, PIECE_BYTES // 8)
        words.index_copy_(0, row_indices, rows.view(torch.int64))
