"""What an answer asks of a worker's memory, what a worker has and what it reports: frozen data.

Tokens are of KV. Knows nothing of what has been promised, of queues or of rules.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.deployments.gate_room import UNBOUNDED, Candidate
from penstock.deployments.length_distribution import Floats, Ints, LengthDistribution, stack


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker and what it has. `epoch` names one life of it."""

    name: str
    epoch: str
    capacity: int  # tokens of KV that fit its pool
    block_size: int = 16  # tokens
    slots: int = 256  # answers at once

    def __post_init__(self) -> None:
        for name in ("capacity", "block_size", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Demand:
    """What an answer asks of a worker's memory, and its share of the dice.

    `u` is drawn once per request (common random numbers): a request that was turned away gets no
    luckier by asking again, and its futures only shrink as tokens come.
    """

    request_id: str
    prompt_tokens: int
    law: LengthDistribution  # of how long its memory is held
    u: Floats  # [samples] in [0, 1)
    ceiling: int | None = None  # tokens that a rolling cache never exceeds, prompt included

    def used(self, generated: int, block_size: int) -> int:
        """Tokens held: the last block may be empty but for one."""
        return self._capped(self.prompt_tokens + generated + block_size - 1)

    def longest(self, block_size: int) -> int:
        """Tokens held, in whole blocks, by the longest answer it may become; one, if unlimited."""
        limit = self.law.max_tokens
        total = self.prompt_tokens + (1 if limit is None else limit)
        return self._capped(-(-total // block_size) * block_size)

    @property
    def expected(self) -> float:
        """Tokens that it may be expected to hold at its end."""
        return self._capped(self.prompt_tokens + round(self.law.mean))

    def remaining(self) -> Ints:
        """[samples] steps to its end, from its beginning."""
        return stack([self.law]).sample_remaining(np.zeros(1, np.int64), self.u[None, :])[0]

    def candidate(self, block_size: int, remaining: Ints | None = None) -> Candidate:
        """What it asks of a worker with blocks of this size; `remaining`, if it is known."""
        return Candidate(
            used=self.used(0, block_size),
            remaining=self.remaining() if remaining is None else remaining,
            ceiling=UNBOUNDED if self.ceiling is None else self.ceiling,
            longest=self.longest(block_size),
        )

    def _capped(self, tokens: int) -> int:
        return tokens if self.ceiling is None else min(tokens, self.ceiling)


@dataclass(frozen=True, slots=True)
class Running:
    """One answer in a worker's report."""

    request_id: str
    generated: int  # 0: its prompt is not yet computed
    prompt_tokens: int = 0
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """All that runs on a worker. `sequence` rises within an epoch; late ones are dropped."""

    epoch: str
    sequence: int
    running: tuple[Running, ...]
    step_s: float  # seconds that a step takes of late
    num_preemptions: int = 0  # since the worker started
