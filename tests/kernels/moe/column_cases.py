"""Experts cut by columns against whole experts: every part of the columns has the same bits.

The other processes are replaced by what one process with all columns computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from penstock.kernels.moe.columns import ExpertColumns, moe_columns
from penstock.kernels.moe.mlp import Expert, moe_mlp

# Of the inner columns and of the outputs [first, end) -> the experts that have these alone.
Cut = Callable[[slice, slice], Sequence[Expert]]


def assert_same_bits(
    cut: Cut, x: Tensor, ids: Tensor, gains: Tensor, inner_size: int, bounds: Sequence[float]
) -> None:
    """`bounds`: shares of the columns at which they are cut, from 0 to 1."""
    hidden, (num_tokens, top_k) = x.shape[1], ids.shape
    whole = slice(0, inner_size), slice(0, hidden)
    want = moe_mlp(x, ids, gains, cut(*whole))
    seen: list[Tensor] = []

    def run(columns: tuple[slice, slice], check: bool) -> Tensor:
        known = iter(seen)

        def gather(own: Tensor, out: Tensor, span: slice) -> Tensor:
            if not check:
                seen.append(own.clone())
                return out.copy_(seen[-1])
            all_columns = next(known)
            assert torch.equal(own, all_columns[:, span])
            return out.copy_(all_columns)

        parts = ExpertColumns(
            inner_size,
            lambda own, out: gather(own, out, columns[0]),
            lambda own, out: gather(own, out, columns[1]),
        )
        poisoned = [
            x.new_full((num_tokens, parts.memory_columns(top_k)), math.nan),
            x.new_full((num_tokens * top_k, hidden), math.nan),
        ]
        return moe_columns(
            x, ids, gains, cut(*columns), parts, memory=poisoned[0], grouped=poisoned[1],
            out=torch.empty_like(x),
        )  # fmt: skip

    assert torch.equal(run(whole, check=False), want)
    for first, end in pairwise(bounds):
        columns = [slice(round(first * n), round(end * n)) for n in (inner_size, hidden)]
        assert torch.equal(run((columns[0], columns[1]), check=True), want)
