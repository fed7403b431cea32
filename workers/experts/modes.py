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
from torch import Tensor

from penstock.workers.config import MOE_MODES
from penstock.workers.request import RequestError

POOLED_MODES = ("sparse", "streamed")  # whose answers take neurons from a pool
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


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """Which of the T rows of one step are not exact, and how many neurons they left out."""

    quantized: Tensor | None  # bool [T]; None: no row is
    pooled: (
        Tensor | None
    )  # bool [T]: their neurons come from a pool; of sparse and streamed answers
    is_streamed: bool  # the pooled rows are
    num_neurons: Tensor  # int64 [T]: of the experts that sparse rows were routed to so far
    num_skipped: Tensor  # int64 [T]: of those, the ones left out

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> StepRows | None:
        """For the rows of consecutive spans, which have one mode besides exact; None if all rows
        are exact."""
        if all(mode == "exact" for mode, *_ in spans):
            return None
        quantized = np.concatenate([np.full(n, mode == "quantized") for mode, _, _, n in spans])
        pooled = np.concatenate(
            [
                (np.arange(start, start + n) >= num_prompt) & (mode in POOLED_MODES)
                for mode, num_prompt, start, n in spans
            ]
        )
        nothing = torch.zeros(len(pooled), dtype=torch.int64, device=device)
        return cls(
            torch.from_numpy(quantized).to(device) if quantized.any() else None,
            torch.from_numpy(pooled).to(device) if pooled.any() else None,
            any(mode == "streamed" for mode, *_ in spans),
            nothing,
            nothing.clone(),
        )
