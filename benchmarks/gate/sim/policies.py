"""Policies of admission for the simulator: who goes to which worker, when, and who is refused.

`predicted` and `oracle` are the production Gate; `predicted` asks the production LengthPredictor,
which learns from ends of answers and from how far reports say that others are. The others are the
classical rules: reserve what max_tokens allows (TensorRT-LLM's GUARANTEED_NO_EVICT, PPL.LLM); let
come what fits now and preempt (vLLM); LightLLM's past-future queue with its window of 200. A policy
receives events and the time, never a true length: only `oracle` looks at it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from benchmarks.gate.sim.worker import Job, SimWorker, WorkerShape
from penstock.deployments.gate.controller import Gate
from penstock.deployments.gate.forecast.peaks import sampled_peaks
from penstock.deployments.gate.types import (
    GateRequest,
    GateSettings,
    Report,
    Running,
    Ticket,
    WorkerSpec,
)
from penstock.deployments.prediction.distribution import (
    NUM_BINS,
    LengthDistribution,
    cumulative_hazard,
)
from penstock.deployments.prediction.predictor import LengthPredictor, Watch

Decision = tuple[Job, int | str]  # the index of its worker, or why it is refused
FLAT = cumulative_hazard(np.full(NUM_BINS, 0.1))


@dataclass
class Policy:
    """What the simulator asks. The base lets all in at once, to the worker with least to do."""

    workers: list[SimWorker]
    cap: int | None = None  # jobs that may wait at a worker
    wants_reports = False

    def __post_init__(self) -> None:
        self._new: list[Job] = []

    @property
    def num_waiting(self) -> int:
        return len(self._new)

    def arrive(self, job: Job, now: float) -> str | None:
        """A request comes; why it is refused, or None."""
        self._new.append(job)
        return None

    def choose(self, job: Job) -> SimWorker:
        """Its worker: the one with the fewest requests."""
        return min(self.workers, key=lambda each: each.outstanding)

    def tick(self, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        for job in self._new:
            worker = self.choose(job)
            if self.cap is not None and len(worker.waiting) >= self.cap:
                decisions.append((job, "queue_full"))
            else:
                decisions.append((job, worker.index))
        self._new = []
        return decisions

    def started(self, job: Job, now: float) -> None: ...

    def declined(self, job: Job, now: float) -> None: ...

    def completed(self, job: Job, now: float) -> None: ...

    def cancel(self, job: Job, now: float) -> None:
        if job in self._new:
            self._new.remove(job)

    def report(self, worker: int, report: Report, now: float) -> None: ...


@dataclass
class Central(Policy, ABC):
    """First come, first served from one queue; a subclass says whether a job fits a worker."""

    def __post_init__(self) -> None:
        self.queue: deque[Job] = deque()
        self.held: list[dict[str, Job]] = [{} for _ in self.workers]

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    def arrive(self, job: Job, now: float) -> str | None:
        if self.cap is not None and len(self.queue) >= self.cap:
            return "queue_full"
        self.queue.append(job)
        return None

    def tick(self, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        while self.queue:
            job = self.queue[0]
            able = [i for i in range(len(self.workers)) if self.fits(job, i)]
            if not able:
                break
            worker = min(able, key=lambda i: len(self.held[i]))
            self.held[worker][job.job_id] = self.queue.popleft()
            decisions.append((job, worker))
        return decisions

    @abstractmethod
    def fits(self, job: Job, worker: int) -> bool:
        """Whether `worker` has room for `job`, by this policy."""

    def declined(self, job: Job, now: float) -> None:
        self.held[job.worker].pop(job.job_id, None)
        self.queue.appendleft(job)

    def completed(self, job: Job, now: float) -> None:
        for held in self.held:
            held.pop(job.job_id, None)

    def cancel(self, job: Job, now: float) -> None:
        if job in self.queue:
            self.queue.remove(job)


class ReserveMax(Central):
    """Reserves prompt + max_tokens for each request. No request is ever preempted."""

    def fits(self, job: Job, worker: int) -> bool:
        shape = self.workers[worker].shape
        kept = int(shape.watermark * shape.num_blocks)
        longest = [self._longest(each, shape) for each in (*self.held[worker].values(), job)]
        return len(longest) <= shape.slots and sum(longest) + kept <= shape.num_blocks

    def _longest(self, job: Job, shape: WorkerShape) -> int:
        assert job.max_tokens is not None
        return min(
            -(-(job.prompt + job.max_tokens) // shape.block_size),
            shape.num_blocks - int(shape.watermark * shape.num_blocks),
        )


@dataclass
class PastFuture(Central):
    """LightLLM's: lengths drawn from the last 200, given what is out; the worst of 5 futures."""

    seed: int = 0
    SAMPLES, KEPT, WINDOW = 5, 0.05, 200

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rng = np.random.default_rng(self.seed)
        self._window: deque[int] = deque(maxlen=PastFuture.WINDOW)

    def fill(self, lengths: Iterable[int]) -> None:
        """A window that is warm: what ended before the run."""
        self._window.extend(lengths)

    def completed(self, job: Job, now: float) -> None:
        super().completed(job, now)
        self._window.append(job.generated)

    def tick(self, now: float) -> list[Decision]:
        # The window begins full of answers at their limit; here: none known, so all at the limit.
        lengths = np.sort(np.array(self._window, np.int64))
        self._sorted = lengths
        out: dict[int, dict[str, int]] = {}
        for worker in self.workers:
            out[worker.index] = {job.job_id: n for job, n in worker.progress(now)}
        self._out = out
        return super().tick(now)

    def fits(self, job: Job, worker: int) -> bool:
        shape, held = self.workers[worker].shape, self.held[worker]
        if len(held) >= shape.slots:
            return False
        out = self._out[worker]
        jobs = [*held.values(), job]
        done = np.array([out.get(each.job_id, 0) for each in jobs], np.int64)
        used = np.array([each.prompt for each in jobs], np.int64) + done + shape.block_size - 1
        remaining = np.array([self._remaining(each, n) for each, n in zip(jobs, done.tolist())])
        peak = int(sampled_peaks(used, remaining).max())
        return not held or peak <= (1 - PastFuture.KEPT) * shape.capacity

    def _remaining(self, job: Job, done: int) -> list[int]:
        """[samples] by inverse transform over the longer ones of the window, and the limit."""
        assert job.max_tokens is not None
        first = int(np.searchsorted(self._sorted, done, side="right"))
        limit = job.max_tokens
        if len(self._window) < PastFuture.WINDOW:  # it is filled with limits at first
            known = len(self._sorted) - first
            missing = PastFuture.WINDOW - len(self._sorted)
            at = self._rng.integers(known + missing + 1, size=PastFuture.SAMPLES)
        else:
            at = self._rng.integers(len(self._sorted) - first + 1, size=PastFuture.SAMPLES)
        drawn = [
            int(self._sorted[first + i]) if first + i < len(self._sorted) else limit
            for i in at.tolist()
        ]
        return [max(min(each, limit) - done, 1) for each in drawn]


