"""Gated DeltaNet in plain PyTorch, token by token: the reference of `kernels/delta.py`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from penstock.kernels.delta_types import DeltaState, DeltaWeights, StateRows


def gated_delta(
    mixed: Tensor, z: Tensor, ba: Tensor, weights: DeltaWeights, states: DeltaState,
    rows: StateRows, out: Tensor,
) -> Tensor:  # fmt: skip
    starts, writes = rows.starts.tolist(), rows.write_starts.tolist()
    after, slots = rows.write_after.tolist(), rows.write_slots.tolist()
    for i, source in enumerate(rows.sources.tolist()):
        begin, end = starts[i], starts[i + 1]
        matrix = states.matrix[0].new_zeros(states.matrix.shape[1:])
        last = states.last[0].new_zeros(states.last.shape[1:])
        if source >= 0:
            matrix, last = states.matrix[source].clone(), states.last[source].clone()
        inputs = torch.cat([last, mixed[begin:end]])  # row t sees inputs [t, t + taps)
        own = dict(zip(after[writes[i] : writes[i + 1]], slots[writes[i] : writes[i + 1]]))
        for row in range(end - begin):
            seen = inputs[row : row + weights.conv.shape[0]].float()
            qkv = silu((seen * weights.conv).sum(0))
            read = _update(matrix, qkv, ba[begin + row].float(), weights)
            normed = torch.nn.functional.rms_norm(read, read.shape[-1:], weights.norm, weights.eps)
            gate = silu(z[begin + row].float()).view_as(normed)
            out[begin + row] = (normed * gate).flatten()
            if row + 1 in own:
                states.matrix[own[row + 1]] = matrix
                states.last[own[row + 1]] = inputs[row + 1 : row + weights.conv.shape[0]]
    return out


def _update(matrix: Tensor, qkv: Tensor, ba: Tensor, weights: DeltaWeights) -> Tensor:
    """One token: `matrix` [value heads, key_dim, value_dim] in place; what is read of it."""
    keys, dim = weights.num_key_heads * weights.key_dim, weights.value_dim
    q, k, v = qkv.split([keys, keys, weights.num_value_heads * dim])
    shared = weights.num_value_heads // weights.num_key_heads
    q, k = (_unit(each.view(-1, weights.key_dim)).repeat_interleave(shared, 0) for each in (q, k))
    q = q * weights.key_dim**-0.5
    b, a = ba.chunk(2)
    matrix *= (weights.decay * softplus(a + weights.dt_bias)).exp()[:, None, None]
    known = torch.einsum("hkv,hk->hv", matrix, k)
    added = (v.view(-1, dim) - known) * b.sigmoid()[:, None]
    matrix += k[:, :, None] * added[:, None, :]
    return torch.einsum("hkv,hk->hv", matrix, q)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gate_mul_(x: Tensor, gate: Tensor) -> Tensor:
    return x.copy_(x.float() * gate.float().sigmoid())
