"""From what a client saw to figures: TTFT, TPOT, ITL, throughput, goodput, errors by kind.

Pure arithmetic on times.

Where the time between tokens is concerned, a chunk is what arrives at once, and it may hold several
tokens. A chunk of n tokens that comes g seconds after the one before counts as n inter-token times
of g / n each ("spread"), so that the inter-token times of an answer sum up to the time from its
first chunk to its last. The pauses themselves, one a chunk, are reported in addition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.deployments.bench.load import Job

PERCENTILES = (50, 90, 99)

EXACT = "exact"  # the server named the tokens of each chunk
ONE_EACH = "one a chunk"  # as many chunks as tokens, give or take the one that ends the answer
ASSUMED = "one a chunk, assumed"  # neither the server nor a tokenizer counted them
SPREAD = "by characters"  # the total is known, and divided by how long the chunks' texts are


@dataclass(frozen=True, slots=True)
class Chunk:
    """What arrived at once. `num_tokens` is None where the server does not say."""

    at_s: float
    num_chars: int
    num_tokens: int | None = None


@dataclass(slots=True)
class Outcome:
    """One request as the client saw it; all times on one clock.

    `late_s`: how much later than planned it was ready to go, by the fault of the client.
    `held_s`: how long it then waited because --max-concurrency were under way.
    """

    job: Job
    sent_s: float = 0.0
    ended_s: float = 0.0
    late_s: float = 0.0
    held_s: float = 0.0
    chunks: list[Chunk] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    was_cut: bool = False
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.chunks[0].at_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s

    def token_counts(self) -> tuple[list[int], str]:
        """Tokens of each chunk, and how that is known."""
        total, num_chunks = self.completion_tokens, len(self.chunks)
        if all(chunk.num_tokens is not None for chunk in self.chunks):
            return [chunk.num_tokens or 0 for chunk in self.chunks], EXACT
        if total is None:
            return [1] * num_chunks, ASSUMED
        if total in (num_chunks, num_chunks + 1):
            return [1] * num_chunks, ONE_EACH
        ends = np.cumsum([chunk.num_chars for chunk in self.chunks])
        shares = np.rint(ends * (total / max(ends[-1], 1))).astype(int)
        return [int(n) for n in np.diff(shares, prepend=0)], SPREAD

    def num_output_tokens(self) -> int:
        """As reported by the server; else as counted by the client."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        return sum(self.token_counts()[0])

    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None if there was but one."""
        num_tokens = sum(self.token_counts()[0])
        if num_tokens < 2:
            return None
        return (self.chunks[-1].at_s - self.chunks[0].at_s) / (num_tokens - 1)

    def itl_s(self) -> list[float]:
        """Inter-token times, a chunk's pause spread over its tokens. Those that come with the
        first token have none."""
        times, carried = [], 0.0
        counts = self.token_counts()[0]
        for (before, chunk), num_tokens in zip(pairwise(self.chunks), counts[1:]):
            carried += chunk.at_s - before.at_s
            if num_tokens > 0:
                times += [carried / num_tokens] * num_tokens
                carried = 0.0
        return times

    def pauses_s(self) -> list[float]:
        return [after.at_s - before.at_s for before, after in pairwise(self.chunks)]


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good request keeps; None is no demand."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def is_set(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def is_met(self, outcome: Outcome) -> bool:
        if outcome.error is not None:
            return False
        if self.ttft_ms is not None and outcome.ttft_s * 1e3 > self.ttft_ms:
            return False
        tpot_s = outcome.tpot_s()
        return self.tpot_ms is None or tpot_s is None or tpot_s * 1e3 <= self.tpot_ms


def spread_of(values: Sequence[float], scale: float = 1.0) -> dict[str, float] | None:
    """Mean, percentiles (interpolated linearly) and maximum, times `scale`; None of nothing."""
    if len(values) == 0:
        return None
    numbers = np.asarray(values, dtype=float) * scale
    ranks = {f"p{p}": float(np.percentile(numbers, p)) for p in PERCENTILES}
    return {"mean": float(numbers.mean()), **ranks, "max": float(numbers.max())}


def figures_of(outcomes: Sequence[Outcome], slo: Slo) -> dict[str, Any]:
    """All figures of a run, ready for JSON; times in ms. Rates are over the time from the first
    request's start to the last one's end, and count what was answered without an error."""
    good = [each for each in outcomes if each.error is None]
    errors = Counter(each.error for each in outcomes if each.error is not None)
    began_s = min((each.sent_s for each in outcomes), default=0.0)
    wall_s = max((each.ended_s for each in outcomes), default=0.0) - began_s
    per_s = 1 / wall_s if wall_s > 0 else 0.0
    num_input = sum(each.prompt_tokens or each.job.prompt_tokens for each in good)
    num_output = sum(each.num_output_tokens() for each in good)
    answered = [each for each in good if each.chunks]
    figures: dict[str, Any] = {
        "num_requests": len(outcomes),
        "num_completed": len(good),
        "num_cut": sum(each.was_cut for each in good),
        "num_empty": len(good) - len(answered),
        "errors": dict(errors.most_common()),
        "wall_s": wall_s,
        "input_tokens": num_input,
        "input_tokens_estimated": sum(each.prompt_tokens is None for each in good),
        "output_tokens": num_output,
        "draft_tokens": sum(each.draft_tokens for each in good),
        "accepted_draft_tokens": sum(each.accepted_draft_tokens for each in good),
        "requests_per_s": len(good) * per_s,
        "input_tokens_per_s": num_input * per_s,
        "output_tokens_per_s": num_output * per_s,
        "ttft_ms": spread_of([each.ttft_s for each in answered], 1e3),
        "tpot_ms": spread_of([t for each in answered if (t := each.tpot_s()) is not None], 1e3),
        "itl_ms": spread_of([t for each in answered for t in each.itl_s()], 1e3),
        "pause_ms": spread_of([t for each in answered for t in each.pauses_s()], 1e3),
        "e2e_ms": spread_of([each.e2e_s for each in good], 1e3),
        "client_late_ms": spread_of([each.late_s for each in outcomes], 1e3),
        "client_held_ms": spread_of([each.held_s for each in outcomes], 1e3),
        "token_counts": dict(Counter(each.token_counts()[1] for each in answered)),
    }
    if slo.is_set:
        num_met = sum(slo.is_met(each) for each in answered)
        figures["goodput"] = {
            "slo_ttft_ms": slo.ttft_ms,
            "slo_tpot_ms": slo.tpot_ms,
            "requests_per_s": num_met * per_s,
            "share": num_met / len(outcomes) if outcomes else 0.0,
        }
    return figures