@dataclass
class Gated(Policy):
    """The production gate. With `oracle` it gets true lengths, else the predictor's."""

    settings: GateSettings = field(default_factory=GateSettings)
    oracle: bool = False
    seed: int = 0
    affinity: bool = True  # whether it sees which prompts begin alike
    victim: str = "largest"  # whom its workers preempt, as the production engine does
    wants_reports = True

    def __post_init__(self) -> None:
        self.gate = Gate(self.settings, seed=self.seed)
        for each in self.workers:
            each.victim = self.victim
        self.predictor = LengthPredictor()
        self.retry_after_s: float | None = None  # seconds that the last one refused is to stay away
        self.jobs: dict[str, Job] = {}
        self.watches: dict[str, Watch] = {}
        self.indices = {f"worker-{each.index}": each.index for each in self.workers}
        for name, index in self.indices.items():
            shape = self.workers[index].shape
            kept = int(shape.watermark * shape.num_blocks) * shape.block_size
            spec = WorkerSpec(name, 1, shape.capacity - kept, shape.block_size, shape.slots)
            self.gate.add_worker(spec)

    @property
    def num_waiting(self) -> int:
        return len(self.gate.queue)

    def arrive(self, job: Job, now: float) -> str | None:
        self.jobs[job.job_id] = job
        if self.oracle:
            length = LengthDistribution(FLAT, job.length, min_tokens=job.length)
            holding = length
        else:
            length = self.predictor.predict(job.features)
            holding = self.predictor.predict(job.features, with_cancels=True)
        prefix = job.prefix if self.affinity else ()
        request = GateRequest(job.job_id, job.prompt, job.tenant, prefix=prefix)
        refusal = self.gate.offer(request, length, now, holding=holding)
        self.retry_after_s = None if refusal is None else refusal.retry_after_s
        return None if refusal is None else refusal.reason

    def would_wait(self, job: Job, now: float) -> float:
        """Predicted wait in seconds of a request that arrives now; changes nothing."""
        request = GateRequest(job.job_id, job.prompt, job.tenant)
        return self.gate.would_wait(request, self.predictor.predict(job.features), now)

    def tick(self, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        for outcome in self.gate.tick(now):
            job = self.jobs[outcome.request_id]
            if isinstance(outcome, Ticket):
                decisions.append((job, self.indices[outcome.worker]))
            else:
                decisions.append((job, getattr(outcome, "reason", "expired")))
        return decisions

    def started(self, job: Job, now: float) -> None:
        self.gate.started(job.job_id, now)

    def declined(self, job: Job, now: float) -> None:
        self.gate.declined(job.job_id, now)

    def completed(self, job: Job, now: float) -> None:
        self.gate.finished(job.job_id, job.generated, now)
        watch = self.watches.pop(job.job_id, None)
        self.predictor.observe(job.features, job.generated, job.ended, watch)

    def cancel(self, job: Job, now: float) -> None:
        self.gate.cancel(job.job_id, now)

    def report(self, worker: int, report: Report, now: float) -> None:
        self.gate.report(f"worker-{worker}", report, now)
        for each in report.running:
            job = self.jobs[each.request_id]
            if not job.outcome:
                watch = self.watches.setdefault(job.job_id, Watch(job.features))
                self.predictor.progress(watch, each.generated)


def report_of(worker: SimWorker, sequence: int, now: float, step_s: float) -> Report:
    """What a worker would say of itself now."""
    running = tuple(
        Running(job.job_id, out, job.prompt, job.max_tokens) for job, out in worker.progress(now)
    )
    return Report(1, sequence, running, step_s, worker.num_preemptions)
