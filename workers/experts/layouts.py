"""What the rows of an arena are, and how they become an expert in device memory.

Plain experts come as neurons: any of them can be moved alone, and is unpacked into the layout that
`linear` reads. Quantised ones come as pieces of that layout itself: they are copied. Knows rows and
memory; nothing of who asks for which, or when.
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
from penstock.workers.experts.expert_file import PIECE_BYTES, TWIN_GROUP, Manifest
from penstock.workers.weights.sources import DTYPES


class Form(Protocol):
    """How an expert lies in a slot of one device."""

    @property
    def device(self) -> torch.device: ...

    @property
    def num_bytes(self) -> int:
        """Device memory of one expert."""

    def place(self, memory: Tensor) -> Expert:
        """The expert in zeroed `memory`, uint8 [num_bytes], to be filled by `write`."""

    def write(
        self, memory: Tensor, expert: Expert, rows: Tensor, places: Tensor, is_twin: bool
    ) -> None:
        """Write `rows` of the arena, uint8 [n, bytes of a row], into `expert`, which `place` put
        into `memory`; `places` int64 [n] says which they are. All on the device."""


@dataclass(frozen=True, slots=True)
class NeuronForm:
    """Neurons, or their int8 twins, of a model that computes in `dtype`."""

    facts: Manifest
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return expert_bytes(self.facts.hidden, self.facts.inner, self.dtype, self.device)

    def place(self, memory: Tensor) -> Expert:
        return empty_expert(self.facts.hidden, self.facts.inner, self.dtype, memory)

    def write(
        self, memory: Tensor, expert: Expert, rows: Tensor, places: Tensor, is_twin: bool
    ) -> None:
        if is_twin:
            values = dequantize_neurons(rows, self.facts.hidden, TWIN_GROUP)
        else:
            values = rows.view(DTYPES[self.facts.dtype])
        write_neurons(expert, values.to(self.dtype), places)


@dataclass(frozen=True, slots=True)
class PackedForm:
    """Pieces of experts that are packed already."""

    image: ExpertImage
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return -(-self.image.num_bytes // PIECE_BYTES) * PIECE_BYTES

    def place(self, memory: Tensor) -> Expert:
        return self.image.view(memory)

    def write(
        self, memory: Tensor, expert: Expert, rows: Tensor, places: Tensor, is_twin: bool
    ) -> None:
        # By words: byte by byte, a CPU copies at a quarter of the speed.
        words = memory.view(torch.int64).view(-1, PIECE_BYTES // 8)
        words.index_copy_(0, places, rows.view(torch.int64))
