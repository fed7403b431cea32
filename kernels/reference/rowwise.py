"""Row-wise operators in plain PyTorch: the backend of a CPU without the native library, and the
formulas that every backend is compared with (`*_reference`).

The parameters mean what they mean in `kernels/rowwise.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.quant import Int8Rows, quantize_rows_int8
from penstock.kernels.types import Activation


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, out: Tensor,
    total: Tensor | None, post: Tensor | None = None, factor: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    if residual is None or total is None:
        assert weight is not None
        return out.copy_(rms_norm_reference(x, weight, eps))
    total.copy_(added_reference(x, residual, eps, post, factor))
    if weight is None:
        return total, total
    return out.copy_(rms_norm_reference(total, weight, eps)), total


def rms_norm_int8(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, out: Int8Rows,
    total: Tensor | None, post: Tensor | None = None, factor: float = 1.0,
) -> Int8Rows:  # fmt: skip
    normed = torch.empty_like(x)
    found = rms_norm(x, weight, eps, residual, normed, total, post, factor)
    return quantize_int8(found[0] if isinstance(found, tuple) else found, out)


def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    q.copy_(rope_reference(q, cos, sin))
    k.copy_(rope_reference(k, cos, sin))


def rope_to(q: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    return out.copy_(rope_reference(q, cos, sin))


def act_mul(gate_up: Tensor, out: Tensor, activation: Activation) -> Tensor:
    return out.copy_(act_mul_reference(gate_up, activation))


def act_mul_int8(gate_up: Tensor, out: Int8Rows, activation: Activation) -> Int8Rows:
    return quantize_int8(act_mul_reference(gate_up, activation), out)


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    return x.copy_(soft_cap_reference(x, cap))


def swiglu(gate_up: Tensor, out: Tensor, alpha: float, limit: float) -> Tensor:
    return out.copy_(swiglu_reference(gate_up, alpha, limit))


def quantize_int8(x: Tensor, out: Int8Rows) -> Int8Rows:
    codes, scales = quantize_rows_int8(x, out.group, hadamard=out.hadamard)
    out.codes.copy_(codes)
    out.scales.copy_(scales)
    return out


def combine(routed: Tensor, places: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    total = torch.zeros(places.shape[0], routed.shape[1], device=routed.device)
    for rank in range(places.shape[1]):
        total += weights[:, rank, None] * routed[places[:, rank]].float()
    return out.copy_(total)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """fp32, rounded to `x.dtype` at the end; before the weight, too, if it has that dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * normed.to(weight.dtype).float()).to(x.dtype)


def added_reference(
    x: Tensor, residual: Tensor, eps: float, post: Tensor | None, factor: float
) -> Tensor:
    """residual + factor * x, with x normed by `post` before, if given; rounded once more."""
    if post is not None:
        x = rms_norm_reference(x, post, eps)
    return (x.float() * factor + residual.float()).to(x.dtype)


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Out of place: `x` [T, H, D] turned by `cos`, `sin` [T, rot/2]."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), dim=-1)


def swiglu_reference(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """fp32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(gate_up.dtype)


def act_mul_reference(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """fp32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == "silu":
        return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def soft_cap_reference(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap)."""
    return torch.tanh(x / cap) * cap
