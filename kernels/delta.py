"""Gated DeltaNet (Yang et al., arXiv 2412.06464): linear attention whose memory is one matrix a
head, however long the context; and the gate of an attention's output.

Of each token, in fp32, with the layer's `DeltaWeights`:

    q, k, v = silu(conv(mixed)), the convolution over the newest `taps` tokens of each channel
    q = q / sqrt(|q|^2 + 1e-6) / sqrt(key_dim),  k = k / sqrt(|k|^2 + 1e-6)
    g = exp(decay * softplus(a + dt_bias)),  beta = sigmoid(b)
    S = g * S;  S = S + k (beta * (v - S^T k))^T;  o = S^T q
    out = norm * rms_norm(o) * silu(z)

Several value heads share a key head, one after the other. Token by token, so that a row has the
same bits however its sequence is cut into chunks. Backends: Triton on a GPU, the native library on
a CPU where it supports the dtype, else plain PyTorch.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.cpu import delta as native_delta
from penstock.kernels.cpu import native
from penstock.kernels.delta_types import DeltaState, DeltaWeights, StateRows
from penstock.kernels.reference import delta as reference


class DeltaBackend(Protocol):
    """What each backend implements. The functions below check the arguments before they call it."""

    def gated_delta(
        self, mixed: Tensor, z: Tensor, ba: Tensor, weights: DeltaWeights, states: DeltaState,
        rows: StateRows, out: Tensor,
    ) -> Tensor: ...  # fmt: skip

    def gate_mul_(self, x: Tensor, gate: Tensor) -> Tensor: ...


def _backend(x: Tensor) -> DeltaBackend:
    if x.is_cuda:
        return _triton()
    return reference if native.usable(x) is None else native_delta


@functools.cache
def _triton() -> DeltaBackend:
    from penstock.kernels.triton import delta  # Triton is not installed on every machine

    return delta


def gated_delta(
    mixed: Tensor,
    z: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    states: DeltaState,
    rows: StateRows,
    out: Tensor | None = None,
) -> Tensor:
    """One layer over all sequences of a batch: [T, value heads * value_dim], in `mixed.dtype`.

    `mixed` [T, channels]: q, k and v of all heads before the convolution. `z` [T, value heads *
    value_dim]. `ba` [T, 2 * value heads]: b, then a. All may be views with any stride over T. Reads
    and writes `states` as `rows` says.
    """
    weights.check()
    states.check(weights, mixed.dtype)
    width = weights.num_value_heads * weights.value_dim
    num_rows = mixed.shape[0]
    assert mixed.shape == (num_rows, weights.conv.shape[1]) and z.shape == (num_rows, width)
    assert ba.shape == (num_rows, 2 * weights.num_value_heads)
    assert mixed.dtype == z.dtype == ba.dtype
    assert mixed.stride(1) == z.stride(1) == ba.stride(1) == 1
    if out is None:
        out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    assert out.stride(1) == 1 and out.shape == z.shape and out.dtype == z.dtype
    return _backend(mixed).gated_delta(mixed, z, ba, weights, states, rows, out)


def gate_mul_(x: Tensor, gate: Tensor) -> Tensor:
    """`x` [T, D] times the sigmoid of `gate` [T, D], in place; any stride over T. `gate` may be
    `x` itself: silu."""
    assert x.shape == gate.shape and x.dtype == gate.dtype and x.stride(1) == gate.stride(1) == 1
    return _backend(x).gate_mul_(x, gate)


def sigmoid(x: Tensor, out: Tensor | None = None) -> Tensor:
    """The sigmoid of `x` [T, D], in `out` if given; any stride over T.

    For what must not depend on T: PyTorch computes whole vectors of all T * D elements and the
    rest one by one, and the two round differently.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return gate_mul_(out.fill_(1.0), x)
