"""The expert MLP of a mixture-of-experts layer, with tokens grouped by expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.cpu import native
from penstock.kernels.cpu.arguments import COMBINE
from penstock.kernels.matmul import linear
from penstock.kernels.quant import Int8Rows
from penstock.kernels.rowwise import silu_mul, silu_mul_int8
from penstock.kernels.types import PackedLinear

Expert = tuple[PackedLinear, PackedLinear]  # gate_up [2I, d] and down [d, I]
# An expert that has tokens, and bool [n, I] (in the order of its n tokens) if only some neurons are
# active.
Visited = tuple[int, Expert, Tensor | None]
# Given the ids of the experts that have tokens, yields each once, in an order of its choice. An
# expert is used only until the next one is requested.
Visit = Callable[[list[int]], Iterator[Visited]]


class GroupedExperts(tuple[Expert, ...]):
    """All experts of a layer, and `table`, with which a GPU runs them in one launch."""

    table: Any = None


def pack_experts(experts: Sequence[Expert]) -> Sequence[Expert]:
    """Packed experts for `moe_mlp`: on a GPU with their table, elsewhere unchanged.

    Their memory must not move. Experts of different formats have no table.
    """
    formats = {(gate_up.format, down.format) for gate_up, down in experts}
    if not _on_gpu(experts[0][0]) or len(formats) > 1:
        return experts
    from penstock.kernels.triton import moe as moe_triton

    grouped = GroupedExperts(experts)
    grouped.table = moe_triton.expert_table(grouped)
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
    be `x` itself. With them, nothing whose size grows with d or I is allocated.
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
        from penstock.kernels.triton import moe as moe_triton

        table = experts.table
        return moe_triton.moe_mlp(x, topk_ids, topk_weights, table, grouped, inner, out)
    order = topk_ids.reshape(-1).argsort(stable=True)
    if num_experts is None:
        assert not callable(experts)
        num_experts = len(experts)
    counts = torch.bincount(topk_ids.reshape(-1), minlength=num_experts).tolist()
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=x.device)
    torch.index_select(x, 0, order // top_k, out=grouped)
    ends = list(accumulate(counts))
    used = [expert for expert, count in enumerate(counts) if count]
    in_turn = experts(used) if callable(experts) else ((e, experts[e], None) for e in used)
    at_once = max(1, inner.shape[0])
    for expert, (gate_up, down), active in in_turn:
        routed = grouped[ends[expert] - counts[expert] : ends[expert]]
        for first in range(0, counts[expert], at_once):
            rows = routed[first : first + at_once]
            some = None if active is None else active[first : first + at_once]
            gated_mlp(rows, gate_up, down, inner, out=rows, active=some)
    return _combine(grouped, places.view_as(topk_ids), topk_weights, out)


def gated_mlp(
    x: Tensor | Int8Rows,
    gate_up: PackedLinear,
    down: PackedLinear,
    inner: Tensor,
    out: Tensor,
    *,
    scales: Tensor | None = None,
    active: Tensor | None = None,
) -> Tensor:
    """down(silu(gate(x)) * up(x)) of `x` [T, d] into `out` [T, d], which may be `x` itself.

    `inner` [at least T, 2I]: gate and up are computed there, and their product where gate was.
    `scales` fp32, T elements: for those of that product where `down` is int8, and `x` may have its
    own there. `active` bool [T, I], for plain weights only: the neurons of each row that count; the
    memory of the others must hold finite numbers, which have no effect.
    """
    both = linear(x, gate_up, out=inner[: x.shape[0]])
    gate, _ = both.chunk(2, dim=1)
    if down.format == "int8":
        assert active is None
        return linear(silu_mul_int8(both, out=Int8Rows.inside(gate, scales)), down, out=out)
    product = silu_mul(both, out=gate)
    if active is not None:
        product.masked_fill_(~active, 0)
    return linear(product, down, out=out)


def moe_reference(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """The reference in fp32, token by token; `experts[e]` are plain gate_up and down weights."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token, (row, ids, weights) in enumerate(zip(x.float(), topk_ids.tolist(), topk_weights)):
        for expert, weight in zip(ids, weights):
            gate_up, down = experts[expert]
            gate, up = (gate_up.float() @ row).chunk(2)
            out[token] += weight * (down.float() @ (torch.nn.functional.silu(gate) * up))
    return out.to(x.dtype)


def _on_gpu(packed: PackedLinear) -> bool:
    payload = packed.payload
    return packed.layout == "triton" or (isinstance(payload, Tensor) and payload.is_cuda)


def _combine(routed: Tensor, places: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """sum_k weights[t, k] * routed[places[t, k]], k ascending: [T, k] -> `out` [T, d]."""
    num_tokens, num_ranks = places.shape
    weights = weights.float().contiguous()
    assert out.is_contiguous() and routed.is_contiguous()
    if routed.is_cuda:
        from penstock.kernels.triton import rowwise as rowwise_triton

        return rowwise_triton.combine(routed, places, weights, out)
    lib = native.usable(routed)
    if lib is not None:
        lib.pk_combine(COMBINE.pack(
            native.DTYPES[routed.dtype], routed.data_ptr(), places.data_ptr(), weights.data_ptr(),
            out.data_ptr(), num_tokens, num_ranks, routed.shape[1], torch.get_num_threads(),
        ))  # fmt: skip
        return out
    total = torch.zeros(num_tokens, routed.shape[1], device=routed.device)
    for rank in range(num_ranks):
        total += weights[:, rank, None] * routed[places[:, rank]].float()
    return out.copy_(total)
