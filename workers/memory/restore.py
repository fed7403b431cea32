"""How to restore K and V from host memory: load them, recompute them, or do both in parallel.

A split recomputes from the front, where contexts are short, and loads from the back, until both
meet: x = n Rc / (Rc + Rl) tokens computed (Cake, arXiv 2410.03065; at most twice as fast as the
better of the two alone). `Rates` holds the two speeds, measured at the start and kept up to date.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.workers.errors import ConfigError

MODES = ("auto", "load", "recompute", "split")


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The first `num_computed` tokens are recomputed, the `num_loaded` after them loaded."""

    num_computed: int  # whole blocks, unless it is all
    num_loaded: int
    branch: str  # "load", "recompute", "split"
    seconds: float  # until both are done
    load_s: float  # if all were loaded
    recompute_s: float  # if all were computed
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.branch}: compute {self.num_computed} tokens, load {self.num_loaded} in "
            f"{self.seconds * 1e3:.2f} ms (load all {self.load_s * 1e3:.2f}, compute all "
            f"{self.recompute_s * 1e3:.2f}): {self.reason}"
        )


@dataclass(frozen=True, slots=True)
class RestoreRule:
    """The choice between loading and recomputing, for one worker.

    `auto` takes the faster way, and a split only if it saves at least `min_split_gain` of the time
    of the better single way: a split occupies both link and device. `min_tokens`: fewer are
    recomputed in any mode; with None, `auto` decides from the cost of starting a load.
    """

    link_bytes_per_s: float
    compute_tokens_per_s: float
    block_bytes: int
    block_size: int
    mode: str = "auto"
    min_tokens: int | None = None
    load_start_s: float = 0.0  # before the first byte of a load arrives
    min_split_gain: float = 0.1

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"kv_restore must be one of {', '.join(MODES)}; got {self.mode!r}")
        for name in ("link_bytes_per_s", "compute_tokens_per_s", "block_bytes", "block_size"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} must be positive and finite; got {value}")
        if self.load_start_s < 0 or (self.min_tokens is not None and self.min_tokens < 0):
            raise ConfigError(
                "load_start_s and min_tokens must not be negative; got "
                f"{self.load_start_s} and {self.min_tokens}"
            )
        if not 0 <= self.min_split_gain < 1:
            raise ConfigError(f"min_split_gain must be in [0, 1); got {self.min_split_gain}")

    @property
    def load_tokens_per_s(self) -> float:
        """Rl: tokens/s that the host link loads."""
        return self.link_bytes_per_s * self.block_size / self.block_bytes

    @property
    def break_even_tokens(self) -> float:
        """From this number of tokens on, loading is faster than computing; inf if it never is."""
        saved_s = 1 / self.compute_tokens_per_s - 1 / self.load_tokens_per_s
        return self.load_start_s / saved_s if saved_s > 0 else math.inf

    def finish_s(self, num_tokens: int, num_computed: int) -> float:
        """Seconds until the first `num_computed` are computed and the rest has been loaded."""
        num_blocks = -(-(num_tokens - num_computed) // self.block_size)
        load_s = self.load_start_s + num_blocks * self.block_bytes / self.link_bytes_per_s
        return max(num_computed / self.compute_tokens_per_s, load_s * (num_blocks > 0))

    def choose(self, num_tokens: int) -> RestorePlan:
        """How to restore the first `num_tokens` tokens of a sequence, all of which are in host
        memory.

        The last block need not be full.
        """
        assert num_tokens >= 0
        split = self._best_split(num_tokens)
        costs = {
            "load": self.finish_s(num_tokens, 0),
            "recompute": self.finish_s(num_tokens, num_tokens),
            "split": self.finish_s(num_tokens, split),
        }
        branch, reason = self._branch(num_tokens, split, costs)
        computed = {"load": 0, "recompute": num_tokens, "split": split}[branch]
        return RestorePlan(
            num_computed=computed,
            num_loaded=num_tokens - computed,
            branch=branch,
            seconds=costs[branch],
            load_s=costs["load"],
            recompute_s=costs["recompute"],
            reason=reason,
        )

    def _branch(self, num_tokens: int, split: int, costs: dict[str, float]) -> tuple[str, str]:
        if self.min_tokens is not None and num_tokens < self.min_tokens:
            return "recompute", f"fewer than {self.min_tokens} tokens"
        ends = {0: "load", num_tokens: "recompute"}
        if self.mode == "split" and split in ends:
            return ends[split], "too few tokens to split"
        if self.mode != "auto":
            return self.mode, "as configured"
        single = min(("load", "recompute"), key=lambda branch: costs[branch])
        if split not in ends and costs["split"] <= (1 - self.min_split_gain) * costs[single]:
            return (
                "split",
                f"saves {1 - costs['split'] / costs[single]:.0%} of the time to {single}",
            )
        if single == "load":
            return "load", f"more than {self.break_even_tokens:.0f} tokens: loading is faster"
        return "recompute", f"up to {self.break_even_tokens:.0f} tokens, computing is faster"

    def _best_split(self, num_tokens: int) -> int:
        """Tokens (whole blocks) to compute from the front so that both ends meet at about the same
        time."""
        # x / Rc = start + (n - x) / Rl; on each side of it the time only grows.
        rc, rl = self.compute_tokens_per_s, self.load_tokens_per_s
        exact = (num_tokens / rl + self.load_start_s) * rc * rl / (rc + rl)
        below = int(exact // self.block_size) * self.block_size
        steps = (
            below - self.block_size,
            below,
            below + self.block_size,
            2 * self.block_size + below,
        )
        candidates = {min(max(0, x), num_tokens) for x in steps}
        return min(sorted(candidates), key=lambda x: self.finish_s(num_tokens, x))


LARGE_STEP = 64  # tokens: a smaller step is mostly the reading of weights
WEIGHT = 0.2  # of the newest step in the running mean
PROBE_ROWS = 256
PROBE_COPIES = 8


def seconds_of(run: Callable[[], object], times: int = 1) -> float:
    """Mean seconds of one `run()` over `times` calls, after one call to warm up."""
    run()
    began_s = time.perf_counter()
    for _ in range(times):
        run()
    return max((time.perf_counter() - began_s) / times, 1e-9)


class Rates:
    """Tokens/s that prefill computes, and bytes/s that the host link loads."""

    def __init__(self, compute_tokens_per_s: float, link_bytes_per_s: float):
        self.compute_tokens_per_s = compute_tokens_per_s
        self.link_bytes_per_s = link_bytes_per_s

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Update the compute rate from a step of `num_tokens` tokens."""
        if num_tokens >= LARGE_STEP and seconds > 0:
            newest = num_tokens / seconds
            self.compute_tokens_per_s += WEIGHT * (newest - self.compute_tokens_per_s)

    def observe_link(self, bytes_per_s: float | None) -> None:
        if bytes_per_s is not None:
            self.link_bytes_per_s = bytes_per_s
