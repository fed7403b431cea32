"""The roofline ridge, measured at start-up: how many rows a step computes in the time of one."""

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
            likely_s = warm_s[last] * m / last
            rounds_s = min_rounds * (sum(warm_s.values()) + likely_s)
            if clock() + 2 * likely_s + rounds_s > end_s:
                break  # or the sizes tried so far could not be measured, either
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
