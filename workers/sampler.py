"""How each row of a step is sampled: its parameters, its random number, its banned tokens.

The random number is a pure function of (seed, token index), and the draw is one of the row: the
same request gives the same tokens in any batch, after preemption, and on another worker.
Knows nothing of sequences or memory.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from penstock.kernels import sampling
from penstock.workers.logits import logprobs_of
from penstock.workers.request import TokenLogprob

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row is sampled.

    `uniform` in [0, 1) is its random number. `edit` changes the row's logits in place before the
    draw, and `banned_ids` are masked. With `num_logprobs`, so many likeliest tokens are reported.
    """

    temperature: float  # 0: greedy
    top_k: int
    top_p: float
    min_p: float
    uniform: float
    banned_ids: tuple[int, ...] = ()
    edit: Callable[[torch.Tensor], None] | None = None
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token; -1: the row had NaN or +inf in it, or nothing was left to choose."""

    token_id: int
    logprob: TokenLogprob | None = None


def uniform_at(seed: int, index: int) -> float:
    """A uniform number in [0, 1) for token `index` of a request with `seed` (splitmix64)."""
    z = _mix(_mix(seed & _MASK64) + _GOLDEN * (index + 1))
    return (z >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def sample(logits: torch.Tensor, rows: Seq[RowSampling]) -> list[Sampled]:
    """One token a row of `logits`, fp32 [rows, vocab], which may be changed in place."""
    assert logits.shape[0] == len(rows)
    reported = [i for i, row in enumerate(rows) if row.num_logprobs is not None]
    raw = logits[reported] if reported else logits  # a copy, before anything is changed
    for i, row in enumerate(rows):
        if row.edit is not None:
            row.edit(logits[i])
        if row.banned_ids:
            logits[i, list(row.banned_ids)] = -torch.inf
    ids: list[int] = sampling.sample(logits, _parameters(rows)).tolist()
    if not reported:
        return [Sampled(token_id) for token_id in ids]
    logprobs = _logprobs(raw, [ids[i] for i in reported], [rows[i] for i in reported])
    by_row = dict(zip(reported, logprobs))
    return [Sampled(token_id, by_row.get(i)) for i, token_id in enumerate(ids)]


def _parameters(rows: Seq[RowSampling]) -> sampling.SamplingRows:
    columns = torch.tensor(
        [
            (1 / r.temperature if r.temperature else 0.0, r.top_k, r.top_p, r.min_p, r.uniform)
            for r in rows
        ],
        dtype=torch.float64,
    )
    return sampling.SamplingRows(*columns.T.contiguous())


def _logprobs(
    raw: torch.Tensor, token_ids: list[int], rows: list[RowSampling]
) -> list[TokenLogprob | None]:
    """Of the chosen tokens; None for a row that had none."""
    num_top = max(row.num_logprobs or 0 for row in rows)
    found = logprobs_of(raw, [max(token_id, 0) for token_id in token_ids], num_top)
    return [
        None if token_id < 0 else replace(each, top=each.top[: row.num_logprobs])
        for token_id, each, row in zip(token_ids, found, rows)
    ]
