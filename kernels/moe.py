"""The expert MLP of a mixture-of-experts layer, tokens grouped by expert.

Knows packed matrices and routes; nothing of routers, caches or where experts live.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels import native
from penstock.kernels.matmul import PackedLinear, linear
from penstock.kernels.rowwise import silu_mul

_COMBINE = struct.Struct("9q")


def moe_mlp(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: Sequence[tuple[PackedLinear, PackedLinear]],
) -> Tensor:
    """The weighted sum of each row of `x` [T, d] through its k experts -> [T, d].

    `topk_ids` int64 and `topk_weights` fp32 are [T, k]; `experts[e]` is (gate_up [2I, d],
    down [d, I]). One sort groups the routes by expert, and an expert without tokens costs nothing.
    The sum runs in fp32 over a token's routes in their given order, so that with native linears its
    result does not depend on its batch-mates.
    """
    num_routes = topk_ids.numel()
    order = topk_ids.reshape(-1).argsort(stable=True)
    counts = torch.bincount(topk_ids.reshape(-1), minlength=len(experts)).tolist()
    places = torch.empty_like(order)
    places[order] = torch.arange(num_routes, device=x.device)
    grouped = x[order // topk_ids.shape[1]]
    routed = torch.empty_like(grouped)
    start = 0
    for (gate_up, down), count in zip(experts, counts, strict=True):
        if count:
            rows = slice(start, start + count)
            linear(silu_mul(linear(grouped[rows], gate_up)), down, out=routed[rows])
            start += count
    return _combine(routed, places.view_as(topk_ids), topk_weights)


def moe_reference(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """The truth in fp32, token by token; `experts[e]` holds the plain gate_up and down weights."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token, (row, ids, weights) in enumerate(zip(x.float(), topk_ids.tolist(), topk_weights)):
        for expert, weight in zip(ids, weights):
            gate_up, down = experts[expert]
            gate, up = (gate_up.float() @ row).chunk(2)
            out[token] += weight * (down.float() @ (torch.nn.functional.silu(gate) * up))
    return out.to(x.dtype)


def _combine(routed: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """sum_k weights[t, k] * routed[places[t, k]], k ascending: [T, k] -> [T, d]."""
    lib = native.usable(routed)
    num_tokens, num_ranks = places.shape
    if lib is not None:
        out = routed.new_empty(num_tokens, routed.shape[1])
        weights = weights.float().contiguous()
        lib.ps_combine(_COMBINE.pack(
            native.DTYPES[routed.dtype], routed.data_ptr(), places.data_ptr(), weights.data_ptr(),
            out.data_ptr(), num_tokens, num_ranks, routed.shape[1], torch.get_num_threads(),
        ))  # fmt: skip
        return out
    total = torch.zeros(num_tokens, routed.shape[1], device=routed.device)
    for rank in range(num_ranks):
        total += weights[:, rank, None].float() * routed[places[:, rank]].float()
    return total.to(routed.dtype)
