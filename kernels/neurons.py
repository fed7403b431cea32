"""The MLP of an expert over chosen neurons, whose rows lie anywhere in a pool of rows.

A row is all that one neuron needs: [gate | up | down], as in moe/rows.py, of a float dtype, or a
copy of it in codes. int8: 3 * d codes, then an fp32 scale for each 64 numbers along d (the last
group of a part may be shorter). int4: for each 32 numbers along d 16 bytes, number i in the lower
and number 16 + i in the upper half of byte i, as code + 8, then a bf16 scale for each. Value = code
* scale. Only the chosen rows are read. A token's result depends on its neurons alone: not on where
their rows lie, not on other tokens, not on threads. They may come in several calls, as their rows
arrive; then it depends on which came in which call, too. Backends: Triton on a GPU, the native
library on a CPU, else plain PyTorch.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from penstock.kernels.cpu import native
from penstock.kernels.cpu.arguments import NEURON_MLP
from penstock.kernels.types import PartialSums

BLOCK = 16  # neurons that the native library adds up in one chain: NEURONS in csrc/neurons.h
NATIVE_FORMATS = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3}  # of rows, there
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INT8_GROUP, INT4_GROUP = 64, 32  # numbers that share a scale


class NeuronBackend(Protocol):
    """What Triton implements on a GPU, for pools that suit it."""

    def suits(self, pool: Tensor, format: str, dim: int) -> bool: ...

    def neuron_mlp(
        self, x: Tensor, pool: Tensor, format: str, places: Tensor, counts: Sequence[int],
        sums: PartialSums | None, out: Tensor,
    ) -> Tensor: ...  # fmt: skip


@functools.cache
def _triton() -> NeuronBackend:
    from penstock.kernels.triton import neurons  # Triton is not installed on every machine

    return neurons


@dataclass(frozen=True, slots=True, eq=False)
class PooledNeurons:
    """The neurons of one expert that each of n tokens uses, or one part of them."""

    pool: Tensor  # uint8 [rows, bytes of a row], dense
    format: str  # of a row: fp32, bf16, fp16, int8 or int4
    # int32, on a CPU: by token, in ascending order of its neurons, the row of each in the pool.
    places: Tensor
    counts: Sequence[int]  # of each token
    sums: PartialSums | None = None  # None: these are all


def neuron_mlp(x: Tensor, neurons: PooledNeurons, out: Tensor) -> Tensor:
    """sum_j silu(Wg[j].x) * (Wu[j].x) * Wd[:, j] over a token's neurons, in fp32, for each row of
    `x` [n, hidden] into `out` [n, hidden], which may be `x` itself; both have dense rows.

    A token without neurons gets zeros. `neurons.sums`: these are added to those of earlier calls,
    and `out` is left alone until the last one.
    """
    assert x.shape == out.shape and x.stride(1) == out.stride(1) == 1
    assert len(neurons.counts) == len(x) and sum(neurons.counts) == len(neurons.places)
    assert neurons.pool.is_contiguous() and neurons.places.dtype == torch.int32
    if x.is_cuda and _triton().suits(neurons.pool, neurons.format, x.shape[1]):
        given = neurons.pool, neurons.format, neurons.places, neurons.counts, neurons.sums
        return _triton().neuron_mlp(x, *given, out)
    library = native.usable(x)
    if library is None or neurons.format not in NATIVE_FORMATS:
        return _reference(x, neurons, out)
    num_blocks = sum(-(-count // BLOCK) for count in neurons.counts)
    sums = torch.empty(num_blocks, x.shape[1])
    ends, partial = array("q", accumulate(neurons.counts)), neurons.sums
    so_far = (0, True, True)
    if partial is not None:
        so_far = (partial.so_far.data_ptr(), partial.begins, partial.is_last)
    library.pk_neuron_mlp(NEURON_MLP.pack(
        native.DTYPES[x.dtype], x.data_ptr(), x.stride(0), neurons.pool.data_ptr(),
        neurons.pool.shape[1], NATIVE_FORMATS[neurons.format], neurons.places.data_ptr(),
        ends.buffer_info()[0], sums.data_ptr(), *so_far, out.data_ptr(), out.stride(0), *x.shape,
        torch.get_num_threads(),
    ))  # fmt: skip
    return out


def _reference(x: Tensor, neurons: PooledNeurons, out: Tensor) -> Tensor:
    """In plain PyTorch, a token at a time."""
    places, partial = neurons.places.to(x.device).split(list(neurons.counts)), neurons.sums
    for t, (row, into, chosen) in enumerate(zip(x, out, places, strict=True)):
        rows = neurons.pool.index_select(0, chosen)
        if neurons.format in FLOATS:
            values = rows.view(FLOATS[neurons.format]).float()
        else:
            values = dequantize_neurons(rows, x.shape[1], neurons.format)
        gate, up, down = values.split(x.shape[1], 1)
        state = row.float()
        found = (silu(gate @ state) * (up @ state)) @ down
        if partial is not None:
            so_far = partial.so_far[t]
            found = so_far.copy_(found) if partial.begins else so_far.add_(found)
        if partial is None or partial.is_last:
            into.copy_(found)
    return out


MIN_SCALE = 1e-30  # a group of zeros divides by it


def quantize_neurons(rows: Tensor, format: str) -> Tensor:
    """`rows` [n, 3 * d] of any float dtype -> uint8 [n, bytes of a copy]; codes are the nearest,
    half goes to even. An int4 scale is such that the number farthest from 0 has the code -8."""
    parts = rows.float().view(len(rows), 3, -1)
    if format == "int4":
        groups = _grouped(parts, INT4_GROUP)
        farthest = groups.gather(3, groups.abs().argmax(3, keepdim=True))
        scales = (farthest / -8).bfloat16()
        codes = (groups / _nonzero(scales.float())).round_().clamp_(-8, 7).add_(8).byte()
        both = codes[..., :16] | codes[..., 16:] << 4
        return torch.cat([each.flatten(1).view(torch.uint8) for each in (both, scales)], dim=1)
    groups = _grouped(parts, INT8_GROUP)
    scales = (groups.abs().amax(3, keepdim=True) / 127).clamp_(min=MIN_SCALE)
    codes = (groups / scales).round_().clamp_(-127, 127).to(torch.int8)
    codes = codes.flatten(2)[:, :, : parts.shape[2]]
    return torch.cat([each.flatten(1).view(torch.uint8) for each in (codes, scales)], dim=1)


def dequantize_neurons(quantized: Tensor, size: int, format: str) -> Tensor:
    """The inverse of `quantize_neurons` for rows of d = `size`: fp32 [n, 3 * d]."""
    num_rows = len(quantized)
    if format == "int4":
        num_groups = -(-size // INT4_GROUP)
        codes, scales = _split(quantized, 3 * num_groups * 16, torch.bfloat16)
        both = codes.view(num_rows, 3, num_groups, 16)
        groups = torch.cat([both & 15, both >> 4], 3).float() - 8
    else:
        codes, scales = _split(quantized, 3 * size, torch.float32)
        parts = codes.view(torch.int8).reshape(num_rows, 3, size).float()
        groups = _grouped(parts, INT8_GROUP)
    values = groups * scales.float().view(*groups.shape[:3], 1)
    return values.flatten(2)[:, :, :size].reshape(num_rows, 3 * size)


def _grouped(parts: Tensor, group: int) -> Tensor:
    """[n, 3, d] -> [n, 3, groups, group], filled up with zeros."""
    return pad(parts, (0, -parts.shape[2] % group)).unflatten(2, (-1, group))


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, MIN_SCALE, scales)


def _split(quantized: Tensor, num_bytes: int, scale: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales, dense."""
    codes, scales = quantized[:, :num_bytes], quantized[:, num_bytes:]
    # Contiguous is not enough: a row may begin where no number of the scales' dtype does.
    return codes.contiguous(), scales.clone(memory_format=torch.contiguous_format).view(scale)
