"""How fast this worker computes tokens and loads blocks: measured at the start, kept up to date.

Knows clocks and counts; nothing of models, tiers or plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LARGE_STEP = 64  # tokens: a smaller step is mostly the reading of weights
WEIGHT = 0.2  # of the newest step in the running mean
PROBE_ROWS = 256
PROBE_COPIES = 8


def seconds_of(run: Callable[[], object], times: int = 1) -> float:
    """Of one `run()`, the mean over so many, after one to warm up."""
    run()
    began_s = time.perf_counter()
    for _ in range(times):
        run()
    return max((time.perf_counter() - began_s) / times, 1e-9)


class Rates:
    """Tokens a second that prefill computes, and bytes a second that the link brings."""

    def __init__(self, compute_tokens_per_s: float, link_bytes_per_s: float):
        self.compute_tokens_per_s = compute_tokens_per_s
        self.link_bytes_per_s = link_bytes_per_s

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step with so many tokens took so long."""
        if num_tokens >= LARGE_STEP and seconds > 0:
            newest = num_tokens / seconds
            self.compute_tokens_per_s += WEIGHT * (newest - self.compute_tokens_per_s)

    def observe_link(self, bytes_per_s: float | None) -> None:
        if bytes_per_s is not None:
            self.link_bytes_per_s = bytes_per_s
