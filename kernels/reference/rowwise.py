"""Row-wise operators in plain PyTorch: the reference of `kernels/rowwise.py`."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """fp32, rounded to `x.dtype` before and after the weight."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * normed.to(x.dtype).float()).to(x.dtype)


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Out of place: `x` [T, H, D] turned by `cos`, `sin` [T, rot/2]."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), dim=-1)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """fp32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
