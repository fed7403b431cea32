"""The simulator's clock: events in the order of time, between a policy and its workers.

Arrivals, ends of steps, reports, grants on their way and notices of them, clients that leave.
Every message takes `hop_s`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gate.sim.policies import Policy, report_of
from benchmarks.gate.sim.worker import Job, SimWorker

HOP_S = 0.002  # an actor call, at leisure
REPORT_S = 2.0
TICK_S = 0.02  # what happens within it is decided together


@dataclass
class Simulation:
    """One run. All jobs end exactly once: done, refused, or left."""

    policy: Policy
    workers: list[SimWorker]
    jobs: list[Job]
    on_end: Callable[[], Any] = lambda: None  # a job ended: for a progress bar
    hop_s: float = HOP_S
    report_s: float = REPORT_S

    now: float = 0.0
    policy_s: float = 0.0  # CPU time of all calls of the policy
    num_declined: int = 0
    num_ended: int = 0
    most_waiting: int = 0
    tokens_at: list[int] = field(default_factory=list)  # of answers, at each of `marks`
    marks: tuple[float, ...] = ()  # seconds
    _heap: list[tuple[float, int, Callable[..., None], tuple]] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)
    _tick_at: float | None = None
    _wakes: list[float | None] = field(default_factory=list)
    _sequences: list[int] = field(default_factory=list)
    _paces: list[tuple[int, float]] = field(default_factory=list)

    def run(self) -> Simulation:
        self._wakes = [None] * len(self.workers)
        self._sequences = [0] * len(self.workers)
        self._paces = [(0, 0.0)] * len(self.workers)
        for job in self.jobs:
            self._at(job.arrived, self._arrive, job)
        for mark in self.marks:
            self._at(mark, self._mark)
        if self.policy.wants_reports:
            for i in range(len(self.workers)):
                self._at(self.report_s * (i + 1) / len(self.workers), self._report, i)
        while self._heap and self.num_ended < len(self.jobs):
            self.now, _, what, args = heapq.heappop(self._heap)
            what(*args)
        return self

    def _at(self, when: float, what: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._heap, (when, next(self._numbers), what, args))

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """A call of the policy, with its time taken."""
        start = time.thread_time()
        answer = call(*args)
        self.policy_s += time.thread_time() - start
        return answer

    def _arrive(self, job: Job) -> None:
        if not self.workers[0].could_ever_fit(job):
            self._end(job, "refused")
            return
        if self._ask(self.policy.arrive, job, self.now) is not None:
            self._refused(job)
            return
        self.most_waiting = max(self.most_waiting, self.policy.num_waiting)
        if math.isfinite(job.patience):
            self._at(self.now + job.patience, self._leave, job)
        self._wish()

    def _refused(self, job: Job) -> None:
        """For good; sim_retry has another opinion."""
        self._end(job, "refused")

    def _wish(self) -> None:
        """A request may fit now: the policy is tried soon, once for all that happens meanwhile."""
        if self._tick_at is None and self.policy.num_waiting:
            self._tick_at = self.now + TICK_S if self.policy.wants_reports else self.now
            self._at(self._tick_at, self._tick)

    def _tick(self) -> None:
        self._tick_at = None
        for job, where in self._ask(self.policy.tick, self.now):
            if isinstance(where, str):
                self._end(job, "refused")
            else:
                self._at(self.now + self.hop_s, self._deliver, job, where)

    def _deliver(self, job: Job, index: int) -> None:
        worker = self.workers[index]
        if job.outcome:  # it left on the way
            self._at(self.now + self.hop_s, self._told, self.policy.completed, job)
            return
        job.worker = index
        if self.policy.wants_reports and not worker.would_fit(job, self.now):
            self.num_declined += 1
            self._at(self.now + self.hop_s, self._told, self.policy.declined, job)
        else:
            worker.submit(job, self.now)
            self._at(self.now + self.hop_s, self._told, self.policy.started, job)
        self._look(index)

    def _told(self, what: Callable[..., None], job: Job) -> None:
        self._ask(what, job, self.now)
        self._wish()

    def _look(self, index: int) -> None:
        """When the worker next wakes may have changed."""
        ends = self.workers[index].ends_at
        if ends is not None and ends != self._wakes[index]:
            self._wakes[index] = ends
            self._at(ends, self._wake, index, ends)

    def _wake(self, index: int, due: float) -> None:
        worker = self.workers[index]
        if worker.ends_at != due:
            return  # it was cut short
        self._wakes[index] = None
        for job in worker.finish_leap():
            self._end(job, "left" if job.ended == "cancel" else "done")
            self._at(self.now + self.hop_s, self._told, self.policy.completed, job)
        self._look(index)

    def _report(self, index: int) -> None:
        worker = self.workers[index]
        steps, busy_s = self._paces[index]
        self._paces[index] = (worker.num_steps, worker.busy_s)
        pace = (worker.busy_s - busy_s) / max(worker.num_steps - steps, 1)
        self._sequences[index] += 1
        report = report_of(worker, self._sequences[index], self.now, pace)
        self._at(self.now + self.hop_s, self._reported, index, report)
        self._at(self.now + self.report_s, self._report, index)

    def _reported(self, index: int, report: Any) -> None:
        self._ask(self.policy.report, index, report, self.now)
        self._wish()

    def _leave(self, job: Job) -> None:
        """Its client has waited long enough for a first token."""
        if job.outcome or job.first_at is not None:
            return
        if job.worker < 0:
            self._ask(self.policy.cancel, job, self.now)
            self._end(job, "left")
        elif self.workers[job.worker].cancel(job, self.now):
            self._end(job, "left")
            self._at(self.now + self.hop_s, self._told, self.policy.completed, job)
        else:
            self._look(job.worker)

    def _mark(self) -> None:
        self.tokens_at.append(sum(each.tokens_by(self.now) for each in self.workers))

    def _end(self, job: Job, outcome: str) -> None:
        assert not job.outcome, f"{job.job_id} ended twice: {job.outcome}, {outcome}"
        job.outcome = outcome
        self.num_ended += 1
        self.on_end()
