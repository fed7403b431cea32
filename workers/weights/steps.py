"""int8 codes of which 16, evenly spaced, occur in a group, as 4-bit codes in steps.

What `penstock quantize --to int4 --grid steps` writes is an int8 checkpoint; nothing is rounded
here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.int4_search import TOP_STEP
from penstock.kernels.quant import QuantizedWeight, pack_nibbles
from penstock.workers.errors import LoadError

TOP = 15  # of the 4-bit codes


def in_steps(weight: QuantizedWeight, group: int) -> QuantizedWeight:
    """The int8 `weight` in int4, in groups of `group` inputs; the last one may be short.

    Raises LoadError where the codes of a group are more than 16, or not evenly spaced.
    """
    num_rows, width = weight.codes.shape
    short = -width % group
    codes = weight.codes.to(torch.int16)
    if short:  # with a code that occurs in the group
        codes = torch.cat([codes, codes[:, -1:].expand(-1, short)], 1)
    groups = codes.unflatten(1, (-1, group))
    offsets = groups.amin(2)
    above = groups - offsets[..., None]
    steps = _steps_of(above)
    if not bool(steps.all()):
        row, place = (int(each[0]) for each in torch.where(steps == 0))
        raise LoadError(
            f"the int8 codes of row {row}, inputs {place * group} to {(place + 1) * group - 1}, "
            "are not 16 evenly spaced ones, as config.json says"
        )
    nibbles = (above // steps[..., None]).to(torch.uint8).flatten(1)[:, :width]
    return QuantizedWeight(
        "int4", pack_nibbles(nibbles, fill=0), weight.scales, width, group,
        steps=steps.to(torch.uint8), offsets=offsets.to(torch.int8),
    )  # fmt: skip


def _steps_of(above: Tensor) -> Tensor:
    """The least step of `above` int16 [N, G, group], whose least codes are 0; 0: there is none."""
    span, common = above.amax(2), above[..., 0]
    for k in range(1, above.shape[2]):
        common = torch.gcd(common, above[..., k])
    found = torch.zeros_like(span)
    for step in range(TOP_STEP, 0, -1):
        fits = (common % step == 0) & (span <= TOP * step)
        found = torch.where(fits, step, found)
    return found
