"""The policies that are compared; each is a function from a `View` to a number of workers.

`ServeDefault` follows `ray.serve.autoscaling_policy` 2.60 (ongoing requests over a target, mean of
30 s, up after 30 s, down after 600 s); `TargetUtilization` the Kubernetes HPA's documented rule
(15 s period, tolerance 0.1, workers that start count as idle, down to the maximum of 300 s).
`Oracle` knows the work that arrives within the next start-up time.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from benchmarks.autoscale.cluster import JITTER, View
from benchmarks.autoscale.loads import SLOTS, Arrivals
from penstock.deployments.autoscale.policy import decide
from penstock.deployments.autoscale.types import PolicyConfig, PolicyState, Signals

MOST = 40  # workers


class Penstock:
    """The production policy on the simulated gate's figures."""

    def __init__(self, start_s: float, config: PolicyConfig) -> None:
        self.config = config
        self.p90_start_s = start_s * (1.0 + 0.8 * JITTER)
        self.state: PolicyState | None = None
        self.log: list[tuple[float, str, str]] = []

    def __call__(self, view: View) -> int:
        signals = Signals(
            gate_epoch=1,
            offered_work_s=view.offered,
            offered_kv_s=0.0,
            backlog_s=view.backlog,
            num_waiting=view.num_waiting,
            num_running=view.num_running,
            oldest_wait_s=view.oldest_wait,
            ready=view.ready,
            starting=view.starting,
            start_s=self.p90_start_s,
        )
        decision = decide(signals, self.state, view.now, self.config)
        self.state = decision.state
        if decision.number != view.ready + view.starting:
            self.log.append((view.now, decision.kind, decision.reason))
        return decision.number


class ServeDefault:
    """`target`: target_ongoing_requests of a replica."""

    UPSCALE_S, DOWNSCALE_S, LOOK_BACK_S = 30.0, 600.0, 30.0

    def __init__(self, target: float) -> None:
        self.target = target
        self._seen: deque[tuple[float, int]] = deque()
        self._direction, self._since = 0, 0.0

    def __call__(self, view: View) -> int:
        self._seen.append((view.now, view.num_waiting + view.num_running))
        while self._seen[0][0] <= view.now - self.LOOK_BACK_S:
            self._seen.popleft()
        ongoing = sum(count for _, count in self._seen) / len(self._seen)
        now_wanted = view.ready + view.starting
        if view.ready == 0:
            return max(now_wanted, 1)
        desired = min(max(math.ceil(ongoing / self.target - 1e-9), 1), MOST)
        direction = (desired > now_wanted) - (desired < now_wanted)
        if direction != self._direction:
            self._direction, self._since = direction, view.now
        delay = self.UPSCALE_S if direction > 0 else self.DOWNSCALE_S
        if direction and view.now - self._since >= delay:
            self._direction = 0
            return desired
        return now_wanted


class TargetUtilization:
    """`target`: share of the slots of ready workers that should be in use."""

    PERIOD_S, TOLERANCE, WINDOW_S, MEAN_S = 15.0, 0.1, 300.0, 60.0

    def __init__(self, target: float = 0.7) -> None:
        self.target = target
        self._used: deque[tuple[float, float]] = deque()
        self._recent: deque[tuple[float, int]] = deque()  # numbers of the last WINDOW_S
        self._next_at = 0.0

    def __call__(self, view: View) -> int:
        present = view.ready + view.starting
        self._used.append((view.now, min(view.num_running / SLOTS, view.ready)))
        while self._used[0][0] <= view.now - self.MEAN_S:
            self._used.popleft()
        if view.now < self._next_at:
            return present
        self._next_at = view.now + self.PERIOD_S
        used = sum(value for _, value in self._used) / len(self._used)
        wanted = present
        if abs(used / max(view.ready, 1) / self.target - 1.0) > self.TOLERANCE:
            wanted = math.ceil(used / self.target)
            if wanted > view.ready and wanted <= present:
                wanted = present  # workers that start count as idle: enough are ordered
        wanted = min(max(wanted, 1), MOST, max(2 * present, present + 4))
        self._recent.append((view.now, wanted))
        while self._recent[0][0] <= view.now - self.WINDOW_S:
            self._recent.popleft()
        return max(each for _, each in self._recent) if wanted < present else wanted


class Oracle:
    """The fewest workers for which no work waits longer than `wait_s`, known `ahead_s` before."""

    STEP_S = 5.0
    LONGEST = 120  # steps that a burst is looked at

    def __init__(
        self, arrivals: Arrivals, start_s: float, wait_s: float = 5.0, usable: float = 0.95
    ):
        steps = math.ceil(arrivals.seconds / self.STEP_S) + 1
        per_step = np.bincount(
            (arrivals.at / self.STEP_S).astype(int), arrivals.work, minlength=steps
        )
        total = np.concatenate([[0.0], np.cumsum(per_step)])
        needed = np.zeros(steps)
        for length in range(1, min(self.LONGEST, steps)):
            rates = (total[length:] - total[:-length]) / (length * self.STEP_S + wait_s)
            np.maximum(needed[length - 1 :], rates[: steps - length + 1], out=needed[length - 1 :])
            # a worker that is there at the end of a burst must be there from its beginning
        self._needed = needed / usable
        self._ahead = math.ceil(start_s * (1.0 + JITTER) / self.STEP_S) + 1

    def __call__(self, view: View) -> int:
        here = min(int(view.now / self.STEP_S), len(self._needed) - 1)
        wanted = math.ceil(self._needed[here : here + self._ahead].max() - 1e-9)
        return min(max(wanted, 1), MOST)
