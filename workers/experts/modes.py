"""How exact the experts of a request are, and of each row of a step.

exact      what the plain model does, bit for bit.
quantized  every row of the request goes through the int8 copies of its experts.
sparse     rows of the answer leave out the neurons that matter little to them; the prompt is exact
           (TEAL, arXiv 2408.14690, keeps most of prefill dense too). A row's neurons are its own
           choice, so what it gets does not depend on its batch-mates; and its place, not the step,
           says whether it is of the answer: what is computed again comes out the same.

Knows rows and counts; nothing of experts, slots or thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.workers.config import MOE_MODES
from penstock.workers.request import RequestError

# mode, tokens of the prompt, first position and length of what is computed
Span = tuple[str, int, int, int]


def mode_for(asked: str | None, served: str) -> str:
    """The mode of a request that asks for `asked` where `served` is configured.

    Raises RequestError unless it is that, or exact.
    """
    if asked is None:
        return served
    if asked not in MOE_MODES:
        raise RequestError(f"moe_mode must be one of {', '.join(MOE_MODES)}", param="moe_mode")
    if asked not in ("exact", served):
        allowed = "exact" if served == "exact" else f"exact or {served}"
        raise RequestError(
            f"moe_mode can only be made more exact by a request: this model has {served}, and "
            f"{asked!r} was asked for; ask for {allowed}",
            param="moe_mode",
        )
    return asked


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """Of the T rows of one step: which are not exact, and what has been left out for them."""

    quantized: Tensor | None  # bool [T]; None: no row is
    sparse: Tensor | None
    num_neurons: Tensor  # int64 [T]: of the experts that sparse rows went through so far
    num_skipped: Tensor  # int64 [T]: of those, the ones left out

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> StepRows | None:
        """For rows one span behind the other; None where all are exact."""
        if all(mode == "exact" for mode, *_ in spans):
            return None
        quantized = np.concatenate([np.full(n, mode == "quantized") for mode, _, _, n in spans])
        sparse = np.concatenate(
            [
                (np.arange(start, start + n) >= num_prompt) & (mode == "sparse")
                for mode, num_prompt, start, n in spans
            ]
        )
        nothing = torch.zeros(len(sparse), dtype=torch.int64, device=device)
        return cls(
            torch.from_numpy(quantized).to(device) if quantized.any() else None,
            torch.from_numpy(sparse).to(device) if sparse.any() else None,
            nothing,
            nothing.clone(),
        )
