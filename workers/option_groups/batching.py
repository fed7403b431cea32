"""The settings of an engine step: how much it may hold, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from penstock.workers.settings import option

Switch = Literal["auto", "on", "off"]


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """What one engine step may hold, and how steps are launched."""

    GROUP: ClassVar[str] = "batching"

    max_num_seqs: int = option(64, "maximum sequences in one engine step", min=1)
    max_num_batched_tokens: int = option(
        2048, "maximum tokens of one engine step; longer prompts are prefilled in chunks", min=1
    )
    max_waiting: int = option(
        1024, "maximum requests that wait on one worker; more are refused", min=1
    )
    merge_steps: bool = option(
        True, "mixed batches: prefill and decode share a step; off: separate steps, for comparisons"
    )
    fast_sampling: bool = option(
        True, "draw tokens without sorting the vocabulary; off: PyTorch's sort, for comparisons"
    )
    async_scheduling: Switch = option(
        "auto",
        "async scheduling: launch a step before the host has read the ids of the step before it, "
        "so that host and device work at the same time (docs/design/engine.md); auto: on a GPU",
    )
    cuda_graphs: Switch = option(
        "auto",
        "run decode-only steps as CUDA graphs, captured at start for batches of 1, 2, 4, ... "
        "sequences (docs/design/engine.md); auto: on a GPU, for models that allow it",
    )
