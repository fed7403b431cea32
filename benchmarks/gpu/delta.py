"""Checks and timings of linear attention, gated DeltaNet, for check.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.cases import DEVICE, HALF, Checks, Triples, Work, starts_of
from penstock.kernels.delta_types import DeltaState, DeltaWeights, StateRows
from penstock.kernels.reference import delta as reference
from penstock.kernels.triton import delta as delta_triton

# Key heads, value heads, key_dim, value_dim, taps.
SHAPES = ((2, 4, 16, 32, 4), (1, 3, 5, 7, 4), (1, 2, 128, 128, 4))
QWEN3_NEXT = (16, 32, 128, 128, 4)


class Layer:
    """Random weights and states of one layer, in as many slots as `num_sequences` need twice."""

    def __init__(self, shape: tuple[int, ...], num_sequences: int, dtype: torch.dtype):
        nk, nv, dk, dv, taps = shape
        self.channels, self.values, self.heads = 2 * nk * dk + nv * dv, nv * dv, nv
        self.weights = DeltaWeights(
            conv=_random(taps, self.channels),
            decay=-_random(nv).exp(),
            dt_bias=_random(nv),
            norm=1 + 0.2 * _random(dv),
            eps=1e-6,
            num_key_heads=nk,
            key_dim=dk,
        )
        slots = 2 * num_sequences
        self.states = DeltaState(
            _random(slots, taps - 1, self.channels).to(dtype), 0.1 * _random(slots, nv, dk, dv)
        )

    def inputs(self, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        widths = [self.channels, self.values, 2 * self.heads]
        mixed, z, ba = _random(num_rows, sum(widths)).to(dtype).split(widths, dim=1)
        return mixed, z, ba


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def rows_of(lengths: Sequence[int]) -> StateRows:
    """Each sequence goes on from the slot of its number, and writes the one after all of these."""
    count = torch.arange(len(lengths) + 1, dtype=torch.int32, device=DEVICE)
    after = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return StateRows(starts_of(lengths), count[:-1], count, after, count[:-1] + len(lengths))


def check_gated_delta(dtype: torch.dtype) -> Triples:
    for shape in SHAPES:
        lengths = [1, 9, 1]
        layer = Layer(shape, len(lengths), dtype)
        inputs, rows = layer.inputs(sum(lengths), dtype), rows_of(lengths)
        last, matrix = (each.clone() for each in (layer.states.last, layer.states.matrix))
        expected = reference.gated_delta(
            *inputs, layer.weights, DeltaState(last, matrix), rows, torch.empty_like(inputs[1])
        )
        found = delta_triton.gated_delta(
            *inputs, layer.weights, layer.states, rows, torch.empty_like(inputs[1])
        )
        name = "{}+{} heads of {} x {}".format(*shape)
        yield name, found, expected
        yield f"{name}, states", layer.states.matrix, matrix
        yield f"{name}, inputs", layer.states.last, last


def check_gate_mul(dtype: torch.dtype) -> Triples:
    for num_rows, dim in ((1, 1), (3, 63), (2, 1500)):
        x, gate = _random(2, num_rows, dim).to(dtype)
        expected = reference.gate_mul_(x.clone(), gate)
        yield f"{num_rows} x {dim}", delta_triton.gate_mul_(x, gate), expected


CHECKS: Checks = {"gated_delta": check_gated_delta, "gate_mul_": check_gate_mul}


def works(tiny: bool) -> Iterator[Work]:
    """The shape of Qwen3-Next: decode rows of many sequences, and a prompt."""
    shape = SHAPES[0] if tiny else QWEN3_NEXT
    for num_sequences, length in ((2, 1), (1, 5)) if tiny else ((1, 1), (64, 1), (1, 2048)):
        layer = Layer(shape, num_sequences, HALF)
        mixed, z, ba = layer.inputs(num_sequences * length, HALF)
        rows, out = rows_of([length] * num_sequences), torch.empty_like(z)
        state_bytes = 2 * num_sequences * layer.states.matrix[0].nbytes
        yield Work(
            "gated_delta",
            f"{num_sequences} sequences, {length} tokens each",
            partial(delta_triton.gated_delta, mixed, z, ba, layer.weights, layer.states, rows, out),
            state_bytes + mixed.nbytes + z.nbytes + ba.nbytes + out.nbytes,
        )
