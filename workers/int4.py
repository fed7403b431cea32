"""The choices of int4 weights: how they are made at load, and what they are multiplied with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Int4Group = Literal["16", "32", "64", "128"]
Int4Activations = Literal["int8", "plain"]


@dataclass(frozen=True, slots=True)
class Int4Options:
    """`group`: inputs of int4 weights, rounded at load, that share a step and an offset.
    `activations` of int4 weights, stored ones too: rounded to int8 in groups, or plain: as they
    are."""

    group: int = 16  # as kernels.quant.INT4_STEP_GROUP
    activations: Int4Activations = "int8"


INT4 = Int4Options()
