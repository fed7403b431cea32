"""Samples one token for each row of a step: parameters, random number, banned tokens.

The random number is a pure function of (seed, token index), and each row is drawn independently:
the same request gives the same tokens in any batch, after preemption, and on another worker.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.kernels import sampling
from penstock.kernels.types import SamplingRows
from penstock.workers.errors import InvariantError
from penstock.workers.request import TokenLogprob
from penstock.workers.sampling.device_copy import to_device, to_host
from penstock.workers.sampling.logits import LogprobRows

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row is sampled.

    `uniform` in [0, 1) is its random number. `edit` changes the row's logits in place before the
    draw, and `banned_ids` are masked. `num_logprobs`: how many of the likeliest tokens to report.
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
    """A sampled token; -1: the row had NaN or +inf in it, or no token was left to choose."""

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


@dataclass(frozen=True, slots=True, eq=False)
class SampledRows:
    """The sampled tokens, being copied to the host."""

    ids: Tensor  # int64 [R] on the device, as `sampling.sample` gives them
    host_ids: Tensor
    place_of: dict[int, int]  # row of the step -> row of `reported` that has its logprobs
    reported: LogprobRows | None
    num_top: list[int]  # by row of `reported`: how many likeliest tokens to report

    def listed(self) -> list[Sampled]:
        """One Sampled for each row; call after synchronising with the device."""
        ids: list[int] = self.host_ids.tolist()
        if self.reported is None:
            return [Sampled(token_id) for token_id in ids]
        found = self.reported.listed()
        of_row = {
            i: replace(found[at], top=found[at].top[: self.num_top[at]])
            for i, at in self.place_of.items()
            if ids[i] >= 0
        }
        return [Sampled(token_id, of_row.get(i)) for i, token_id in enumerate(ids)]


def sample(logits: Tensor, rows: Seq[RowSampling], *, is_fast: bool = True) -> SampledRows:
    """One token for each row of `logits`, fp32 [rows, vocab], which may be changed in place.

    `is_fast`: as for `sampling.sample`. The host does not wait for the device, unless an `edit`
    does.
    """
    if logits.shape[0] != len(rows):
        raise InvariantError(f"{logits.shape[0]} rows of logits, {len(rows)} to be sampled")
    reported = [i for i, row in enumerate(rows) if row.num_logprobs is not None]
    at = to_device(torch.tensor(reported, dtype=torch.int64), logits.device)
    raw = logits[at] if reported else logits  # a copy, before anything is changed
    for i, row in enumerate(rows):
        if row.edit is not None:
            row.edit(logits[i])
    _ban(logits, rows)
    ids = sampling.sample(logits, _parameters(rows), is_fast=is_fast)
    if not reported:
        return SampledRows(ids, to_host(ids), {}, None, [])
    num_top = [rows[i].num_logprobs or 0 for i in reported]
    chosen = ids[at].clamp(min=0)  # a row without a token is not reported
    found = LogprobRows.of(raw, chosen, max(num_top)).to_host()
    place_of = {i: place for place, i in enumerate(reported)}
    return SampledRows(ids, to_host(ids), place_of, found, num_top)


def _ban(logits: Tensor, rows: Seq[RowSampling]) -> None:
    pairs = [(i, token_id) for i, row in enumerate(rows) for token_id in row.banned_ids]
    if pairs:
        at, ids = to_device(torch.tensor(pairs).T.contiguous(), logits.device)
        logits[at, ids] = torch.full((), -torch.inf, device=logits.device)


def _parameters(rows: Seq[RowSampling]) -> SamplingRows:
    columns = torch.tensor(
        [
            (1 / r.temperature if r.temperature else 0.0, r.top_k, r.top_p, r.min_p, r.uniform)
            for r in rows
        ],
        dtype=torch.float64,
    )
    return SamplingRows(*columns.T.contiguous())
