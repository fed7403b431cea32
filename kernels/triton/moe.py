"""The routed experts of a layer on a GPU: one launch for all of them, and no look at the routes.

Imported only where it runs: on a GPU, or in Triton's interpreter on CPU tensors. The host does not
know how many rows an expert has: it launches programs for the most tiles that there can be, and
each finds its expert and its rows, or ends.
"""

# Parameters of a kernel are pointers and constants, which Python types do not tell apart.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.quant import Int8Rows
from penstock.kernels.triton import matmul as matmul_triton
from penstock.kernels.triton import rowwise as rowwise_triton
from penstock.kernels.triton import rowwise_quant as rowwise_quant_triton
from penstock.kernels.triton.matmul import GpuWeight, Routing
from penstock.kernels.types import PackedLinear

# Routes that are placed by comparing each with each, in one launch; more of them are sorted.
MAX_COMPARED = 8192
# Least number of routes of a launch, if there are that many: few leave multiprocessors idle.
MIN_LAUNCHED = 1024
_PARTS = ("codes", "scales", "zeros", "bias")


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight:
    """The weights of all experts: the first one, and int64 [4, E] from its codes, scales, zeros and
    bias to those of each. GPU memory is one flat space."""

    first: GpuWeight
    offsets: Tensor
    aligned: bool
    num_experts: int


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """R = T * k routes sorted by expert, and by token within one: `places` int64 [T, k], where each
    stands; `tokens` int32 [R], whose row it takes; `starts` int32 [E + 1], where experts begin."""

    places: Tensor
    tokens: Tensor
    starts: Tensor


def expert_table(
    experts: Sequence[tuple[PackedLinear, PackedLinear]],
) -> tuple[GroupedWeight, GroupedWeight]:
    """Of packed experts, which must stay where they are: gate_up and down."""
    return group_weights([e[0] for e in experts]), group_weights([e[1] for e in experts])


