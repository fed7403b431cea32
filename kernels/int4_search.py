"""How a weight is rounded to 4 bits: which integers stand for each group of inputs.

A row has one scale, as an int8 weight has; within a group, 4-bit codes stand for the int8 codes
step * code + offset, evenly spaced. Steps and offsets are tried out, and those of the least squared
error kept: all steps that cut the range of a group a little narrower or not at all, each from
several offsets (what is cut may be the low end, the high end or both), moved to where their codes
ask for. `kernels/cpu/int4_search.py` is the same in the native library.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOP_STEP = 17  # 15 * 17 = 255: the least and the largest int8 code
_TOP = 15
_NARROWEST = 0.8  # of the step that spans a group's range; narrower ones do not win
_STEPS, _STARTS, _ROUNDS = 5, 5, 3  # that are tried, offsets of each, and how often they are moved
_AT_ONCE = 1 << 18  # weights: a few arrays of them stay in the cache


def search_int4(weight: Tensor, scales: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """`weight` fp32 [N, K], within +-127 of `scales` [N] -> codes uint8 [N, K] of 0 to 15,
    steps uint8 [N, G] of 1 to 17, and offsets int8 [N, G].

    NaN counts as 0.
    """
    num_rows, depth = weight.shape
    units = (weight / scales[:, None]).nan_to_num(0.0)
    whole = depth // group * group  # a short last group has sums of its own
    found = [
        _search_groups(part.reshape(-1, min(group, part.shape[1])))
        for part in (units[:, :whole], units[:, whole:])
        if part.shape[1]
    ]
    if not found or not num_rows:
        nothing = torch.empty(num_rows, 0, dtype=torch.uint8, device=weight.device)
        return nothing, nothing, nothing.view(torch.int8)
    by_row = [[part.reshape(num_rows, -1) for part in each] for each in found]
    codes, steps, offsets = (torch.cat(parts, 1) for parts in zip(*by_row, strict=True))
    return codes, steps, offsets


def _search_groups(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`groups` [G, size] in units of int8 codes -> codes uint8 [G, size], steps and offsets [G]."""
    codes = torch.empty(groups.shape, dtype=torch.uint8, device=groups.device)
    steps = torch.empty(len(groups), dtype=torch.uint8, device=groups.device)
    offsets = torch.empty(len(groups), dtype=torch.int8, device=groups.device)
    at_once = max(1, _AT_ONCE // max(1, groups.shape[1]))
    for first in range(0, len(groups), at_once):
        some = slice(first, first + at_once)
        y = groups[some].T.contiguous()  # sums of a group run over rows
        step, offset = best_steps(y)
        codes[some] = _nearest(y, step, offset).T.to(torch.uint8)
        steps[some], offsets[some] = step.to(torch.uint8), offset.to(torch.int8)
    return codes, steps, offsets


def best_steps(y: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Steps and offsets of the columns of `y` [size, groups], in units of int8 codes; as fp32.

    `importance` [size]: the weight of each row's squared errors; None: all alike."""
    shares = torch.full_like(y[:, 0], 1 / len(y)) if importance is None else importance
    shares = shares / shares.sum()
    low, high = y.amin(0), y.amax(0)
    first = (_NARROWEST / _TOP * (high - low)).floor()
    best_step, best_offset = torch.ones_like(low), torch.zeros_like(low)
    least = torch.full_like(low, torch.inf)
    for more in range(_STEPS):
        step = (first + more).clamp(1, TOP_STEP)
        cut = high - low - _TOP * step
        for start in range(_STARTS):
            offset = (low + cut * (start / (_STARTS - 1))).round()
            for _ in range(_ROUNDS):
                offset = torch.minimum(offset.clamp(min=-128), 127 - _TOP * step)
                errors = y - (_nearest(y, step, offset).mul_(step).add_(offset))
                error = shares @ errors.square()
                better = error < least
                least = torch.where(better, error, least)
                best_step = torch.where(better, step, best_step)
                best_offset = torch.where(better, offset, best_offset)
                offset = offset + (shares @ errors).round()
    return best_step, best_offset


def _nearest(y: Tensor, step: Tensor, offset: Tensor) -> Tensor:
    return ((y - offset) / step).round_().clamp_(0, _TOP)
