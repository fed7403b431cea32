"""Gated DeltaNet on the CPU by the native library: packs the arguments of its functions.

The parameters mean what they mean in `kernels/delta.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.cpu import native
from penstock.kernels.cpu.arguments import DELTA, GATE_MUL
from penstock.kernels.delta_types import DeltaState, DeltaWeights, StateRows


def gated_delta(
    mixed: Tensor, z: Tensor, ba: Tensor, weights: DeltaWeights, states: DeltaState,
    rows: StateRows, out: Tensor,
) -> Tensor:  # fmt: skip
    native.bound.library.pk_delta(DELTA.pack(
        native.DTYPES[mixed.dtype], mixed.data_ptr(), mixed.stride(0), z.data_ptr(), z.stride(0),
        ba.data_ptr(), ba.stride(0), *(each.data_ptr() for each in weights.tensors), weights.eps,
        states.last.data_ptr(), states.last.stride(0), states.matrix.data_ptr(),
        states.matrix.stride(0), rows.starts.data_ptr(), rows.sources.data_ptr(),
        rows.write_starts.data_ptr(), rows.write_after.data_ptr(), rows.write_slots.data_ptr(),
        out.data_ptr(), out.stride(0), rows.sources.numel(), weights.conv.shape[0],
        weights.num_key_heads, weights.num_value_heads, weights.key_dim, weights.value_dim,
        torch.get_num_threads(),
    ))  # fmt: skip
    return out


def gate_mul_(x: Tensor, gate: Tensor) -> Tensor:
    native.bound.library.pk_gate_mul(GATE_MUL.pack(
        native.DTYPES[x.dtype], x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0),
        *x.shape, torch.get_num_threads(),
    ))  # fmt: skip
    return x
