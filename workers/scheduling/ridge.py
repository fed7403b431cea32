"""The roofline ridge: how many rows a step computes in the time of one, and the commit rule.

A pending token is one whose K and V are not stored: it is computed again in its sequence's next
step. The ridge, measured at start-up, is the budget for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from penstock.workers.errors import ConfigError

SLACK = 1.1  # a step that takes up to a tenth longer counts as equally long
HOPELESS = 3.0  # times slower than one row: larger sizes are not tried
MAX_ROUNDS = 9


@dataclass(frozen=True, slots=True)
class RidgeMeasurement:
    """The ridge `nt`, and what it rests on."""

    ridge_tokens: int
    source: str  # "measured" or "formula"
    seconds: dict[int, float]  # median by number of rows; of those sizes that were measured
    num_rounds: int
    is_lower_bound: bool = False  # the largest size that was tried is not slower

    def __str__(self) -> str:
        if self.source == "formula":
            return f"ridge {self.ridge_tokens} tokens, by the formula: one row took too long"
        times = ", ".join(f"{m}: {s * 1e3:.2f} ms" for m, s in self.seconds.items())
        least = "at least " * self.is_lower_bound
        return f"ridge {least}{self.ridge_tokens} tokens, {self.num_rounds} rounds ({times})"


def measure_ridge(
    run: Callable[[int], object],
    sizes: Sequence[int],
    *,
    fallback: float,
    limit_s: float = 1.0,
    min_rounds: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> RidgeMeasurement:
    """The largest m of `sizes` with T(m) <= 1.1 T(1), by medians of interleaved rounds.

    `run(m)` runs m rows and returns when they are done (on a GPU: synchronised). Each size is run
    twice to warm up, smallest first; sizes above one that takes three times T(1) are not tried.
    No run is begun that is likely to end after `limit_s`, taking times to grow with the rows at
    most. So a slow machine measures fewer sizes; where there is no time for `min_rounds` rounds of
    one row and the next size, the ridge is `fallback`, the formula's. What `run` raises comes
    through.
    """
    wanted = sorted({1, *sizes})
    if wanted[0] < 1:
        raise ConfigError(f"sizes to measure must be positive; got {wanted[0]}")
    end_s = clock() + limit_s

    def timed(m: int) -> float:
        began_s = clock()
        run(m)
        return clock() - began_s

    warm_s: dict[int, float] = {}
    for m in wanted:
        if warm_s:
            last = max(warm_s)
            if clock() + 2 * warm_s[last] * m / last > end_s:
                break
        timed(m)  # the first run of a size allocates, and chooses kernels
        warm_s[m] = timed(m)
        for _ in range(2):  # a single slow run may be chance
            if warm_s[m] > HOPELESS * warm_s[1] and clock() + warm_s[m] <= end_s:
                warm_s[m] = min(warm_s[m], timed(m))
        if warm_s[m] > HOPELESS * warm_s[1]:
            break
    tried = list(warm_s)
    while len(tried) > 1 and clock() + min_rounds * sum(warm_s[m] for m in tried) > end_s:
        tried.pop()
    samples: dict[int, list[float]] = {m: [] for m in tried}
    num_rounds = 0
    while len(tried) > 1 and num_rounds < MAX_ROUNDS:
        if num_rounds >= min_rounds and clock() + sum(warm_s[m] for m in tried) > end_s:
            break
        for m in tried:
            samples[m].append(timed(m))
        num_rounds += 1
    if num_rounds == 0:
        return RidgeMeasurement(max(1, int(fallback)), "formula", {}, 0)
    seconds = {m: median(samples[m]) for m in tried}
    ridge = max(m for m in tried if seconds[m] <= SLACK * seconds[1])
    return RidgeMeasurement(ridge, "measured", seconds, num_rounds, ridge == tried[-1])


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a sequence's pending tokens may stay uncommitted, and why."""

    stays: bool
    branch: str  # "free", "hidden" (by reads of K and V), "commit", "limit"
    pending: int
    budget: float  # pending tokens that this sequence might have
    load_s: float  # tl: reading the batch's cached tokens
    compute_s: float  # td: computing the pending ones again, beyond the ridge

    def __str__(self) -> str:
        because = {
            "free": "they are below the ridge and add no time",
            "hidden": "computing them overlaps with reading K and V",
            "commit": "computing them again would make every step longer",
            "limit": "a sequence may not have that many",
        }[self.branch]
        verb = "stay uncommitted" if self.stays else "are committed"
        return (
            f"{self.pending} pending tokens {verb}: {because} (budget {self.budget:.0f}, "
            f"td {self.compute_s * 1e6:.1f} us, tl {self.load_s * 1e6:.1f} us)"
        )


