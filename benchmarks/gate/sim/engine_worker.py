"""A real engine where the simulator expects a worker: real steps, real blocks, real preemptions.

The clock goes on by what each step took: the CPU time of the engine's thread, so that other work
on the machine does not count, or the wall clock. Answers are as long as their jobs say (no end of
sequence, `max_tokens` at the true length); policies get the `max_tokens` of the job instead.
Knows nothing of policies.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from benchmarks.gate.sim.fit import Recorder
from benchmarks.gate.sim.worker import Job, WorkerShape
from penstock.workers.engine.engine import Engine
from penstock.workers.request import Delta, Request, SamplingParams
from penstock.workers.scheduling.sequence import Sequence


class EngineWorker:
    """What SimWorker offers, by an Engine of the same shape."""

    def __init__(
        self,
        index: int,
        shape: WorkerShape,
        engine: Engine,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        assert engine.pool.num_blocks == shape.num_blocks, "another pool than the shape's"
        self.index, self.shape, self.engine = index, shape, engine
        self.recorder = Recorder(engine, clock)
        self.num_steps = self.num_tokens = self.num_prefilled = 0
        self.busy_s = 0.0
        self.ends_at: float | None = None
        self._deltas: list[Delta] = []
        self._jobs: dict[str, Job] = {}
        preempt = engine.scheduler._preempt

        def watched(seq: Sequence) -> None:
            job = self._jobs[seq.request.request_id]
            job.num_preemptions += 1
            job.num_recomputed += seq.num_computed_tokens
            preempt(seq)

        engine.scheduler._preempt = watched  # type: ignore[method-assign]

    @property
    def num_preemptions(self) -> int:
        return self.engine.scheduler.num_preemptions

    @property
    def waiting(self) -> list[Job]:
        return [self._jobs[e.request.request_id] for e in self.engine.scheduler.waiting]

    @property
    def outstanding(self) -> int:
        return len(self._jobs)

    def could_ever_fit(self, job: Job) -> bool:
        return self._blocks(job.prompt + job.length) <= self.shape.num_blocks

    def would_fit(self, job: Job, now: float) -> bool:
        ahead = sum(self._blocks(each.num_tokens) for each in self.engine.scheduler.waiting)
        free = self.engine.pool.num_available
        return self.outstanding < self.shape.slots and ahead + self._blocks(job.known) <= free

    def submit(self, job: Job, now: float) -> None:
        rng = random.Random(job.job_id)
        prompt = tuple(rng.randrange(3, 8000) for _ in range(job.prompt))
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=job.length)
        job.worker, self._jobs[job.job_id] = self.index, job
        self.engine.add(Request(job.job_id, prompt, params))
        if self.ends_at is None:
            self._step(now)

    def cancel(self, job: Job, now: float) -> bool:
        self._jobs.pop(job.job_id, None)
        return self.engine.abort(job.job_id)

    def finish_leap(self) -> list[Job]:
        """The step's tokens are out. Returns the answers that ended, and takes the next step."""
        now, deltas = self.ends_at, self._deltas
        assert now is not None
        over = []
        for delta in deltas:
            assert delta.error is None, delta
            job = self._jobs.get(delta.request_id)
            if job is None:
                continue  # it left during the step
            job.generated += len(delta.token_ids)
            self.num_tokens += len(delta.token_ids)
            if job.first_at is None:
                job.first_at = now
            else:
                job.longest_gap = max(job.longest_gap, now - job.last_at)
            job.last_at = now
            if delta.finish_reason is not None:
                over.append(self._jobs.pop(delta.request_id))
        self.ends_at, self._deltas = None, []
        self._step(now)
        return over

    def progress(self, now: float) -> list[tuple[Job, int]]:
        return [(each, each.generated) for each in self._jobs.values()]

    def tokens_by(self, now: float) -> int:
        return self.num_tokens

    def _step(self, now: float) -> None:
        if not self.engine.has_work():
            return
        before = len(self.recorder.rows)
        self._deltas = self.recorder.step()
        row = self.recorder.rows[-1]
        assert len(self.recorder.rows) == before + 1, "a step in which no sequence could run"
        self.ends_at = now + row[4]
        self.num_steps += 1
        self.num_prefilled += int(row[3])
        self.busy_s += row[4]

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.shape.block_size)
