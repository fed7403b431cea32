"""A simulated cluster: workers that take time to start and drain, a queue in order of arrival.

A worker has SLOTS slots; a request of `w` worker-seconds holds one slot for `w * SLOTS` seconds. So
work is exact request by request, and a run of 60,000 requests takes less than a second. Ordered
workers become ready after a start-up time; removed workers accept no request and end with their
last one. Worker-hours count from the order to that end.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from benchmarks.autoscale.loads import SLOTS, Arrivals, Floats

JITTER = 0.2  # start-up times are uniform within this share of their mean


@dataclass(slots=True)
class View:
    """What policies may see at a tick. Work in worker-seconds."""

    now: float = 0.0
    ready: int = 0
    starting: int = 0
    num_waiting: int = 0
    num_running: int = 0
    offered: float = 0.0  # expected work offered since the beginning
    backlog: float = 0.0  # expected work of those that wait
    oldest_wait: float = 0.0


Policy = Callable[[View], int]


@dataclass(slots=True)
class _Worker:
    number: int
    ordered_at: float
    ready_at: float
    busy_until: float = 0.0
    state: str = "starting"  # "ready", "draining"


@dataclass(slots=True)
class Run:
    """One run: waits of all requests, and what the workers cost."""

    arrivals: Arrivals
    policy: Policy
    start_s: float  # mean start-up time
    initial: int  # workers that are ready at the beginning
    seed: int = 0
    tick_s: float = 2.0
    settled_s: float = 900.0  # hours and moves before this time are not counted
    waits: Floats = field(default_factory=lambda: np.zeros(0))
    worker_s: float = 0.0
    num_moves: int = 0
    _workers: list[_Worker] = field(default_factory=list)
    _slots: list[tuple[float, int]] = field(default_factory=list)  # free from, worker's number
    _by_number: dict[int, _Worker] = field(default_factory=dict)
    _ordered: int = 0

    def run(self) -> Run:
        rng = np.random.default_rng(self.seed + 10_000)
        delays = self.start_s * rng.uniform(1.0 - JITTER, 1.0 + JITTER, 4096)
        for _ in range(self.initial):
            self._order(0.0, 0.0)
        at, work = self.arrivals.at.tolist(), self.arrivals.work.tolist()
        expected = self.arrivals.expected.tolist()
        waits = [0.0] * len(at)
        ends: list[float] = []  # of running requests
        queue: deque[int] = deque()
        view, next_one, now = View(), 0, 0.0
        while now < self.arrivals.seconds or queue:
            now += self.tick_s
            self._start_ready(now)
            while next_one < len(at) and at[next_one] < now:
                queue.append(next_one)
                view.offered += expected[next_one]
                view.backlog += expected[next_one]
                next_one += 1
            self._serve(queue, at, work, waits, ends, view, expected, now)
            while ends and ends[0] <= now:
                heapq.heappop(ends)
            self._end_drained(now)
            self._observe(view, queue, at, ends, now)
            self._apply(self.policy(view), now, delays)
        for worker in self._workers:
            self._pay(worker, now)
        self.waits = np.array(waits)
        return self

    def _serve(
        self,
        queue: deque[int],
        at: list[float],
        work: list[float],
        waits: list[float],
        ends: list[float],
        view: View,
        expected: list[float],
        now: float,
    ) -> None:
        """Start waiting requests on free slots, within the tick that ends now."""
        slots, workers = self._slots, self._by_number
        while queue and slots:
            free_at, number = slots[0]
            if free_at >= now:
                break
            worker = workers.get(number)
            if worker is None or worker.state != "ready":
                heapq.heappop(slots)
                continue
            index = queue.popleft()
            begin = max(free_at, at[index])
            end = begin + work[index] * SLOTS
            heapq.heapreplace(slots, (end, number))
            heapq.heappush(ends, end)
            worker.busy_until = max(worker.busy_until, end)
            waits[index] = begin - at[index]
            view.backlog -= expected[index]

    def _observe(
        self,
        view: View,
        queue: deque[int],
        at: list[float],
        ends: list[float],
        now: float,
    ) -> None:
        states = [worker.state for worker in self._workers]
        view.now = now
        view.ready, view.starting = states.count("ready"), states.count("starting")
        view.num_waiting, view.num_running = len(queue), len(ends)
        view.oldest_wait = now - at[queue[0]] if queue else 0.0
        if not queue:
            view.backlog = 0.0

    def _order(self, now: float, delay: float) -> None:
        self._ordered += 1
        worker = _Worker(self._ordered, now, now + delay)
        self._workers.append(worker)
        self._by_number[worker.number] = worker
        self._start_ready(now)

    def _start_ready(self, now: float) -> None:
        for worker in self._workers:
            if worker.state == "starting" and worker.ready_at <= now:
                worker.state = "ready"
                for _ in range(SLOTS):
                    heapq.heappush(self._slots, (worker.ready_at, worker.number))

    def _apply(self, wanted: int, now: float, delays: Floats) -> None:
        present = [worker for worker in self._workers if worker.state != "draining"]
        if wanted == len(present):
            return
        if now >= self.settled_s:
            self.num_moves += abs(wanted - len(present))
        for _ in range(wanted - len(present)):
            self._order(now, float(delays[self._ordered % len(delays)]))
        # Serve first stops workers that start, then the newest.
        removed = sorted(present, key=lambda each: (each.state == "ready", -each.number))
        for worker in removed[: max(0, len(present) - wanted)]:
            if worker.state == "starting":
                self._leave(worker, now)
            else:
                worker.state = "draining"

    def _end_drained(self, now: float) -> None:
        for worker in [each for each in self._workers if each.state == "draining"]:
            if worker.busy_until <= now:
                self._leave(worker, max(worker.busy_until, now - self.tick_s))

    def _leave(self, worker: _Worker, now: float) -> None:
        self._pay(worker, now)
        self._workers.remove(worker)
        del self._by_number[worker.number]

    def _pay(self, worker: _Worker, now: float) -> None:
        begin = max(worker.ordered_at, self.settled_s)
        self.worker_s += max(0.0, min(now, self.arrivals.seconds) - begin)
