"""What the gate itself costs as the cluster and the queue grow: microseconds of CPU a request.

Workers answer at once whatever they are granted; only the gate's own calls are timed (offer, tick,
started, report, completed). All lengths have one distribution, the prior of
the predictor, so that predicting (0.35 ms, whatever the size) is not in the figures. Either the
cluster keeps up and the queue is empty, or twice as much comes as can be served and the queue stays
full.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from penstock.deployments.gate.controller import Gate
from penstock.deployments.gate.types import (
    GateRequest,
    GateSettings,
    QueueSettings,
    Report,
    Running,
    Ticket,
    WorkerSpec,
)
from penstock.deployments.prediction.distribution import LengthDistribution, cumulative_hazard
from penstock.deployments.prediction.hazards import length_prior

Answer = TypeVar("Answer")

NUMBERS = (1, 10, 100, 1000)
CAPACITY = 16_384  # tokens of a worker: some 30 answers
STEP_S = 0.03
LENGTH = LengthDistribution(cumulative_hazard(length_prior()), 2048)
# Requests a second that a worker's memory can serve: prompts of 325 tokens and answers by LENGTH,
# each holding its tokens for as long as it takes, 6,240 token-seconds.
PER_WORKER = 2.6
LIGHT = (
    0.5  # of that: at 0.7 the queue fills within a minute, for a distribution as broad as this one
)
MOST_EACH = 1000  # requests of a worker: with few workers each costs much, and teaches nothing new
REPORT_S = 1.0
TICK_S = 0.01


@dataclass(frozen=True)
class Size:
    workers: int
    queue: int  # its bound; 0: less comes than can be served
    requests: int


@dataclass
class Cost:
    size: Size
    us: float  # of CPU a request, all calls
    parts: dict[str, float]  # by call
    num_admitted: int
    mean_waiting: float
    per_s: float  # requests of simulated time, the offered load
    tenths: list[float]  # us of CPU a request in each tenth of them: whether it grows with time


@dataclass
class Costs:
    costs: list[Cost] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """One row a size, as the page of results shows them; times are CPU microseconds."""
        return [
            {
                "workers": each.size.workers,
                "queue": each.size.queue or "empty",
                "requests": each.size.requests,
                "mean_waiting": round(each.mean_waiting),
                "us_per_request": each.us,
                "offer_us": each.parts["offer"],
                "tick_us": each.parts["tick"],
                "reports_us": each.parts["report"],
                "rest_us": each.parts["started"] + each.parts["finished"],
                "one_core_requests_per_s": round(1e6 / each.us),
                "offered_requests_per_s": round(each.per_s),
                "us_per_request_by_tenth": each.tenths,
            }
            for each in self.costs
        ]

    def text(self) -> str:
        lines = [
            "| workers | queue | requests | waiting, mean | us/request | offer | tick "
            "| reports | rest | first, last tenth | one core serves, req/s | offered, req/s |",
            "|" + "---|" * 12,
        ]
        for each in self.costs:
            size, parts = each.size, each.parts
            rest = each.us - parts["offer"] - parts["tick"] - parts["report"]
            lines.append(
                f"| {size.workers:,} | {size.queue or 'empty'} "
                f"| {size.requests:,} | {each.mean_waiting:.0f} | {each.us:.0f} "
                f"| {parts['offer']:.0f} | {parts['tick']:.0f} | {parts['report']:.0f} "
                f"| {rest:.0f} | {each.tenths[0]:.0f}, {each.tenths[-1]:.0f} "
                f"| {1e6 / each.us:,.0f} | {each.per_s:,.0f} |"
            )
        return "\n".join(lines)


def cost_of(size: Size, bar: tqdm | None = None) -> Cost:
    """Drive a gate with `size.requests` requests and time its calls."""
    settings = GateSettings(queue=QueueSettings(max_waiting=size.queue or 100_000))
    gate = Gate(settings, seed=0)
    for i in range(size.workers):
        gate.add_worker(WorkerSpec(f"w{i}", 1, CAPACITY))
    rng = np.random.default_rng(0)
    rate = PER_WORKER * size.workers * (2.0 if size.queue else LIGHT)
    times = np.cumsum(rng.exponential(1 / rate, size.requests)).tolist()
    prompts = rng.integers(50, 600, size.requests).tolist()
    lengths = [LENGTH.sample(float(u)) for u in rng.random(size.requests)]
    parts = dict.fromkeys(("offer", "tick", "started", "report", "finished"), 0.0)
    running: list[dict[str, tuple[float, int]]] = [{} for _ in range(size.workers)]
    ends: list[tuple[float, int, int]] = []
    admitted = waiting = num_ticks = done = sequence = 0
    now, report_at, turn = 0.0, 0.0, 0
    spent = [0.0]  # seconds, at the end of each tenth

    def timed(name: str, call: Callable[..., Answer], *args: object) -> Answer:
        start = time.thread_time()
        answer = call(*args)
        parts[name] += time.thread_time() - start
        return answer

    while True:
        now += TICK_S
        while ends and ends[0][0] <= now:
            _, number, worker = heapq.heappop(ends)
            running[worker].pop(f"r{number}")
            timed("finished", gate.finished, f"r{number}", lengths[number], now)
        while done < size.requests and times[done] <= now:
            request = GateRequest(f"r{done}", prompts[done])
            timed("offer", gate.offer, request, LENGTH, now)
            done += 1
            if done * 10 >= size.requests * len(spent):
                spent.append(sum(parts.values()))
            if bar is not None:
                bar.update()
        while report_at <= now:  # workers in turn, each once a second
            sequence += 1
            rows = tuple(
                Running(name, min(int((now - at) / STEP_S), length - 1), 300, 2048)
                for name, (at, length) in running[turn].items()
            )
            timed("report", gate.report, f"w{turn}", Report(1, sequence, rows, STEP_S), now)
            turn = (turn + 1) % size.workers
            report_at += REPORT_S / size.workers
        for outcome in timed("tick", gate.tick, now):
            if not isinstance(outcome, Ticket):
                continue
            number, worker = int(outcome.request_id[1:]), int(outcome.worker[1:])
            admitted += 1
            running[worker][outcome.request_id] = (now, lengths[number])
            heapq.heappush(ends, (now + STEP_S * lengths[number], number, worker))
            timed("started", gate.started, outcome.request_id, now)
        waiting += len(gate.queue)
        num_ticks += 1
        if done == size.requests:
            break  # what still waits would be served without any more coming
    each = {name: 1e6 * seconds / size.requests for name, seconds in parts.items()}
    tenths = (np.diff(spent) * 1e7 / size.requests).tolist()
    return Cost(size, sum(each.values()), each, admitted, waiting / num_ticks, rate, tenths)


def run_scale(requests: int, numbers: Sequence[int] = NUMBERS) -> Costs:
    """A table of sizes, by numbers of workers, with a progress bar."""
    sizes = [
        Size(workers, queue, min(requests, MOST_EACH * workers))
        for workers in numbers
        for queue in ((0, 512) if workers in (1, 1000) else (0,))
    ]
    found = Costs()
    with tqdm(total=sum(each.requests for each in sizes), unit="request", mininterval=1.0) as bar:
        for size in sizes:
            bar.set_postfix_str(f"{size.workers} workers, queue {size.queue}")
            found.costs.append(cost_of(size, bar))
            bar.write(found.text().splitlines()[-1])
    return found
