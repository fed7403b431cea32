"""Quantisation-aware training of the built-in models: steps whose products are rounded.

A few million parameters that are all in use lose a third of their perplexity to 4 bits; after some
minutes with the rounding in the loop they lose a few percent (quantisation-aware training with
straight-through gradients, Jacob et al., 1712.05877, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from penstock.kernels import quant


@contextmanager
def rounded(model: nn.Module, format: quant.WeightFormat | None) -> Iterator[None]:
    """The layers' linears with weights as `format` holds them, and rows of activations in int8, in
    forward and backward; the weights come back afterwards, their gradients stay. None: as it is."""
    if format is None:
        yield
        return
    linears = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name
    ]
    kept = [linear.weight.data.clone() for linear in linears]
    hooks = [linear.register_forward_pre_hook(_round_rows) for linear in linears]
    for linear in linears:
        weight = quant.dequantize_weight(quant.quantize_weight(linear.weight.data, format))
        linear.weight.data.copy_(weight)
    try:
        yield
    finally:
        for linear, weight, hook in zip(linears, kept, hooks, strict=True):
            linear.weight.data.copy_(weight)
            hook.remove()


def _round_rows(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    (x,) = args
    scale = x.detach().abs().amax(dim=-1, keepdim=True).float().clamp_min(1e-9) / 127
    rounded_x = ((x.detach() / scale).round() * scale).to(x.dtype)
    return (x + (rounded_x - x).detach(),)
