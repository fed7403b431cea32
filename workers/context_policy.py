"""Context policies: which earlier tokens a token sees, as pure functions of its position.

Chosen once per sequence; no other code distinguishes policies. No result depends on scheduling, so
chunked prefill, preemption, deferred commit and batching all give the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.workers.config import EngineConfig
from penstock.workers.errors import ConfigError
from penstock.workers.model_config import ModelConfig
from penstock.workers.request import RequestError, SamplingParams

Positions = NDArray[np.int64]


class Context(Protocol):
    """Which earlier tokens a sequence sees."""

    @property
    def num_sink_blocks(self) -> int:
        """Leading blocks that are never freed while the sequence runs."""

    @property
    def full_tokens(self) -> int | None:
        """Length up to which no token is evicted; None: none ever is."""

    @property
    def name(self) -> bytes:
        """What K and V of tokens beyond `full_tokens` depend on, besides the tokens before."""

    def window_start(self, position: int) -> int:
        """First position after the sinks that the token at `position` sees."""

    def num_evicted(self, position: int) -> int:
        """E(t): tokens that the token at `position`, and all after it, no longer see."""

    def rows(self, positions: Positions) -> tuple[Positions, Positions, Positions]:
        """For each of `positions`: end of the visible sinks, start of the visible window, and the
        position at which its query meets the sinks. A key p is seen if p < the first or
        p >= the second."""


@dataclass(frozen=True, slots=True)
class FullContext:
    """Every token sees all earlier tokens."""

    @property
    def num_sink_blocks(self) -> int:
        return 0

    @property
    def full_tokens(self) -> int | None:
        return None

    @property
    def name(self) -> bytes:
        return b""

    def window_start(self, position: int) -> int:
        return 0

    def num_evicted(self, position: int) -> int:
        return 0

    def rows(self, positions: Positions) -> tuple[Positions, Positions, Positions]:
        nothing = np.zeros_like(positions)
        return nothing, nothing, positions


@dataclass(frozen=True, slots=True)
class SinkWindow:
    """The first `sinks` tokens and the newest `window` or so: StreamingLLM (arXiv 2309.17453).

    The window moves on by `roll` tokens at once, so that between window - roll + 1 and `window`
    tokens after the sinks are visible; roll = 1 is the authors' schedule. Sinks live in whole
    blocks of their own. K keeps the rotation of its absolute position t; only the query differs:
    R(t) meets the window, R(t - E(t)) the sinks, which gives the authors' positions inside the
    cache without moving a byte.
    """

    sinks: int
    window: int
    roll: int
    block_size: int

    def __post_init__(self) -> None:
        assert self.sinks >= 1 and 1 <= self.roll <= self.window and self.block_size >= 1

    @property
    def num_sink_blocks(self) -> int:
        return -(-self.sinks // self.block_size)

    @property
    def full_tokens(self) -> int:
        return self._first + self.window

    @property
    def name(self) -> bytes:
        return b"sinks %d window %d roll %d" % (self.sinks, self.window, self.roll)

    @property
    def _first(self) -> int:
        """Where the window begins before anything is evicted."""
        return self.num_sink_blocks * self.block_size

    def window_start(self, position: int) -> int:
        beyond = max(0, position + 1 - self._first - self.window)
        return self._first + self.roll * -(-beyond // self.roll)

    def num_evicted(self, position: int) -> int:
        start = self.window_start(position)
        return start - self.sinks if start > self._first else 0

    def rows(self, positions: Positions) -> tuple[Positions, Positions, Positions]:
        first = self._first
        beyond = np.maximum(0, positions + 1 - first - self.window)
        starts = first + self.roll * -(-beyond // self.roll)
        rolled = starts > first
        # A row before the first roll has no sinks of its own, as in a step in which no row is
        # rolled: the keys would be the same, but summed in another order.
        evicted = np.where(rolled, starts - self.sinks, 0)
        return np.where(rolled, self.sinks, 0), np.where(rolled, starts, 0), positions - evicted


FULL = FullContext()


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """The context policies of a model: the default, and the limits for requests."""

    policy: str  # one of CONTEXT_POLICIES
    sinks: int
    window: int
    roll: int
    block_size: int
    max_model_len: int  # tokens of prompt and answer under `full`; sinks and window fit in it
    max_endless_tokens: int  # the same under `sink_window`: the operator's hard cap
    obstacle: str | None = None  # why this model cannot have a sink window

    @classmethod
    def of(
        cls, config: EngineConfig, max_model_len: int, obstacle: str | None = None
    ) -> ContextSettings:
        """From the configuration. Raises ConfigError for a default that this model cannot have."""
        size = config.block_size
        sinks = size if config.sinks is None else config.sinks
        window = config.window
        if window is None:  # the best one is about half of the trained context (paper, table 6)
            window = max(1, max_model_len // 2 // size * size)
            window = max(1, min(window, max_model_len - -(-sinks // size) * size))
        made = cls(
            config.context_policy,
            sinks,
            window,
            min(config.roll, window) if config.window is None else config.roll,
            size,
            max_model_len,
            config.max_endless_tokens,
            obstacle,
        )
        if config.context_policy == "sink_window":
            try:
                made.context(SamplingParams())
            except RequestError as error:
                raise ConfigError(error.message) from None
        return made

    def is_endless(self, params: SamplingParams) -> bool:
        """Whether a request with `params` has a sink window."""
        return (params.context_policy or self.policy) == "sink_window"

    def max_total_tokens(self, params: SamplingParams) -> int:
        """Most tokens of prompt and answer together."""
        return self.max_endless_tokens if self.is_endless(params) else self.max_model_len

    def context(self, params: SamplingParams) -> Context:
        """The context policy of one request. Raises RequestError naming the field at fault."""
        if not self.is_endless(params):
            for name in ("sinks", "window", "roll"):
                if getattr(params, name) is not None:
                    raise RequestError(
                        f"{name} goes with context_policy 'sink_window'; this request has 'full'",
                        param=name,
                    )
            return FULL
        if self.obstacle is not None:
            raise RequestError(
                f"this model cannot have context_policy 'sink_window': {self.obstacle}",
                param="context_policy",
                code="unsupported_parameter",
            )
        sinks = self.sinks if params.sinks is None else params.sinks
        window = self.window if params.window is None else params.window
        roll = min(self.roll, window) if params.roll is None else params.roll
        if roll > window:
            raise RequestError(f"roll ({roll}) exceeds the window ({window})", param="roll")
        made = SinkWindow(sinks, window, roll, self.block_size)
        if made.full_tokens > self.max_model_len:
            room = self.max_model_len - made.num_sink_blocks * self.block_size
            raise RequestError(
                f"{sinks} sinks (in whole blocks of {self.block_size}) and a window of {window} "
                f"exceed the {self.max_model_len} tokens that this model takes; window can be at "
                f"most {max(room, 0)}",
                param="window",
            )
        return made


def unsupported_reason(model: ModelConfig) -> str | None:
    """Why a sink window cannot be had with `model`, or None.

    Any rotary embedding with fixed frequencies can have one, and others do not load at all
    (dynamic NTK, learned positions: model_config refuses them by name).
    """
    if model.query_scaling is not None:
        return "its queries grow with their position, which a window would have to undo"
    if model.has_states:
        return "some of its layers have a state, from which no token can be taken out"
    if any(window is not None for window in model.sliding_window):
        return "some of its layers have a sliding window of their own"
    return None
