"""The expert MLP of a mixture-of-experts layer, with tokens grouped by expert."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.kernels.matmul import linear
from penstock.kernels.neurons import PooledNeurons, neuron_mlp
from penstock.kernels.quant import Int8Rows
from penstock.kernels.rowwise import act_mul, act_mul_int8, combine, quantize_int8, swiglu
from penstock.kernels.types import Activation, PackedLinear

Clamp = tuple[float, float]  # alpha and limit of `swiglu`
Expert = tuple[PackedLinear, PackedLinear]  # gate_up [2I, d] and down [d, I]
# An expert that has tokens, or the neurons that each of them, in their order, uses of it.
Visited = tuple[int, Expert | PooledNeurons]
# Given the ids of the experts that have tokens, yields each once, in an order of its choice; the
# neurons of one may come in several parts (`PartialSums`). What was yielded is used only until the
# next is requested.
Visit = Callable[[list[int]], Iterator[Visited]]
# Given the outputs of all routes [T * k, d], grouped by expert, and the row at which each expert's
# end: fills in those of experts that were not visited.
Complete = Callable[[Tensor, list[int]], None]


class GroupedBackend(Protocol):
    """A backend that runs all experts of a layer in one launch: Triton. Without it they run one
    after another, each with the backends of its own operators."""

    def expert_table(self, experts: Sequence[Expert]) -> Any: ...

    def moe_mlp(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, table: Any, grouped: Tensor,
        inner: Tensor, out: Tensor, clamp: Clamp | None,
    ) -> Tensor: ...  # fmt: skip

    def columns_of(self, x: Tensor, topk_ids: Tensor, table: Any) -> ColumnRun: ...


class ColumnRun(Protocol):
    """Some columns of all experts over the routes of one layer (columns.py)."""

    def inner(self, both: Tensor, products: Tensor, clamp: Clamp | None) -> None: ...

    def outputs(self, whole: Tensor, out: Tensor) -> None: ...

    def combined(self, grouped: Tensor, topk_weights: Tensor, out: Tensor) -> Tensor: ...


@functools.cache
def triton_moe() -> GroupedBackend:
    """The backend for GPUs."""
    from penstock.kernels.triton import moe  # Triton is not installed on every machine

    return moe


class GroupedExperts(tuple[Expert, ...]):
    """All experts of a layer, and `table`, with which a GPU runs them in one launch."""

    table: Any = None


def pack_experts(experts: Sequence[Expert]) -> Sequence[Expert]:
    """Packed experts for `moe_mlp`: on a GPU with their table, elsewhere unchanged.

    Their memory must not move. Experts of different formats have no table, nor have those that
    take their inputs in orders of their own (GPTQ's act-order).
    """
    formats = {(gate_up.format, down.format) for gate_up, down in experts}
    if not _on_gpu(experts[0][0]) or len(formats) > 1 or any(map(_has_order, experts)):
        return experts
    grouped = GroupedExperts(experts)
    grouped.table = triton_moe().expert_table(grouped)
    return grouped


def moe_mlp(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: Sequence[Expert] | Visit,
    *,
    num_experts: int | None = None,
    grouped: Tensor | None = None,
    inner: Tensor | None = None,
    out: Tensor | None = None,
    complete: Complete | None = None,
    clamp: Clamp | None = None,
) -> Tensor:
    """The weighted sum of each row of `x` [T, d] through its k experts -> [T, d].

    `topk_ids` int64 and `topk_weights` fp32 are [T, k]; `experts[e]` is (gate_up [2I, d],
    down [d, I]), or `experts` hands out those that are used of `num_experts`; then `inner` must be
    given. One sort groups the routes by expert, and an expert without tokens costs nothing.
    The sum runs in fp32 over a token's routes in their given order, so that with native linears its
    result does not depend on its batch-mates. On a GPU, experts of `pack_experts` take one launch
    a projection for 1024 routes or more, and the host never waits for the routes.

    `grouped` [T * k, d], `inner` [R, 2I] and `out` [T, d], dense, hold the parts of the work; an
    expert takes at most R rows at once (all together do, of `pack_experts` on a GPU), and `out` may
    be `x` itself. With them, nothing whose size grows with d or I is allocated. `clamp`: as for
    `gated_mlp`. `complete`: called before the sum, where `experts` yields only some of those that
    are used.
    """
    num_tokens, top_k = topk_ids.shape
    if grouped is None:
        grouped = x.new_empty(num_tokens * top_k, x.shape[1])
    if inner is None:
        assert not callable(experts)
        inner = x.new_empty(num_tokens, experts[0][0].out_features)
    if out is None:
        out = torch.empty_like(x)
    if isinstance(experts, GroupedExperts):
        table = experts.table
        return triton_moe().moe_mlp(x, topk_ids, topk_weights, table, grouped, inner, out, clamp)
    if num_experts is None:
        assert not callable(experts)
        num_experts = len(experts)
    counts, places = group_by_expert(x, topk_ids, num_experts, grouped)
    ends = list(accumulate(counts))
    used = [expert for expert, count in enumerate(counts) if count]
    in_turn = experts(used) if callable(experts) else ((e, experts[e]) for e in used)
    at_once = max(1, inner.shape[0])
    for expert, found in in_turn:
        routed = grouped[ends[expert] - counts[expert] : ends[expert]]
        if isinstance(found, PooledNeurons):
            neuron_mlp(routed, found, routed)
            continue
        for first in range(0, counts[expert], at_once):
            rows = routed[first : first + at_once]
            gated_mlp(rows, *found, inner, out=rows, clamp=clamp)
    if complete is not None:
        complete(grouped, ends)
    return combine(grouped, places, topk_weights, out)


def group_by_expert(
    x: Tensor, topk_ids: Tensor, num_experts: int, grouped: Tensor
) -> tuple[list[int], Tensor]:
    """Write the row of `x` [T, d] for each route into `grouped` [T * k, d], sorted by expert.

    Returns how many routes each expert has, and the row of each route, int64 [T, k].
    """
    ids, top_k = topk_ids.reshape(-1), topk_ids.shape[1]
    order = ids.argsort(stable=True)
    counts = torch.bincount(ids, minlength=num_experts).tolist()
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=x.device)
    torch.index_select(x, 0, order // top_k, out=grouped)
    return counts, places.view_as(topk_ids)


def gated_mlp(
    x: Tensor | Int8Rows,
    gate_up: PackedLinear,
    down: PackedLinear,
    inner: Tensor,
    out: Tensor,
    *,
    scales: Tensor | None = None,
    activation: Activation = "silu",
    clamp: Clamp | None = None,
) -> Tensor:
    """down(activation(gate(x)) * up(x)) of `x` [T, d] into `out` [T, d], which may be `x` itself.

    `inner` [at least T, 2I]: gate and up are computed there, and their product where gate was.
    `scales` fp32, T for each group of I: for those of that product where `down` takes int8, and
    `x` may have its own there. `clamp`: `swiglu` with this alpha and limit in place of silu(gate) *
    up.
    """
    both = linear(x, gate_up, out=inner[: x.shape[0]])
    return gated_down(both, down, out, scales=scales, activation=activation, clamp=clamp)


def gated_down(
    both: Tensor,
    down: PackedLinear,
    out: Tensor,
    *,
    scales: Tensor | None = None,
    activation: Activation = "silu",
    clamp: Clamp | None = None,
) -> Tensor:
    """`gated_mlp` from `both` [T, 2I] on, gate and up, which are overwritten."""
    gate, _ = both.chunk(2, dim=1)
    if clamp is not None:
        product: Tensor | Int8Rows = swiglu(both, *clamp, out=gate)
        if down.takes_int8:
            rows = Int8Rows.inside(gate, down.group, scales, hadamard=down.hadamard)
            product = quantize_int8(gate, out=rows)
        return linear(product, down, out=out)
    if down.takes_int8:
        rows = Int8Rows.inside(gate, down.group, scales, hadamard=down.hadamard)
        rows = act_mul_int8(both, activation=activation, out=rows)
        return linear(rows, down, out=out)
    return linear(act_mul(both, gate, activation), down, out=out)


def _has_order(expert: Expert) -> bool:
    return any(getattr(packed.payload, "order", None) is not None for packed in expert)


def _on_gpu(packed: PackedLinear) -> bool:
    payload = packed.payload
    return packed.layout == "triton" or (isinstance(payload, Tensor) and payload.is_cuda)
