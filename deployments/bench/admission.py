"""Admission rules around one engine in this process, for benchmarks without a cluster.

Knows how many tokens a pool holds, and the production gate and predictor; nothing of what a step
computes.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from penstock.deployments.gate.controller import Gate
from penstock.deployments.gate.types import (
    GateRequest,
    GateSettings,
    QueueSettings,
    Refusal,
    Report,
    Running,
    Ticket,
    WorkerSpec,
)
from penstock.deployments.prediction.features import Features
from penstock.deployments.prediction.predictor import LengthPredictor
from penstock.workers.engine.engine import Engine

ADMISSIONS = ("predicted", "reserve_max", "optimistic")
WORKER, EPOCH = "worker", 0


@dataclass(frozen=True, slots=True)
class Held:
    """A waiting request."""

    request_id: str
    num_prompt: int


class Admission(Protocol):
    """Decides which waiting requests are admitted. Receives every event of the run."""

    def offer(self, held: Held) -> None: ...
    def take(self) -> list[Held]:
        """The requests to admit now."""

    def progressed(self, request_id: str, generated: int) -> None: ...
    def ended(self, request_id: str, generated: int) -> None: ...


def admission_of(name: str, engine: Engine, max_tokens: int) -> Admission:
    """The rule `name` for the KV pool of `engine`; each answer may have `max_tokens` tokens."""
    capacity = engine.pool.num_blocks * engine.config.block_size
    slots = engine.config.max_num_seqs
    if name == "optimistic":
        return Optimistic()
    if name == "reserve_max":
        return ReserveMax(capacity, slots, engine.config.block_size, max_tokens)
    return Predicted(capacity, slots, engine.config.block_size, max_tokens)


class Optimistic:
    """Admits every request at once; the engine preempts."""

    def __init__(self) -> None:
        self._waiting: deque[Held] = deque()

    def offer(self, held: Held) -> None:
        self._waiting.append(held)

    def take(self) -> list[Held]:
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    def progressed(self, request_id: str, generated: int) -> None:
        pass

    def ended(self, request_id: str, generated: int) -> None:
        pass


class ReserveMax:
    """First come, first served, with room for the longest answer: no request is ever preempted."""

    def __init__(self, capacity: int, slots: int, block_size: int, max_tokens: int) -> None:
        self._capacity, self._slots = capacity, slots
        self._block_size, self._max_tokens = block_size, max_tokens
        self._waiting: deque[Held] = deque()
        self._reserved: dict[str, int] = {}

    def offer(self, held: Held) -> None:
        self._waiting.append(held)

    def take(self) -> list[Held]:
        taken = []
        while self._waiting and len(self._reserved) < self._slots:
            need = self._need(self._waiting[0])
            if self._reserved and sum(self._reserved.values()) + need > self._capacity:
                break
            taken.append(self._waiting.popleft())
            self._reserved[taken[-1].request_id] = need
        return taken

    def progressed(self, request_id: str, generated: int) -> None:
        pass

    def ended(self, request_id: str, generated: int) -> None:
        del self._reserved[request_id]

    def _need(self, held: Held) -> int:
        blocks = -(-(held.num_prompt + self._max_tokens) // self._block_size)
        return blocks * self._block_size


class Predicted:
    """The gate, asked in this process. It learns from the answers of this run alone."""

    def __init__(
        self,
        capacity: int,
        slots: int,
        block_size: int,
        max_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._max_tokens = clock, max_tokens
        unlimited = QueueSettings(max_waiting=1_000_000, max_wait_s=1e9)
        self._predictor, self._gate = LengthPredictor(), Gate(GateSettings(queue=unlimited))
        self._gate.add_worker(WorkerSpec(WORKER, EPOCH, capacity, block_size, slots))
        self._held: dict[str, Held] = {}
        self._running: OrderedDict[str, int] = OrderedDict()
        self._numbers = itertools.count(1)
        self._reported_s = self._clock()

    def offer(self, held: Held) -> None:
        features = self._features(held)
        refusal = self._gate.offer(
            GateRequest(held.request_id, held.num_prompt),
            self._predictor.predict(features),
            now=self._clock(),
            holding=self._predictor.predict(features, with_cancels=True),
        )
        if refusal is not None:
            raise RuntimeError(f"the gate refused {held.request_id}: {refusal.message}")
        self._held[held.request_id] = held

    def take(self) -> list[Held]:
        now, taken = self._clock(), []
        self._report(now)
        for outcome in self._gate.tick(now):
            if isinstance(outcome, Ticket):
                self._gate.started(outcome.request_id, now)
                self._running[outcome.request_id] = 0
                taken.append(self._held[outcome.request_id])
            elif isinstance(outcome, Refusal):
                raise RuntimeError(f"the gate refused {outcome.request_id}: {outcome.message}")
        return taken

    def progressed(self, request_id: str, generated: int) -> None:
        self._running[request_id] = generated

    def ended(self, request_id: str, generated: int) -> None:
        del self._running[request_id]
        self._gate.finished(request_id, generated, self._clock())
        # The client left with what it wanted: to the server that is the end of the answer.
        self._predictor.observe(self._features(self._held.pop(request_id)), generated, "stop")

    def _report(self, now: float) -> None:
        """What runs, once a step."""
        if not self._running:
            return
        step_s, self._reported_s = now - self._reported_s, now
        running = tuple(
            Running(request_id, generated, self._held[request_id].num_prompt, self._max_tokens)
            for request_id, generated in self._running.items()
        )
        report = Report(EPOCH, next(self._numbers), running, max(step_s, 1e-4))
        self._gate.report(WORKER, report, now)

    def _features(self, held: Held) -> Features:
        return Features("bench", prompt_tokens=held.num_prompt, max_tokens=self._max_tokens)
