"""int8 twins of neuron rows: each row by itself, so that any of them can be moved alone.

A row [gate | up | down] of 3 * d numbers becomes 3 * d codes, then an fp32 scale for each `group`
of numbers along d (the last group of a part may be shorter): value = code * scale. Knows rows;
nothing of files or of who uses them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

MIN_SCALE = 1e-30  # a group of zeros divides by it


def quantize_neurons(rows: Tensor, group: int) -> Tensor:
    """`rows` [n, 3 * d] of any float dtype -> uint8 [n, 3 * (d + 4 * ceil(d / group))]; codes are
    the nearest, half goes to even."""
    num_rows, size = rows.shape[0], rows.shape[1] // 3
    parts = pad(rows.float().view(num_rows, 3, size), (0, -size % group))
    groups = parts.unflatten(2, (-1, group))
    scales = (groups.abs().amax(3) / 127).clamp_(min=MIN_SCALE)
    codes = (groups / scales[..., None]).round_().clamp_(-127, 127).to(torch.int8)
    codes = codes.flatten(2)[:, :, :size].reshape(num_rows, 3 * size)
    wide = scales.view(num_rows, -1).contiguous().view(torch.uint8)
    return torch.cat([codes.view(torch.uint8), wide], dim=1)


def dequantize_neurons(twins: Tensor, size: int, group: int) -> Tensor:
    """What `quantize_neurons` made of rows of d = `size`: fp32 [n, 3 * d]."""
    num_rows, num_groups = twins.shape[0], -(-size // group)
    codes = twins[:, : 3 * size].view(torch.int8).reshape(num_rows, 3, size)
    scales = twins[:, 3 * size :].clone(memory_format=torch.contiguous_format).view(torch.float32)
    scales = scales.view(num_rows, 3, num_groups)
    groups = pad(codes.float(), (0, -size % group)).unflatten(2, (-1, group))
    values = (groups * scales[..., None]).flatten(2)
    return values[:, :, :size].reshape(num_rows, 3 * size)
