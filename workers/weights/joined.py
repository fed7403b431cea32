"""Weights over the same input as one matrix, and on another device; codes stay as they are.

Imported by models/linears.py and experts/packed.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from penstock.kernels.quant import QuantizedWeight, dequantize_weight, unpack_nibbles


def joined(weights: Sequence[Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight:
    """Weights over the same input, concatenated by rows.

    Quantised weights keep their codes, int4 beside int8g as int8g, in groups that divide all of
    theirs. If other formats differ, or some weights are not quantised, or have their inputs in
    another order, the result is plain.
    """
    if len(weights) == 1:
        return weights[0]
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    one_order = _have_one_order(quantized)
    if one_order and len(quantized) == len(weights) and {w.format for w in quantized} in _AS_INT8:
        group = math.gcd(*(weight.group or weight.in_features for weight in quantized))
        quantized = [_as_int8(weight, group) for weight in quantized]
    kinds = {(w.format, w.group, w.steps is None, w.hadamard) for w in quantized}
    if len(quantized) < len(weights) or len(kinds) > 1 or not one_order:
        plain = [w if isinstance(w, Tensor) else dequantize_weight(w) for w in weights]
        return torch.cat([weight.to(_widest(plain)) for weight in plain])
    zeros = None
    if any(weight.zeros is not None for weight in quantized):
        each = [_zeros(weight) for weight in quantized]
        zeros = torch.cat([some.to(_widest(each)) for some in each])
    steps = [weight.steps for weight in quantized if weight.steps is not None]
    offsets = [weight.offsets for weight in quantized if weight.offsets is not None]
    return replace(
        quantized[0],
        codes=torch.cat([weight.codes for weight in quantized]),
        scales=torch.cat([weight.scales for weight in quantized]),
        zeros=zeros,
        steps=torch.cat(steps) if steps else None,
        offsets=torch.cat(offsets) if offsets else None,
    )


def selected(weight: Tensor | QuantizedWeight, rows: slice | Tensor) -> Tensor | QuantizedWeight:
    """These rows of a weight [out, in]: codes and scales lie by row in every format."""
    if isinstance(weight, Tensor):
        return weight[rows]

    def some(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[rows]

    return replace(
        weight,
        codes=weight.codes[rows],
        scales=weight.scales[rows],
        zeros=some(weight.zeros),
        steps=some(weight.steps),
        offsets=some(weight.offsets),
    )


def moved(weight: QuantizedWeight, device: str | torch.device) -> QuantizedWeight:
    """The weight on `device`."""

    def there(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    return replace(
        weight,
        codes=weight.codes.to(device),
        scales=weight.scales.to(device),
        zeros=there(weight.zeros),
        steps=there(weight.steps),
        offsets=there(weight.offsets),
        order=there(weight.order),
    )


def _have_one_order(weights: Sequence[QuantizedWeight]) -> bool:
    orders = [weight.order for weight in weights]
    first = orders[0] if orders else None
    if first is None:
        return all(order is None for order in orders)
    return all(order is not None and torch.equal(order, first) for order in orders)


_AS_INT8 = ({"int8g"}, {"int8g", "int4"})


def _as_int8(weight: QuantizedWeight, group: int) -> QuantizedWeight:
    """The same values as int8g in groups of `group`, which divides those of `weight`."""
    codes, scales, zeros = weight.codes, weight.scales, weight.zeros
    if weight.format == "int4":
        nibbles = unpack_nibbles(codes)[:, : weight.in_features]
        codes = nibbles.view(torch.int8) - 8
        zeros = None if zeros is None else zeros.float() - 8
    repeats, num_groups = (weight.group or weight.in_features) // group, -(-codes.shape[1] // group)
    scales = scales.repeat_interleave(repeats, dim=1)[:, :num_groups]
    if zeros is not None:
        zeros = zeros.repeat_interleave(repeats, dim=1)[:, :num_groups]
    order = weight.order
    return QuantizedWeight("int8g", codes, scales, weight.in_features, group, zeros, order=order)


def _zeros(weight: QuantizedWeight) -> Tensor:
    """Given for each group, also where they are the format's own."""
    if weight.zeros is not None:
        return weight.zeros
    if weight.format == "int8g":
        return torch.zeros_like(weight.scales)
    return torch.full_like(weight.scales, 8, dtype=torch.uint8)


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
