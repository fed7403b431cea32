"""Sampling on a GPU: temperature, top-k, top-p and min-p of every row in one launch, no sort.

Imported only where it runs: on a GPU, or in Triton's interpreter on CPU tensors. Meaning of the
parameters: `sampling.py`.

A filter keeps what is at least its edge: the largest logit such that all from it on measure enough
(k of them, or a share of the probability). The search halves the interval in which the edge lies,
by turns in value and in the number of floats between, and copies what lies in it to scratch, so
that each step reads fewer logits: together about two to three times the vocabulary. Quickselect
with certain bounds (Hoare 1961); at most 64 steps, whatever the logits are.
"""

# Parameters of a kernel are pointers and constants, which Python types do not tell apart.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.types import SamplingRows

_TILE = 2048
_MAX_SCALE = tl.constexpr(1e30)  # temperatures below take the likeliest; 0 x inf would be NaN


def sample(logits: Tensor, rows: SamplingRows, tile: int = _TILE) -> Tensor:
    """int64 [R] on the device of `logits` fp32 [R, V]; -1 as in `sampling.sample`.

    Probabilities are exponentials in fp32 and sums in fp64. The host waits for nothing.
    """
    num_rows, vocab = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    device = logits.device
    ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return ids
    columns = (rows.inverse_temperature, rows.top_k, rows.top_p, rows.min_p, rows.uniform)
    parameters = torch.stack(columns)
    if device.type == "cuda":  # pinned, or the driver may wait for what was launched before
        parameters = parameters.pin_memory().to(device, non_blocking=True)
    filtered = bool((rows.top_k > 0).any()) or bool((rows.top_p < 1).any())
    scratch = torch.empty(num_rows, vocab if filtered else 0, device=device)
    _sample_kernel[(num_rows,)](
        logits, parameters, scratch, ids, logits.stride(0), scratch.stride(0), num_rows, vocab,
        TILE=tile, TILES=triton.next_power_of_2(triton.cdiv(vocab, tile)), FILTERED=filtered,
        num_warps=16, num_stages=1,
    )  # fmt: skip
    return ids


@triton.jit
def _weigh(x, top, scale):
    """Probabilities over that of the likeliest, fp32."""
    return tl.exp((x - top) * scale)


@triton.jit
def _order(x):
    """int64 in the order of the fp32 numbers, one apart for neighbours."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 is 0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _number(order):
    """The reverse of `_order`."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _survey(row_ptr, vocab, TILE: tl.constexpr):
    """The largest logit, its first id, the least one above -inf, and how many are NaN."""
    best = tl.full([TILE], float("-inf"), tl.float32)
    least = tl.full([TILE], float("inf"), tl.float32)
    best_id = tl.zeros([TILE], tl.int32)
    wrong = tl.zeros([TILE], tl.int32)
    for first in range(0, vocab, TILE):
        i = first + tl.arange(0, TILE)
        x = tl.load(row_ptr + i, mask=i < vocab, other=float("-inf"))
        best_id = tl.where(x > best, i, best_id)
        best = tl.where(x > best, x, best)
        least = tl.where((x < least) & (x > float("-inf")), x, least)
        wrong += (x != x).to(tl.int32)
    top = tl.max(best, 0)
    top_id = tl.min(tl.where(best == top, best_id, vocab), 0)
    return top, top_id, tl.min(least, 0), tl.sum(wrong, 0)


