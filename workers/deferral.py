"""Deferred commit: when a decoding sequence may go on without a block for its newest tokens.

Their K and V go to scratch blocks, which all layers share and which last for one step; the tokens
stay pending and are computed again with the next one. Ids of scratch blocks follow those of the
pool. Knows counts and the rule; nothing of pools or sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.workers.config import EngineConfig
from penstock.workers.memory import BlockLayout


DEFERRING = 8  # sequences that may wait for blocks with all the tokens that they may


class CommitRule(Protocol):
    """The arithmetic: is it worth computing these tokens again in the next step?"""

    def may_wait(self, num_pending: int, num_scheduled: int, num_stored: int) -> bool:
        """Whether `num_pending` tokens of a sequence may stay unstored beside `num_scheduled`
        others of the step, where `num_stored` tokens of the sequence are stored."""


@dataclass(frozen=True, slots=True)
class RidgeRule:
    """All tokens of a step together stay below the ridge."""

    ridge_tokens: int

    def may_wait(self, num_pending: int, num_scheduled: int, num_stored: int) -> bool:
        return num_pending + num_scheduled <= self.ridge_tokens


@dataclass(frozen=True, slots=True)
class Deferral:
    """How deferred commit is set up. `pressure`: only before somebody would be preempted."""

    rule: CommitRule
    mode: str
    max_tokens: int  # most pending tokens of one sequence
    num_scratch_blocks: int

    def stored(
        self, *, length: int, fits: int, num_scheduled: int, num_stored: int
    ) -> int | None:
        """Of the `length` pending tokens of a sequence, how many are stored in this step.

        `fits` of them could be. None: they cannot all be computed in this step.
        """
        if self.mode == "always" and self._may_wait(length, num_scheduled, num_stored):
            return 0
        if fits >= length:
            return length
        return fits if self._may_wait(length - fits, num_scheduled, num_stored + fits) else None

    def _may_wait(self, num_pending: int, num_scheduled: int, num_stored: int) -> bool:
        return num_pending <= self.max_tokens and self.rule.may_wait(
            num_pending, num_scheduled, num_stored
        )


def deferral_of(config: EngineConfig, rule: CommitRule | None) -> Deferral | None:
    """As configured; None where every token is stored at once."""
    if config.kv_commit == "eager" or rule is None:
        return None
    most = config.kv_defer_max_tokens
    # Room for a few sequences at their limit: more at once would cost more than a preemption.
    num_scratch = DEFERRING * -(-most // config.block_size)
    return Deferral(rule, config.kv_defer_mode, most, num_scratch)


def scratch_blocks(
    layout: BlockLayout, deferral: Deferral | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """K and V of the scratch blocks, [blocks, kv heads, block_size, head_dim]: one layer's worth,
    since the next layer overwrites what the one before it left."""
    if deferral is None:
        return None
    shape = (deferral.num_scratch_blocks, layout.num_kv_heads, layout.block_size, layout.head_dim)
    k, v = (torch.empty(shape, dtype=layout.dtype, device=device) for _ in range(2))
    return k, v
