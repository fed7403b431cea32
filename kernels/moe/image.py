"""A packed expert as one contiguous run of bytes, and back: the unit that the expert cache moves.

The parts of both weights (codes, scales, zeros, or plain elements) follow one another exactly as
`linear` reads them, so that moving an expert is copying bytes, and a product has the same bits
wherever its weight came from. Devices, and CPUs with different vectors, read different layouts: the
bytes are valid only where packing the same weights would give the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.cpu import native
from penstock.kernels.matmul import backend_for
from penstock.kernels.moe.mlp import Expert
from penstock.kernels.packed import tensors_of, with_tensors
from penstock.kernels.quant import QuantizedWeight
from penstock.kernels.types import PackedLinear

ALIGN_BYTES = 256


def pack_for(
    weight: Tensor | QuantizedWeight, device: torch.device, bias: Tensor | None = None
) -> PackedLinear:
    """`weight` [N, K] and `bias` [N] on the CPU, in the layout that `device` reads; works without a
    GPU, too.

    Has the bits of `pack_linear`, except where that would take oneDNN's own layout for a plain
    weight. A GPU's layout is tested by its bytes, and has not yet been run on one.
    """
    if isinstance(weight, QuantizedWeight) or (
        device.type != "cuda" and native.usable(weight) is not None
    ):
        return backend_for(weight, device).pack_linear(weight, bias)
    return PackedLinear.of_floats(weight.contiguous(), weight, bias, "plain")


@dataclass(frozen=True, slots=True)
class _Part:
    name: str  # the payload's field; "" where the payload is a tensor itself; packed.BIAS
    shape: torch.Size
    dtype: torch.dtype
    offset: int  # bytes

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class ExpertImage:
    """Where the parts of an expert lie; experts packed from weights of one kind share it."""

    def __init__(self, expert: Expert):
        """As `expert` is packed; nothing of it is kept but shapes."""
        self.num_bytes = 0
        self._linears = [_hollow(packed) for packed in expert]
        self._parts: list[list[_Part]] = []
        for packed in expert:
            parts = []
            for name, tensor in tensors_of(packed).items():
                parts.append(_Part(name, tensor.shape, tensor.dtype, self.num_bytes))
                size = -(-parts[-1].num_bytes // ALIGN_BYTES)
                self.num_bytes += size * ALIGN_BYTES
            self._parts.append(parts)

    def bytes_of(self, expert: Expert) -> Tensor:
        """uint8 [num_bytes], zeros between the parts. Raises ValueError if it is packed otherwise,
        naming both kinds."""
        if ExpertImage(expert) != self:
            raise ValueError(f"{ExpertImage(expert)} instead of {self}")
        memory = torch.zeros(self.num_bytes, dtype=torch.uint8)
        for packed, parts in zip(expert, self._parts, strict=True):
            tensors = tensors_of(packed)
            for part in parts:
                _view(memory, part).copy_(tensors[part.name])
        return memory

    def view(self, memory: Tensor) -> Expert:
        """The expert whose bytes are, or will be, in `memory`, uint8 [at least num_bytes]."""
        gate_up, down = (
            with_tensors(packed, {part.name: _view(memory, part) for part in parts})
            for packed, parts in zip(self._linears, self._parts, strict=True)
        )
        return gate_up, down

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExpertImage) and str(self) == str(other)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        """For error messages and for equality."""
        return " and ".join(map(_kind, self._linears, self._parts))


def _hollow(packed: PackedLinear) -> PackedLinear:
    metas = {name: tensor.to("meta") for name, tensor in tensors_of(packed).items()}
    return with_tensors(packed, metas)


def _view(memory: Tensor, part: _Part) -> Tensor:
    return memory[part.offset : part.offset + part.num_bytes].view(part.dtype).view(part.shape)


def _kind(packed: PackedLinear, parts: list[_Part]) -> str:
    group: Any = getattr(packed.payload, "group", None)
    transform = ", Hadamard" * packed.hadamard
    shapes = [f"{part.name or 'values'} {list(part.shape)}" for part in parts]
    return (
        f"{packed.format} [{packed.out_features}, {packed.in_features}] of {packed.layout} layout "
        f"(group {group}{transform}; {', '.join(shapes)})"
    )
