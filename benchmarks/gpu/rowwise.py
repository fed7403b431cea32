"""Checks and timings of the row-wise operators for check.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu.cases import DEVICE, HALF, Checks, Triples, Work
from penstock.kernels.reference.rowwise import (
    act_mul_reference,
    rms_norm_reference,
    rope_reference,
)
from penstock.kernels.triton import rowwise as rowwise_triton


def check_rms_norm(dtype: torch.dtype) -> Triples:
    for rows, dim in ((1, 1), (3, 63), (33, 500), (2, 4096)):
        x, residual = torch.randn(2, rows, dim, device=DEVICE).to(dtype)
        weight = torch.randn(dim, device=DEVICE).to(dtype)
        y = rowwise_triton.rms_norm(x, weight, 1e-5, None, torch.empty_like(x))
        assert isinstance(y, Tensor)
        yield f"{rows} x {dim}", y, rms_norm_reference(x, weight, 1e-5)
        y, total = rowwise_triton.rms_norm(x, weight, 1e-5, residual, torch.empty_like(x))
        yield f"{rows} x {dim} sum", total, x + residual
        yield f"{rows} x {dim} after sum", y, rms_norm_reference(total, weight, 1e-5)


def check_rope(dtype: torch.dtype) -> Triples:
    for heads, dim, rot in ((6, 64, 64), (32, 128, 128), (3, 80, 32), (1, 20, 10)):
        qkv = torch.randn(5, heads + 3, dim, device=DEVICE).to(dtype)
        angle = torch.randn(5, rot // 2, device=DEVICE)
        expected = qkv.clone()
        turned = rope_reference(qkv[:, : heads + 2], angle.cos(), angle.sin())
        expected[:, : heads + 2] = turned
        rowwise_triton.rope_(qkv[:, :heads], qkv[:, heads : heads + 2], angle.cos(), angle.sin())
        yield f"heads {heads} dim {dim} rot {rot}", qkv, expected


def check_act_mul(dtype: torch.dtype) -> Triples:
    for rows, dim in ((1, 1), (3, 63), (2, 1500)):
        gate_up = torch.randn(rows, 2 * dim, device=DEVICE).to(dtype)
        y = rowwise_triton.act_mul(gate_up, torch.empty(rows, dim, dtype=dtype, device=DEVICE))
        yield f"{rows} x {dim}", y, act_mul_reference(gate_up)


CHECKS: Checks = {
    "rms_norm": check_rms_norm,
    "rope_": check_rope,
    "act_mul": check_act_mul,
}


def works(tiny: bool) -> Iterator[Work]:
    """Shapes of Llama-3-8B: hidden 4096, inner 14336, 32 + 8 heads of 128."""
    hidden, inner = (256, 896) if tiny else (4096, 14336)
    for rows in (2, 5) if tiny else (64, 8192):
        yield from _works_of(rows, hidden, inner)


def _works_of(rows: int, hidden: int, inner: int) -> Iterator[Work]:
    x, residual = torch.randn(2, rows, hidden, device=DEVICE).to(HALF)
    weight, out = torch.ones(hidden, device=DEVICE, dtype=HALF), torch.empty_like(x)
    yield Work(
        "rms_norm + residual",
        f"{rows} x {hidden}",
        lambda: rowwise_triton.rms_norm(x, weight, 1e-5, residual, out),
        4 * 2 * x.numel(),
    )
    qkv = torch.randn(rows, 48, 128, device=DEVICE).to(HALF)
    angle = torch.randn(rows, 64, device=DEVICE)
    cos, sin = angle.cos(), angle.sin()
    yield Work(
        "rope_",
        f"{rows} tokens, 32 + 8 heads",
        lambda: rowwise_triton.rope_(qkv[:, :32], qkv[:, 32:40], cos, sin),
        2 * 2 * rows * 40 * 128 + 2 * 4 * cos.numel(),
    )
    gate_up = torch.randn(rows, 2 * inner, device=DEVICE).to(HALF)
    product = torch.empty(rows, inner, device=DEVICE, dtype=HALF)
    yield Work(
        "act_mul",
        f"{rows} x {inner}",
        lambda: rowwise_triton.act_mul(gate_up, product),
        2 * (gate_up.numel() + product.numel()),
    )