@triton.jit
def _mass_from(row_ptr, vocab, edge, top, scale, TILE: tl.constexpr):
    """The weight of all logits from `edge` on."""
    total = tl.zeros([TILE], tl.float64)
    for first in range(0, vocab, TILE):
        i = first + tl.arange(0, TILE)
        x = tl.load(row_ptr + i, mask=i < vocab, other=float("-inf"))
        total += tl.where(x >= edge, _weigh(x, top, scale), 0.0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def _find_edge(row_ptr, scratch_ptr, vocab, low, top, scale, target, by_mass, TILE: tl.constexpr):
    """The largest logit, not below `low`, such that those from it on measure `target`: their
    weight, or their number. All from `low` on do."""
    high, above, num_left, step = top, target * 0.0, vocab, 0
    source = row_ptr
    while low < high:
        # Not below `low`, but above it; not above `high`.
        middle = tl.where(step % 2 == 0, 0.5 * low + 0.5 * high, _number(
            (_order(low) + _order(high) + 1) >> 1
        ))  # fmt: skip
        middle = tl.where((middle > low) & (middle <= high), middle, high)
        upper = tl.zeros([TILE], tl.float64)
        least_upper = tl.full([TILE], float("inf"), tl.float32)
        most_lower = tl.full([TILE], float("-inf"), tl.float32)
        for first in range(0, num_left, TILE):
            i = first + tl.arange(0, TILE)
            x = tl.load(source + i, mask=i < num_left, other=float("-inf"))
            inside = (x >= middle) & (x <= high)
            measure = tl.where(by_mass, _weigh(x, top, scale), 1.0)
            upper += tl.where(inside, measure, 0.0).to(tl.float64)
            least_upper = tl.minimum(least_upper, tl.where(inside, x, float("inf")))
            most_lower = tl.maximum(most_lower, tl.where(x < middle, x, float("-inf")))
        measured = tl.sum(upper, 0)
        enough = above + measured >= target
        low = tl.where(enough, tl.min(least_upper, 0), low)
        high = tl.where(enough, high, tl.max(most_lower, 0))
        above = tl.where(enough, above, above + measured)
        kept = 0
        for first in range(0, num_left, TILE):
            i = first + tl.arange(0, TILE)
            x = tl.load(source + i, mask=i < num_left, other=float("-inf"))
            inside = (x >= low) & (x <= high)
            place = kept + tl.cumsum(inside.to(tl.int32), 0) - 1
            # Never past what is still to be read, since the source may be scratch as well.
            tl.store(scratch_ptr + place, x, mask=inside)
            kept += tl.sum(inside.to(tl.int32), 0)
        tl.debug_barrier()
        source, num_left, step = scratch_ptr, kept, step + 1
    return high


@triton.jit
def _kept_weights(row_ptr, i, vocab, edge, top, scale, min_p):
    x = tl.load(row_ptr + i, mask=i < vocab, other=float("-inf"))
    weights = _weigh(x, top, scale)
    return tl.where((x >= edge) & (weights >= min_p), weights, 0.0).to(tl.float64)


@triton.jit
def _draw(
    row_ptr, vocab, edge, top, scale, min_p, uniform, TILE: tl.constexpr, TILES: tl.constexpr
):
    """The first id at which the cumulative weight of what is kept exceeds `uniform` of it all."""
    tile = tl.arange(0, TILES)
    masses = tl.zeros([TILES], tl.float64)
    for t in range(0, tl.cdiv(vocab, TILE)):
        i = t * TILE + tl.arange(0, TILE)
        mass = tl.sum(_kept_weights(row_ptr, i, vocab, edge, top, scale, min_p), 0)
        masses = tl.where(tile == t, mass, masses)
    cumulative = tl.cumsum(masses, 0)
    target = uniform * tl.max(cumulative, 0)
    mine = tl.sum((cumulative <= target).to(tl.int32), 0)
    mine = tl.minimum(mine, tl.max(tl.where(masses > 0, tile, 0), 0))
    before = tl.max(tl.where(tile < mine, cumulative, 0.0), 0)
    i = mine * TILE + tl.arange(0, TILE)
    weights = _kept_weights(row_ptr, i, vocab, edge, top, scale, min_p)
    passed = (before + tl.cumsum(weights, 0) > target) & (weights > 0)
    drawn = tl.min(tl.where(passed, i, vocab), 0)
    last = tl.max(tl.where(weights > 0, i, 0), 0)  # where a sum is rounded differently
    return tl.minimum(drawn, last)


@triton.jit
def _sample_kernel(
    logits_ptr, parameters_ptr, scratch_ptr, ids_ptr, stride, scratch_stride, num_rows, vocab,
    TILE: tl.constexpr, TILES: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr, scratch_ptr = logits_ptr + row * stride, scratch_ptr + row * scratch_stride
    parameters_ptr += row
    inverse_temperature = tl.load(parameters_ptr)
    top, chosen, least, wrong = _survey(row_ptr, vocab, TILE)
    if (wrong > 0) | (tl.abs(top) == float("inf")):
        chosen = -1
    elif inverse_temperature > 0:
        scale = tl.minimum(inverse_temperature, _MAX_SCALE).to(tl.float32)
        edge = least
        if FILTERED:
            top_k, top_p = (
                tl.load(parameters_ptr + num_rows),
                tl.load(parameters_ptr + 2 * num_rows),
            )
            if (top_k > 0) & (top_k < vocab):
                edge = _find_edge(row_ptr, scratch_ptr, vocab, edge, top, scale, top_k, False, TILE)
            if top_p < 1:
                target = top_p * _mass_from(row_ptr, vocab, edge, top, scale, TILE)
                edge = _find_edge(row_ptr, scratch_ptr, vocab, edge, top, scale, target, True, TILE)
        min_p = tl.load(parameters_ptr + 3 * num_rows).to(tl.float32)
        uniform = tl.load(parameters_ptr + 4 * num_rows)
        chosen = _draw(row_ptr, vocab, edge, top, scale, min_p, uniform, TILE, TILES)
    tl.store(ids_ptr + row, chosen.to(tl.int64))
