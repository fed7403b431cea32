"""Figures of speculation.py: answers with drafts against those of the same round without."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Run:
    """Answers to some prompts at once."""

    seconds: float = 0.0  # without the first step
    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    ids: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return (sum(map(len, self.ids)) - len(self.ids)) / self.seconds


Runs = dict[tuple[str, int, str], list[Run]]  # by kind of text, number of requests and mode


def row(
    runs: Runs, kind: str, batch: int, mode: str, base: str, *, is_exact: bool
) -> dict[str, Any]:
    """Of one mode, against the mode `base`. Raises RuntimeError where `is_exact` and the ids
    differ; else `same_ids` is the share of rounds in which they agree."""
    own, plain = runs[kind, batch, mode], runs[kind, batch, base]
    same = [a.ids == b.ids for a, b in zip(own, plain, strict=True)]
    if is_exact and not all(same):
        raise RuntimeError(f"{kind}, {batch} requests, {mode}: other ids than without drafts")
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(own, plain, strict=True)]
    ours = runs[kind, batch, "off"]
    num_tokens = sum(len(ids) - 1 for run in own for ids in run.ids)
    found = {
        "kind": kind,
        "requests": batch,
        "mode": mode,
        "rounds": len(own),
        "tokens_per_s": statistics.median(run.tokens_per_s for run in own),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "tokens": num_tokens,
        "tokens_a_step": num_tokens / sum(run.num_steps for run in own) / len(own[0].ids),
        "drafts": sum(run.num_drafts for run in own),
        "accepted": sum(run.num_accepted for run in own),
    }
    if not is_exact:
        against = [a.tokens_per_s / b.tokens_per_s for a, b in zip(own, ours, strict=True)]
        found |= {"same_ids": statistics.fmean(same), "of_off": statistics.median(against)}
    return found