def group_weights(linears: Sequence[PackedLinear]) -> GroupedWeight:
    """Linears of one shape and format."""
    weights = [
        packed.payload
        if isinstance(packed.payload, GpuWeight)
        else matmul_triton.pack_plain(packed.payload, packed.bias)
        for packed in linears
    ]
    first = weights[0]
    rows = []
    for part in _PARTS:
        base, row = getattr(first, part), []
        for weight in weights:
            mine = getattr(weight, part)
            assert (mine is None) == (base is None)
            if mine is None:
                row.append(0)
                continue
            assert mine.shape == base.shape and mine.stride() == base.stride()
            distance = mine.data_ptr() - base.data_ptr()
            assert distance % base.element_size() == 0
            row.append(distance // base.element_size())
        rows.append(row)
    aligned = all(offset % 16 == 0 for offset in rows[0])
    offsets = torch.tensor(rows, dtype=torch.int64, device=first.codes.device)
    return GroupedWeight(first, offsets, aligned, len(weights))


def moe_mlp(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, table: tuple[GroupedWeight, GroupedWeight],
    grouped: Tensor, inner: Tensor, out: Tensor, clamp: tuple[float, float] | None = None,
) -> Tensor:  # fmt: skip
    """`moe.moe_mlp` with all the memory given, `out` may be `x`; but where `inner` has fewer than
    MIN_LAUNCHED rows, memory of no more than that many is allocated in its place."""
    gate_up, down = table
    routes = group_routes(topk_ids, gate_up.num_experts)
    num_routes = routes.tokens.shape[0]
    some = min(num_routes, MIN_LAUNCHED)
    if inner.shape[0] < some:
        inner = inner.new_empty(some, inner.shape[1])
    values, scales = matmul_triton.activations(x, gate_up.first)  # of a token once, not of a route
    for first in range(0, num_routes, max(1, inner.shape[0])):
        tokens = routes.tokens[first : first + inner.shape[0]]
        both = inner[: tokens.shape[0]]
        grouped_linear(values, scales, gate_up, routes.starts, both, first, tokens)
        gate, _ = both.chunk(2, dim=1)
        product: Tensor | Int8Rows
        if clamp is not None:  # rounded to int8 by `activations`, where that is wanted
            product = rowwise_triton.swiglu(both, gate, *clamp)
        elif down.first.takes_int8:
            product = rowwise_quant_triton.act_mul_int8(
                both,
                Int8Rows.inside(gate, down.first.row_group, hadamard=down.first.hadamard),
            )
        else:
            product = rowwise_triton.act_mul(both, gate)
        rows = grouped[first : first + tokens.shape[0]]
        inner_values, inner_scales = matmul_triton.activations(product, down.first)
        grouped_linear(inner_values, inner_scales, down, routes.starts, rows, first)
    return rowwise_triton.combine(grouped, routes.places, topk_weights.float().contiguous(), out)


@dataclass(frozen=True, slots=True, eq=False)
class ColumnRun:
    """One layer's routes through some columns of all experts, as `moe_columns` asks for them."""

    values: Tensor  # of x, as `matmul_triton.activations` has them
    scales: Tensor | None
    routes: Routes
    gate_up: GroupedWeight
    down: GroupedWeight

    def inner(self, both: Tensor, products: Tensor, clamp: tuple[float, float] | None) -> None:
        """`products` [R, I'] of sorted routes; `both` [T, 2I'] is memory, and where that is fewer
        than MIN_LAUNCHED rows, others are allocated in its place."""
        num_routes = products.shape[0]
        some = min(num_routes, MIN_LAUNCHED)
        if both.shape[0] < some:
            both = both.new_empty(some, both.shape[1])
        for first in range(0, num_routes, max(1, both.shape[0])):
            tokens = self.routes.tokens[first : first + both.shape[0]]
            made, out = both[: tokens.shape[0]], products[first : first + tokens.shape[0]]
            starts = self.routes.starts
            grouped_linear(self.values, self.scales, self.gate_up, starts, made, first, tokens)
            if clamp is not None:
                rowwise_triton.swiglu(made, out, *clamp)
            else:
                rowwise_triton.act_mul(made, out)

    def outputs(self, whole: Tensor, out: Tensor) -> None:
        """`whole` [R, I] -> `out` [R, d'], both of sorted routes."""
        values, scales = matmul_triton.activations(whole, self.down.first)
        grouped_linear(values, scales, self.down, self.routes.starts, out)

    def combined(self, grouped: Tensor, topk_weights: Tensor, out: Tensor) -> Tensor:
        weights = topk_weights.float().contiguous()
        return rowwise_triton.combine(grouped, self.routes.places, weights, out)


def columns_of(
    x: Tensor, topk_ids: Tensor, table: tuple[GroupedWeight, GroupedWeight]
) -> ColumnRun:
    """For `x` [T, d] and `topk_ids` int64 [T, k]."""
    gate_up, down = table
    values, scales = matmul_triton.activations(x, gate_up.first)
    routes = group_routes(topk_ids, gate_up.num_experts)
    return ColumnRun(values, scales, routes, gate_up, down)


def grouped_linear(
    x: Tensor,
    x_scales: Tensor | None,
    weight: GroupedWeight,
    starts: Tensor,
    out: Tensor,
    row_first: int = 0,
    row_ids: Tensor | None = None,
    fp8_units: bool | None = None,
) -> Tensor:
    """Sorted rows [row_first, row_first + rows of `out`) through their experts, into `out`.

    Row i of them is row `row_ids[i]` of `x`, or its own. `x` as `matmul_triton.activations` has it.
    """
    num_experts, num_rows = weight.num_experts, out.shape[0]
    rows = triton.cdiv(3 * num_rows, 2 * num_experts)  # half more than an expert has on average
    tiles = matmul_triton.tiles_for(weight.first, rows, x, num_groups=min(num_experts, num_rows))
    routing = Routing(starts, row_ids, weight.offsets, row_first, num_experts, weight.aligned)
    matmul_triton.launch(x, x_scales, weight.first, out, tiles, routing, fp8_units)
    return out


def group_routes(topk_ids: Tensor, num_experts: int) -> Routes:
    """Of `topk_ids` int64 [T, k]. Nothing of it goes through the host."""
    num_routes, device = topk_ids.numel(), topk_ids.device
    ids = topk_ids.reshape(-1)
    places = torch.empty(num_routes, dtype=torch.int64, device=device)
    tokens = torch.empty(num_routes, dtype=torch.int32, device=device)
    if num_routes > MAX_COMPARED:
        ids, order = ids.sort(stable=True)
        places[order] = torch.arange(num_routes, device=device)
        torch.floor_divide(order, topk_ids.shape[1], out=tokens)
        experts = torch.arange(num_experts + 1, device=device)
        starts = torch.searchsorted(ids, experts, out_int32=True)
    else:
        starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
        _place_kernel[(triton.cdiv(num_routes + num_experts + 1, 64),)](
            ids, places, tokens, starts, num_routes, num_experts, topk_ids.shape[1],
            QUERIES=64, ROUTES=128,
        )  # fmt: skip
    return Routes(places.view_as(topk_ids), tokens, starts)


@triton.jit
def _place_kernel(
    ids_ptr, places_ptr, tokens_ptr, starts_ptr, num_routes, num_experts, top_k,
    QUERIES: tl.constexpr, ROUTES: tl.constexpr,
):  # fmt: skip
    """A route's place: how many have a lower expert, or the same and come before. An expert's start
    is the place of a route that comes before all of its own."""
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    is_route = query < num_routes
    expert = tl.load(ids_ptr + query, mask=is_route, other=0).to(tl.int32)
    expert = tl.where(is_route, expert, query - num_routes)
    nth = tl.where(is_route, query, -1)
    place = tl.zeros([QUERIES], tl.int32)
    for first in range(0, num_routes, ROUTES):
        route = first + tl.arange(0, ROUTES)
        ids = tl.load(ids_ptr + route, mask=route < num_routes, other=2**31 - 1).to(tl.int32)
        lower = ids[None, :] < expert[:, None]
        earlier = (ids[None, :] == expert[:, None]) & (route[None, :] < nth[:, None])
        place += tl.sum((lower | earlier).to(tl.int32), 1)
    tl.store(places_ptr + query, place.to(tl.int64), mask=is_route)
    tl.store(tokens_ptr + place, query // top_k, mask=is_route)
    is_start = (query >= num_routes) & (query <= num_routes + num_experts)
    tl.store(starts_ptr + query - num_routes, place, mask=is_start)