@dataclass(frozen=True, slots=True)
class CommitRule:
    """Which pending tokens may stay without stored K and V.

    The rule of the source idea: m pending tokens stay while m <= nt (they run below the ridge) or
    td < tl (computing them again takes less than reading what is cached). Two corrections. nt is
    one budget for the whole batch, so it is reduced by what the step runs anyway:
    m* = nt - scheduled. And tl counts only where reads of K and V overlap with matrix products;
    ordinary kernels run one after another, so `overlap` is off. Where it is on, the bound is
    nt + r sum(n) - scheduled, with r = kappa F / c B.
    """

    ridge_tokens: float  # nt
    read_s_per_token: float  # tl of one cached token: kappa / B
    compute_s_per_token: float  # td of one pending token: c / F
    max_per_sequence: int = 64
    overlap: bool = False

    def __post_init__(self) -> None:
        if self.ridge_tokens < 1 or self.max_per_sequence < 0:
            raise ConfigError(
                "ridge_tokens must be at least 1 and max_per_sequence not negative; got "
                f"{self.ridge_tokens} and {self.max_per_sequence}"
            )
        if self.read_s_per_token < 0 or self.compute_s_per_token <= 0:
            raise ConfigError(
                "compute_s_per_token must be positive and read_s_per_token not negative; got "
                f"{self.compute_s_per_token} and {self.read_s_per_token}"
            )

    def free_tokens(self, num_scheduled: int) -> int:
        """m*: rows that a step with `num_scheduled` others computes in the same time."""
        return max(0, int(self.ridge_tokens) - num_scheduled)

    def budget(self, num_scheduled: int, num_cached: int = 0) -> float:
        """Pending tokens that may run in a step with `num_scheduled` other rows.

        `num_cached`: tokens whose K and V the step reads, of all its sequences; they count only
        with `overlap`.
        """
        hidden = num_cached * self.read_s_per_token / self.compute_s_per_token
        return max(0.0, self.ridge_tokens + hidden * self.overlap - num_scheduled)

    def decide(self, num_pending: int, *, num_scheduled: int, num_cached: int = 0) -> Decision:
        """May `num_pending` tokens of one sequence stay uncommitted for one more step?

        `num_scheduled`: all other rows of that step: one for each sequence that decodes, prefill
        chunks, and other sequences' pending tokens. `num_cached`: as in `budget`.
        """
        free = self.free_tokens(num_scheduled)
        budget = self.budget(num_scheduled, num_cached)
        # Those beyond the ridge, which take time.
        beyond = min(num_pending, max(0.0, num_pending + num_scheduled - self.ridge_tokens))
        if num_pending > self.max_per_sequence:
            branch = "limit"
        elif num_pending <= free:
            branch = "free"
        elif num_pending <= budget:
            branch = "hidden"
        else:
            branch = "commit"
        return Decision(
            stays=branch in ("free", "hidden"),
            branch=branch,
            pending=num_pending,
            budget=min(budget, self.max_per_sequence),
            load_s=num_cached * self.read_s_per_token,
            compute_s=beyond * self.compute_s_per_token,
        )
