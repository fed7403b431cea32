"""How much work requests bring, and how much of it a worker does: what the autoscaler reads.

Work is counted in units (an answer token is one, a prompt token a part of one), and reported in
worker-seconds: units over the units per second that a worker was measured to do while it was full;
until one was, over those that a full one would do by what its steps cost. The caller passes the
time.

A refused request that comes again is the same work, and counts once: else an overload would grow
with each of its retries, and workers be ordered for them. Few clients mark a retry, so it is known
by what an offer says of its request, all of it equal: each refusal lets one such request pass
uncounted, until some time after its Retry-After. Different requests that look the same (one tenant,
one prompt) may take each other's place: then the offered work is too low by what was refused at
most, and never below what was admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from penstock.deployments.gate.forecast.full_rate import (
    PROMPT_UNIT,
    MeanRequest,
    StepCosts,
    full_rate,
)
from penstock.deployments.gate.types import LOWEST_PRIORITY, GateRequest, Running, WorkerSpec

PRIOR_RATE = 1000.0  # units a second of a worker, before one has reported
WINDOW_S = 1.0  # shortest measurement
GAIN = 0.1  # of a measurement in the moving average
RETURN_S = 30.0  # after twice its Retry-After a request that was refused is not expected any more
MAX_REFUSED = 65_536  # that are expected to return; the oldest are forgotten


@dataclass(frozen=True, slots=True)
class GateLoad:
    """The load at one moment. Totals count from the gate's start, and never fall in one epoch."""

    gate_epoch: int
    offered_work_s: float  # worker-seconds of all requests offered, refused ones included, once
    offered_kv_s: float  # the same in KV memory: token-seconds over the tokens of a worker
    backlog_s: float  # worker-seconds of the requests that wait
    running_s: float  # worker-seconds that running requests are expected to need still
    num_waiting: int
    num_running: int
    oldest_wait_s: float  # 0 if none waits
    rate: float  # units a second of a full worker
    batch_work_s: float = 0.0  # worker-seconds that batches still need; in no other figure


@dataclass(slots=True)
class _Request:
    prompt: float  # units
    answer: float  # units, as expected
    is_batch: bool = False  # of the lowest priority: it takes what others leave
    mark: Hashable = None  # equal for the same request when it comes again
    generated: int = 0  # answer tokens, by the last report
    has_begun: bool = False  # a worker has reported it


class _Refused:
    """Requests that were refused and may return, by their marks."""

    def __init__(self) -> None:
        self._expected: dict[Hashable, tuple[int, float]] = {}  # how many, and until when

    def add(self, mark: Hashable, until: float, now: float) -> None:
        num, last = self._expected.pop(mark, (0, now))
        self._expected[mark] = (num + 1 if last >= now else 1, until)
        if len(self._expected) > MAX_REFUSED:
            del self._expected[next(iter(self._expected))]

    def returns(self, mark: Hashable, now: float) -> bool:
        """Whether a request with that mark is one of them, which is then not expected any more."""
        num, until = self._expected.pop(mark, (0, now))
        if num > 1:
            self._expected[mark] = (num - 1, until)
        return num > 0 and until >= now


