"""The order of summation of attention in Triton, one for decode and prefill, and its two steps.

A score is one matrix product over the head dimension. Keys stand in tiles at multiples of the tile,
an online softmax step each; weights are added in a tree of halves, which is the same sum in any
layout of registers. After every `SPLIT` positions (`attention.py`) a piece ends; pieces are merged
in ascending order, the sinks of a rolled context before all others. What a row does not see weighs
0 and changes no sum, nor does a piece without keys. Multiply-adds are spelt out, and the kernels
are compiled without contraction, so that no compiler chooses another rounding in one of them.
"""

# Parameters of a kernel are pointers and constants, which Python types do not tell apart.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.rowwise import _tanh


@triton.jit
def nothing_seen(ROWS: tl.constexpr, DIM_TILE: tl.constexpr):
    """The softmax of no key: largest score, sum of weights, weighted sum of values."""
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    return top, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, DIM_TILE), tl.float32)


@triton.jit
def _row_sums(x):
    """[rows, columns] -> [rows]: column j and j + half, until one is left."""
    rows: tl.constexpr = x.shape[0]
    for _ in tl.static_range(8):
        if x.shape[1] > 1:
            x = tl.sum(x.reshape(rows, 2, x.shape[1] // 2), 1)
    return x.reshape(rows)


@triton.jit
def capped(scores, scale, softcap):
    """Scores that, once scaled, stay below the soft cap, if there is one."""
    if softcap is not None:
        cap = softcap / scale
        scores = _tanh(scores / cap) * cap
    return scores


@triton.jit
def soften(scores, visible, scale, top, total, acc, v):
    """One step of the online softmax in base 2; rows that see nothing stay as they are.

    `scale` is positive, and has the factor from base e in it.
    """
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep = tl.exp2(top - base)
    weights = tl.exp2(tl.fma(scores, scale, -base[:, None]))
    total = tl.fma(total, keep, _row_sums(weights))
    acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def add_sink(top, total, acc, sink):
    """The sums of rows to which one more score is added, in base 2, whose value is 0."""
    new_top = tl.maximum(top, sink)
    keep = tl.exp2(top - new_top)
    return tl.fma(total, keep, tl.exp2(sink - new_top)), acc * keep[:, None]


@triton.jit
def merge(top, total, acc, next_top, next_total, next_acc):
    """The pieces merged so far, and the next one."""
    new_top = tl.maximum(top, next_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep, weight = tl.exp2(top - base), tl.exp2(next_top - base)
    total = tl.fma(next_total, weight, total * keep)
    acc = tl.fma(next_acc, weight[:, None], acc * keep[:, None])
    return new_top, total, acc
