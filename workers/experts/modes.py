"""The accuracy modes of experts (`moe_mode`), by request and by row of a step.

exact      what the plain model computes, bit for bit.
quantized  every row of the request uses the int8 copies of its experts.
sparse     rows of the answer leave out neurons with low scores; the prompt is exact (TEAL, arXiv
           2408.14690, keeps most of prefill dense too). Neurons are selected for each row alone, so
           a result does not depend on the rest of the batch; and a row's position, not the step,
           decides whether it is part of the answer, so recomputation gives the same result.
streamed   rows of the answer use all neurons, those with high scores first, while the others are
           copied: exact but for the order of additions, which depends on the row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.workers.config import MOE_MODES
from penstock.workers.request import RequestError

POOLED_MODES = ("sparse", "streamed")  # whose answers take neurons from a pool
# The mode of a row: a place in MOE_MODES.
Modes = NDArray[np.int32]
EXACT, QUANTIZED, SPARSE, STREAMED = range(len(MOE_MODES))
# mode, tokens of the prompt, first position and length of what is computed
Span = tuple[str, int, int, int]


def mode_for(asked: str | None, served: str) -> str:
    """The mode of a request that asks for `asked` where `served` is configured.

    Raises RequestError unless `asked` is None, exact or `served`.
    """
    if asked is None:
        return served
    if asked not in MOE_MODES:
        raise RequestError(f"moe_mode must be one of {', '.join(MOE_MODES)}", param="moe_mode")
    if asked not in ("exact", served):
        allowed = "exact" if served == "exact" else f"exact or {served}"
        raise RequestError(
            f"a request can only make moe_mode more exact: this model is served with {served}, and "
            f"the request has {asked!r}; ask for {allowed}",
            param="moe_mode",
        )
    return asked


def row_modes(spans: Sequence[Span]) -> Modes | None:
    """Of the rows [T] of consecutive spans; None if all are exact. Rows of a prompt are exact where
    its answer takes neurons from a pool."""
    if all(mode == "exact" for mode, *_ in spans):
        return None
    parts = []
    for mode, num_prompt, start, num_rows in spans:
        part = np.full(num_rows, MOE_MODES.index(mode), np.int32)
        if mode in POOLED_MODES:
            part[: max(0, num_prompt - start)] = EXACT
        parts.append(part)
    modes = np.concatenate(parts)
    return modes if modes.any() else None


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """Which of the T rows of one step are not exact, and how many neurons they left out."""

    quantized: Tensor | None  # bool [T]; None: no row is
    # bool [T]: their neurons come from a pool; of sparse and streamed answers
    pooled: Tensor | None
    is_streamed: bool  # the pooled rows are
    # int64 [T, 2]: neurons of the experts that sparse rows were routed to so far, and of those, the
    # ones left out. In a group, of this rank's experts, until the ranks have added their counts.
    counts: Tensor

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> StepRows | None:
        """For the rows of consecutive spans, which have one mode besides exact; None if all rows
        are exact."""
        modes = row_modes(spans)
        return None if modes is None else cls.with_modes(modes, device)

    @classmethod
    def with_modes(cls, modes: Modes, device: torch.device) -> StepRows:
        """For rows of these modes [T], which have one besides exact."""

        def which(found: NDArray[np.bool_]) -> Tensor | None:
            return torch.from_numpy(found).to(device) if found.any() else None

        return cls(
            which(modes == QUANTIZED),
            which((modes == SPARSE) | (modes == STREAMED)),
            bool((modes == STREAMED).any()),
            torch.zeros(len(modes), 2, dtype=torch.int64, device=device),
        )

    @property
    def num_neurons(self) -> Tensor:
        return self.counts[:, 0]

    @property
    def num_skipped(self) -> Tensor:
        return self.counts[:, 1]

    @property
    def leaves_out(self) -> bool:
        """Whether there is something to count."""
        return self.pooled is not None and not self.is_streamed

    @property
    def copied(self) -> Tensor | None:
        """bool [T]: the rows that ask for the id E + e in place of expert e of E."""
        return self.quantized if self.pooled is None else self.pooled

    def part(self, first: int, end: int) -> StepRows:
        """Rows [first, end), counted in the same memory."""

        def of(rows: Tensor | None) -> Tensor | None:
            return rows[first:end] if rows is not None and bool(rows[first:end].any()) else None

        return StepRows(
            of(self.quantized), of(self.pooled), self.is_streamed, self.counts[first:end]
        )