class LoadMeter:
    """Follows each request from its offer to its end."""

    def __init__(self, now: float) -> None:
        self._requests: dict[str, _Request] = {}
        self._offered_work_s = 0.0
        self._offered_kv_s = 0.0
        self._done = 0.0  # units, of all workers
        self._rate: float | None = None  # None: not measured yet
        self._prior = PRIOR_RATE
        self._mean, self._step_s = MeanRequest(), 0.0
        self._refused = _Refused()
        self._measured_s, self._done_then, self._was_full = now, 0.0, False

    @property
    def rate(self) -> float:
        """Units a second that a full worker does."""
        return self._rate or self._prior

    def offered(
        self,
        request: GateRequest,
        answer_tokens: float,
        capacity: int,
        now: float = 0.0,
        mark: Hashable = None,
    ) -> None:
        """A request was judged, whatever became of it.

        `answer_tokens`: as expected. `capacity`: KV tokens of a worker. `mark`: equal for the same
        request when it comes again; None: unknown.
        """
        if request.request_id in self._requests:  # a worker declined it, or it began before
            return
        is_batch = request.priority <= LOWEST_PRIORITY
        known = _Request(PROMPT_UNIT * request.prompt_tokens, answer_tokens, is_batch, mark)
        self._requests[request.request_id] = known
        self._mean.add(request.prompt_tokens, answer_tokens)
        if is_batch or self._refused.returns(mark, now):
            return
        self._offered_work_s += (known.prompt + known.answer) / self.rate
        if capacity > 0:
            held_tokens = request.prompt_tokens + answer_tokens / 2
            self._offered_kv_s += held_tokens * answer_tokens * self._step_s / capacity

    def refused(self, request_id: str, retry_after_s: float | None, now: float) -> None:
        """It does not run, and was told to return after that time; None: it was not."""
        request = self._requests.pop(request_id, None)
        if request is None or retry_after_s is None:
            return
        if not request.is_batch and request.mark is not None:
            self._refused.add(request.mark, now + 2.0 * retry_after_s + RETURN_S, now)

    def ended(self, request_id: str, generated: int = 0) -> None:
        """It finished, or left. `generated`: tokens of its answer."""
        request = self._requests.pop(request_id, None)
        if request is not None and (generated or request.has_begun):
            self._advance(request, generated)

    def reported(
        self,
        spec: WorkerSpec,
        running: Sequence[Running],
        step_s: float,
        costs: StepCosts | None = None,
    ) -> None:
        """A worker's report: all that runs on it, how long its steps take, and what they cost."""
        for each in running:
            request = self._requests.get(each.request_id)
            if request is None:  # offered to an earlier life of the gate, or not judged yet
                request = _Request(PROMPT_UNIT * each.prompt_tokens, each.generated)
                request.generated, request.has_begun = each.generated, True
                self._requests[each.request_id] = request
            self._advance(request, each.generated)
        if step_s > 0:
            self._step_s = step_s
            self._prior = spec.slots / step_s
            if costs is not None:
                self._prior = full_rate(
                    costs, self._mean, step_s, capacity=spec.capacity, slots=spec.slots
                )

    def measure(self, now: float, num_workers: int, is_full: bool) -> None:
        """Call often. `is_full`: requests wait, or the workers run as many as they can."""
        elapsed_s = now - self._measured_s
        if elapsed_s < WINDOW_S:
            return
        done, self._done_then = self._done - self._done_then, self._done
        was_full, self._was_full = self._was_full, is_full
        self._measured_s = now
        if not num_workers:
            return
        rate = done / elapsed_s / num_workers
        if is_full and was_full and rate > 0:
            self._rate = rate if self._rate is None else self._rate + GAIN * (rate - self._rate)
        elif self._rate is not None:
            self._rate = max(self._rate, rate)  # workers that were not full did as much

    def load(self, gate_epoch: int, waiting: Mapping[str, float], now: float) -> GateLoad:
        """`waiting`: since when each request waits, by its id."""
        batch = {name: each for name, each in self._requests.items() if each.is_batch}
        known = {name: each for name, each in self._requests.items() if not each.is_batch}
        waiting = {name: since for name, since in waiting.items() if name not in batch}
        backlog = sum(known[n].prompt + known[n].answer for n in waiting if n in known)
        running = [each for each in known.values() if each.has_begun]
        left = sum(max(each.answer - each.generated, 0.0) for each in running)
        batch_left = sum(
            max(each.answer - each.generated, 0.0) + (0.0 if each.has_begun else each.prompt)
            for each in batch.values()
        )
        return GateLoad(
            gate_epoch,
            self._offered_work_s,
            self._offered_kv_s,
            backlog_s=backlog / self.rate,
            running_s=left / self.rate,
            num_waiting=len(waiting),
            num_running=len(running),
            oldest_wait_s=max((now - since for since in waiting.values()), default=0.0),
            rate=self.rate,
            batch_work_s=batch_left / self.rate,
        )

    def keep(self, is_known: Callable[[str], bool]) -> None:
        """Forget the requests that the gate has no more.

        Their end is not told again: a report under way when a request ended still listed it, or the
        request never began.
        """
        for name in [each for each in self._requests if not is_known(each)]:
            del self._requests[name]

    def _advance(self, request: _Request, generated: int) -> None:
        """Count the work since the last report; that of the prompt with the first one."""
        if not request.has_begun:
            request.has_begun = True
            self._done += request.prompt
        if generated > request.generated:
            self._done += generated - request.generated
            request.generated = generated
