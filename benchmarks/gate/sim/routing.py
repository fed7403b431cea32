"""Routers of other systems for the simulator: each request goes to a worker at once.

They see each worker's present state, without the delay that a router of several machines has. Each
refuses a request when too many wait at the worker that it chose (`cap`). Least requests is the base
class itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.gate.sim.policies import Policy
from benchmarks.gate.sim.worker import Job, SimWorker


@dataclass
class RoundRobin(Policy):
    """One after the other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number = 0

    def choose(self, job: Job) -> SimWorker:
        self._number += 1
        return self.workers[self._number % len(self.workers)]


@dataclass
class LeastKv(Policy):
    """The worker with the fewest KV tokens, those of waiting prompts included."""

    def choose(self, job: Job) -> SimWorker:
        return min(self.workers, key=lambda each: sum(e.known for e in each.held))


@dataclass
class PowerOfTwo(Policy):
    """Of two workers drawn at random the one with fewer requests."""

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._random = random.Random(self.seed)

    def choose(self, job: Job) -> SimWorker:
        drawn = self._random.sample(self.workers, min(2, len(self.workers)))
        return min(drawn, key=lambda each: each.outstanding)
