"""What the case files of check.py share: the device, and the shape of a check and of a timing.

A case file gives `CHECKS`, kernel by name to a generator of (case, actual, expected), and `works`,
the calls that are timed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, hence before the kernels

DEVICE = "cuda" if CUDA else "cpu"
# The interpreter multiplies the raw bits of bf16 matrices, so there fp16 stands for both.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * CUDA
HALF = torch.bfloat16 if CUDA else torch.float16  # of what is timed
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Hopper's FP8 units keep 14 bits of a sum of 128 products, whatever the type of the activations.
LEAST_TOLERANCE = {"linear fp8": 2e-3}

Triples = Iterator[tuple[str, Tensor, Tensor]]  # case, actual, expected
Checks = dict[str, Callable[[torch.dtype], Triples]]
Unit = Literal["bf16", "int8", "fp8"]  # what does the FLOPs


@dataclass(frozen=True)
class Work:
    """One call to time. Its floor: `num_bytes` at the card's bandwidth, or `flops` at the rate of
    its unit, whichever is longer."""

    kernel: str
    case: str
    run: Callable[[], object]
    num_bytes: float
    flops: float = 0.0
    unit: Unit = "bf16"
    in_graph: bool = True  # whether it may be captured


def starts_of(lens: Sequence[int]) -> Tensor:
    """int32 [B + 1]: 0 and the running sums."""
    return torch.tensor([0, *lens], device=DEVICE).cumsum(0).to(torch.int32)
