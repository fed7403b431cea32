"""Sampling in plain PyTorch: the backend of a CPU without the native library, and the reference.

The parameters mean what they mean in `kernels/sampling.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.types import SamplingRows

NUM_TOP_CANDIDATES = 256  # nucleus rows look here first; a flat row that needs more is sorted whole


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    top, ids = logits.max(dim=-1)
    device = logits.device
    random = torch.nonzero(rows.inverse_temperature).squeeze(1)
    if len(random):
        picked = random.to(device)
        scale = rows.inverse_temperature[random].float().to(device)
        weights = torch.exp((logits[picked] - top[picked, None]) * scale[:, None])
        ids[picked] = _draw(weights, *(
            values[random].to(device)
            for values in (rows.top_k, rows.top_p, rows.min_p, rows.uniform)
        ))  # fmt: skip
    return torch.where(torch.isfinite(top), ids, -1)


def _draw(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """int64 [R] of `weights` [R, V], of which the largest in each row is exactly 1."""
    edge = _top_k_edge(weights, top_k)
    edge = torch.maximum(_top_p_edge(weights, edge, top_p), min_p.float())
    weights = weights.masked_fill(weights < edge[:, None], 0.0)
    cumulative = weights.double().cumsum(dim=-1)
    target = (uniform * cumulative[:, -1])[:, None]
    # right=True: the first index whose cumulative weight exceeds the target, so weight 0 never wins
    ids = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return ids.clamp_(max=weights.shape[-1] - 1)


def _top_k_edge(weights: Tensor, top_k: Tensor) -> Tensor:
    """The k-th largest weight of each row; 0 where the filter is off."""
    vocab = weights.shape[-1]
    edge = weights.new_zeros(weights.shape[0])
    on = torch.nonzero((top_k > 0) & (top_k < vocab)).squeeze(1)
    if len(on):
        ks = top_k[on].long()
        best = torch.topk(weights[on], int(ks.max()), dim=-1).values
        edge[on] = best.gather(1, (ks - 1)[:, None]).squeeze(1)
    return edge


def _top_p_edge(weights: Tensor, edge: Tensor, top_p: Tensor) -> Tensor:
    """`edge`, raised to the least weight of the fewest that hold top_p of what is left."""
    edge = edge.clone()
    on = torch.nonzero(top_p < 1).squeeze(1)
    if not len(on):
        return edge
    kept = weights[on]
    kept = kept.masked_fill(kept < edge[on, None], 0.0)
    mass = kept.double().sum(dim=-1) * top_p[on]
    num = min(NUM_TOP_CANDIDATES, kept.shape[-1])
    nucleus, found = _nucleus_edge(torch.topk(kept, num, dim=-1).values, mass)
    if not bool(found.all()):
        rest = ~found
        whole = kept[rest].sort(dim=-1, descending=True).values
        nucleus[rest], _ = _nucleus_edge(whole, mass[rest])
    edge[on] = torch.maximum(edge[on], nucleus)
    return edge


def _nucleus_edge(descending: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """The last of the fewest leading weights that reach `mass`, and whether they do."""
    cumulative = descending.double().cumsum(dim=-1)
    reached = cumulative >= mass[:, None]
    first = torch.where(reached.any(-1), reached.int().argmax(-1), descending.shape[-1] - 1)
    return descending.gather(1, first[:, None]).squeeze(1), reached.any(-1)


def sample_reference(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The reference, a row at a time with sorted probabilities in fp64: int64 [R]."""
    ids = []
    for i, row in enumerate(logits.double()):
        if not bool(torch.isfinite(row.max())):
            ids.append(-1)
            continue
        if rows.inverse_temperature[i] == 0:
            ids.append(int(row.argmax()))
            continue
        p = ((row - row.max()) * rows.inverse_temperature[i]).softmax(0)
        k = int(rows.top_k[i])
        if 0 < k < len(p):
            p = torch.where(p < p.sort(descending=True).values[k - 1], 0.0, p)
        if rows.top_p[i] < 1:
            down = p.sort(descending=True).values
            enough = down.cumsum(0) >= rows.top_p[i] * p.sum()
            p = torch.where(p < down[int(enough.int().argmax())], 0.0, p)
        p = torch.where(p < rows.min_p[i] * p.max(), 0.0, p)
        below = p.cumsum(0) > rows.uniform[i] * p.sum()
        ids.append(int(below.int().argmax()))
    return torch.tensor(ids)
