"""An expert MLP in memory of a fixed size that is written neuron by neuron.

A neuron's row is [gate | up | down], 3 * hidden numbers: row j of the gate and of the up matrix and
column j of the down matrix, which is all that one inner unit of the expert needs. Rows are written
into the layout in which `pack_linear` would leave the same matrices, so that a product has the same
bits wherever its weight came from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.cpu import native
from penstock.kernels.cpu.arguments import UNPACK_NEURONS
from penstock.kernels.matmul import empty_linear, linear_bytes
from penstock.kernels.moe.mlp import Expert

ALIGN_BYTES = 256


def expert_bytes(hidden: int, inner: int, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes that `empty_expert` takes, a multiple of 256."""
    gate_up, down = _sizes(hidden, inner, dtype, device)
    return gate_up + down


def empty_expert(hidden: int, inner: int, dtype: torch.dtype, memory: Tensor) -> Expert:
    """An expert of zeros in `memory`, uint8 [expert_bytes(...)], which must be zeroed.

    The padding of the layout stays zero: `write_neurons` writes only the neurons.
    """
    gate_up, down = _sizes(hidden, inner, dtype, memory.device)
    return (
        empty_linear(2 * inner, hidden, dtype, memory[:gate_up], transposed=False),
        empty_linear(hidden, inner, dtype, memory[gate_up : gate_up + down], transposed=True),
    )


def write_neurons(expert: Expert, rows: Tensor, places: Tensor) -> None:
    """Write neurons into `expert`, in place.

    `rows` [n, 3 * hidden] of the expert's dtype and on its device, rows dense; `places` int64 [n]
    is the neuron index of each, on the same device. One thread: this runs in parallel with a step.
    """
    gate_up, down = expert
    hidden, inner = gate_up.in_features, down.in_features
    assert rows.shape == (len(places), 3 * hidden) and rows.dtype == gate_up.payload.dtype
    assert rows.stride(1) == 1 and places.dtype == torch.int64 and places.is_contiguous()
    if gate_up.layout == "native":
        native.bound.library.pk_unpack_neurons(UNPACK_NEURONS.pack(
            native.DTYPES[rows.dtype], rows.data_ptr(), rows.stride(0), places.data_ptr(),
            len(places), gate_up.payload.data_ptr(), down.payload.data_ptr(), hidden, inner,
        ))  # fmt: skip
        return
    gate, up, down_columns = rows.split(hidden, dim=1)
    gate_up.payload.index_copy_(0, places, gate)
    gate_up.payload.index_copy_(0, places + inner, up)
    down.payload.T.index_copy_(0, places, down_columns)  # neurons are rows in memory here


def neuron_rows(gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """`gate` and `up` [I, hidden], `down` [hidden, I] -> rows of all neurons [I, 3 * hidden]."""
    return torch.cat([gate, up, down.T], dim=1)


def _sizes(hidden: int, inner: int, dtype: torch.dtype, device: torch.device) -> tuple[int, int]:
    shapes = (2 * inner, hidden), (hidden, inner)
    sizes = [-(-linear_bytes(*shape, dtype, device) // ALIGN_BYTES) for shape in shapes]
    return sizes[0] * ALIGN_BYTES, sizes[1] * ALIGN_BYTES
