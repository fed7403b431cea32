"""The expert MLP of one process of several that have some columns of every expert each.

Each computes its inner columns of all routes, then, of the gathered ones, its columns of the
output. So each does the same share of the work, whatever the routes are. Every output is the same
dot product as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from penstock.kernels.matmul import linear
from penstock.kernels.moe.mlp import Clamp, Expert, GroupedExperts, group_by_expert, triton_moe
from penstock.kernels.quant import Int8Rows
from penstock.kernels.rowwise import act_mul, combine, quantize_int8, swiglu
from penstock.kernels.types import PackedLinear

# All columns [R, w] in `out`, of this process's, dense, which may lie at the beginning of it.
Gather = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ExpertColumns:
    """How the processes put together what each computes of `inner_size` inner columns, and of the
    outputs."""

    inner_size: int
    inner: Gather
    outputs: Gather

    def memory_columns(self, top_k: int) -> int:
        """Of `memory` for `moe_columns`, a token."""
        return (top_k + 2) * self.inner_size


def moe_columns(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: Sequence[Expert],
    columns: ExpertColumns,
    *,
    grouped: Tensor,
    memory: Tensor,
    out: Tensor,
    clamp: Clamp | None = None,
) -> Tensor:
    """As `moe_mlp`, where `experts[e]` is (gate_up [2I', d], down [d', I]): I' of the I inner
    columns and d' of the d outputs.

    `grouped` [T * k, d] and `memory` [T, (k + 2) * I], dense, hold the parts of the work; `out` may
    be `x` itself.
    """
    num_tokens, top_k = topk_ids.shape
    num_routes, (gate_up, down) = num_tokens * top_k, experts[0]
    flat, own = memory.view(-1), gate_up.out_features // 2
    whole = flat[: num_routes * columns.inner_size].view(num_routes, columns.inner_size)
    products = flat[: num_routes * own].view(num_routes, own)
    both = flat[whole.numel() :][: num_tokens * 2 * own].view(num_tokens, 2 * own)
    width = down.out_features
    outputs = grouped.view(-1)[: num_routes * width].view(num_routes, width)
    if isinstance(experts, GroupedExperts):
        run = triton_moe().columns_of(x, topk_ids, experts.table)
        run.inner(both, products, clamp)
        run.outputs(columns.inner(products, whole), outputs)
        return run.combined(columns.outputs(outputs, grouped), topk_weights, out)
    counts, places = group_by_expert(x, topk_ids, len(experts), grouped)
    used = [
        (experts[number], end - count, end)
        for number, (count, end) in enumerate(zip(counts, accumulate(counts)))
        if count
    ]
    for (gate_up, _), begin, end in used:
        for first in range(begin, end, num_tokens):
            rows = slice(first, min(first + num_tokens, end))
            made = linear(grouped[rows], gate_up, out=both[: rows.stop - first])
            if clamp is not None:
                swiglu(made, *clamp, out=products[rows])
            else:
                act_mul(made, products[rows])
    whole = columns.inner(products, whole)
    for (_, down), begin, end in used:
        linear(_rows(whole[begin:end], down), down, out=outputs[begin:end])
    return combine(columns.outputs(outputs, grouped), places, topk_weights, out)


def _rows(whole: Tensor, down: PackedLinear) -> Tensor | Int8Rows:
    """As `down` takes them; int8 codes overwrite the values."""
    if not down.takes_int8:
        return whole
    rows = Int8Rows.inside(whole, down.group, None, hadamard=down.hadamard)
    return quantize_int8(whole, out=rows)
