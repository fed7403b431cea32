"""What a worker holds, as the gate estimates it between the worker's reports.

Leases (promised room), running answers (their progress dead-reckoned since the last report: without
that, reports a second old spoil admission) and ended ones; and the headroom that its preemptions
call for. The worker's own memory is the truth: it may decline what was granted, and its reports
correct the ledger. The caller passes the time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from penstock.deployments.gate.forecast.headroom import Headroom
from penstock.deployments.gate.forecast.held_futures import HeldFutures
from penstock.deployments.gate.forecast.sampled import UNBOUNDED, Candidate, SampledForecast
from penstock.deployments.gate.types import Demand, Report, Running, WorkerSpec
from penstock.deployments.prediction.distribution import MAX_LENGTH, Floats, Ints


@dataclass(slots=True)
class _Holding:
    demand: Demand
    expected: float  # tokens at its end; renewed by reports
    lease_until: float | None  # None: started
    row: int = -1  # of the ledger's HeldFutures, once they are asked for
    generated: int = 0
    reported_at: float = 0.0  # or when it started, until a report lists it
    listed: bool = False


@dataclass(frozen=True, slots=True)
class _Columns:
    """What no report changes of all holdings [n], in their order."""

    rows: Ints  # of the ledger's HeldFutures
    prompts: Ints
    ceilings: Ints
    limits: Ints  # tokens of their answers

    @classmethod
    def of(cls, holdings: Collection[_Holding]) -> _Columns:
        rows = [
            (
                each.row,
                each.demand.prompt_tokens,
                each.demand.ceiling,
                each.demand.length.max_tokens,
            )
            for each in holdings
        ]
        ceilings = [UNBOUNDED if each[2] is None else each[2] for each in rows]
        return cls(
            np.array([each[0] for each in rows], np.int64),
            np.array([each[1] for each in rows], np.int64),
            np.array(ceilings, np.int64),
            np.array([each[3] or MAX_LENGTH for each in rows], np.int64),
        )

    def used(self, generated: Ints, block_size: int) -> Ints:
        """As Demand.used."""
        return np.minimum(self.prompts + generated + (block_size - 1), self.ceilings)


@dataclass(slots=True)
class Ledger:
    """One worker's account."""

    spec: WorkerSpec
    step_s: float = 0.03  # until it reports
    headroom: Headroom = field(default_factory=Headroom)
    is_open: bool = True  # false after it declined a request, until it reports
    is_draining: bool = False  # it finishes what it has, and gets nothing more
    _sequence: int = -1
    _num_preemptions: int = 0
    _held: dict[str, _Holding] = field(default_factory=dict)
    _over: dict[str, float] = field(default_factory=dict)  # ended recently: id -> when
    _expected: float = 0.0  # tokens, sum of _held, unless some are to be renewed
    _unrenewed: list[_Holding] = field(default_factory=list)  # of the last report
    _reported_at: float = 0.0
    _leases: int = 0  # of _held, not yet started
    _longest: int = 0  # tokens at their limits, sum of those in _held that have one
    _unlimited: int = 0  # of _held, without one
    _futures: HeldFutures | None = None  # None: it never held anything
    _columns_held: _Columns | None = None  # None: others are held since
    _progress: tuple[Ints, Floats] | None = None  # generated, reported_at; None: it changed since
    _forecast: tuple[tuple, SampledForecast] | None = None  # None: something changed since

    REMEMBER_S = 10.0  # longest delay of a report that may still list an ended request

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._held

    def lease(self, demand: Demand, until: float) -> None:
        """Promise room until then; without a start by that time `expire` takes it back."""
        if demand.request_id in self._held:
            raise ValueError(f"request {demand.request_id!r} already is on {self.spec.name}")
        self._over.pop(demand.request_id, None)
        self._hold(demand, until)
        self._leases += 1

    def started(self, request_id: str, now: float) -> None:
        """The worker has it. One whose lease expired returns with the next report."""
        holding = self._held.get(request_id)
        if holding is not None and holding.lease_until is not None:
            holding.lease_until, holding.reported_at = None, now
            self._leases -= 1
            self._progress = None

    def withdraw(self, request_id: str) -> None:
        """Remove it, as if it had never been promised."""
        self._drop(request_id)

    def ended(self, request_id: str, now: float) -> bool:
        """Its memory is free; False if the ledger did not hold it."""
        self._over.pop(request_id, None)  # the newest at the end
        self._over[request_id] = now
        return self._drop(request_id)

    def expire(self, now: float) -> list[str]:
        """Take back leases that ran out without a start; forget ends older than REMEMBER_S."""
        while self._over and now - next(iter(self._over.values())) >= Ledger.REMEMBER_S:
            del self._over[next(iter(self._over))]  # they are in the order of their ends
        if not self._leases:
            return []
        gone = [
            name
            for name, each in self._held.items()
            if each.lease_until is not None and each.lease_until <= now
        ]
        for name in gone:
            self._drop(name)
        return gone

    def report(self, report: Report, now: float, adopted: dict[str, Demand]) -> list[str]:
        """Correct the ledger; returns what was running and is no longer listed.

        `adopted`: demands of listed requests that the ledger lacks (the gate was restarted, or
        an ingress bypassed it). A late report, or one of another epoch, changes nothing.
        """
        if not self.accepts(report):
            return []
        self._sequence, self.is_draining = report.sequence, report.is_draining
        self.is_open = not report.is_draining
        self._reported_at, self._forecast = now, None
        if report.step_s > 0:
            self.step_s = report.step_s
        preempted = report.num_preemptions - self._num_preemptions
        self._num_preemptions = report.num_preemptions
        self.headroom.count(preemptions=max(preempted, 0))
        listed = {each.request_id for each in report.running}
        gone = [
            name for name, each in self._held.items() if name not in listed and _is_over(each, now)
        ]
        for name in gone:
            self.ended(name, now)
        for each in report.running:
            if each.request_id in self._over:
                continue  # it ended while the report was in transit
            holding = self._held.get(each.request_id)
            if holding is None:
                holding = self._hold(adopted[each.request_id], None)
            self._leases -= holding.lease_until is not None
            holding.lease_until = None
            holding.generated, holding.reported_at, holding.listed = each.generated, now, True
        self._progress, self._unrenewed = None, list(self._held.values())
        return gone

    def _renew(self) -> None:
        """What its answers are expected to hold, given the tokens that were out at the last
        report. Done when the load is asked for: few workers are told apart without it."""
        held = [each for each in self._unrenewed if self._held.get(each.demand.request_id) is each]
        self._unrenewed = []
        if held and self._futures is not None:
            whole = self._columns
            columns = whole if len(held) == len(self._held) else _Columns.of(held)
            generated = np.array([each.generated for each in held], np.int64)
            remaining = self._futures.mean_remaining(columns.rows, generated)
            lengths = np.rint(generated + remaining).astype(np.int64)
            holds = np.minimum(columns.prompts + lengths, columns.ceilings)
            for each, expected in zip(held, holds.tolist()):
                each.expected = expected
        self._expected = float(sum(each.expected for each in self._held.values()))

    def accepts(self, report: Report) -> bool:
        """Whether it is of this epoch, and newer than the last one."""
        return report.epoch == self.spec.epoch and report.sequence > self._sequence

    def unknown(self, report: Report) -> list[Running]:
        """Those of a report that the ledger lacks and that have not ended."""
        return [
            each
            for each in report.running
            if each.request_id not in self._held and each.request_id not in self._over
        ]

    def generated(self, now: float) -> Ints:
        """[n] tokens generated by now: one a step since the last report, short of the limit."""
        if self._progress is None:
            held = self._held.values()
            self._progress = (
                np.array([each.generated for each in held], np.int64),
                np.array([each.reported_at for each in held], np.float64),
            )
        out, reported_at = self._progress
        steps = np.maximum((now - reported_at) / self.step_s, 0.0).astype(np.int64)
        steps[out == 0] = 0  # none while its prompt is computed
        counts: Ints = np.maximum(np.minimum(out + steps, self._columns.limits - 1), out)
        return counts

    @property
    def _columns(self) -> _Columns:
        if self._columns_held is None:
            if self._futures is not None:
                for each in self._held.values():
                    if each.row < 0:
                        each.row = self._futures.add(each.demand.length, each.demand.uniforms)
            self._columns_held = _Columns.of(self._held.values())
        return self._columns_held

    def spare(self) -> tuple[int, int]:
        """Tokens and slots that stay free even if each answer reaches its limit."""
        if self._unlimited:
            return 0, 0
        limit = int((1.0 - self.headroom.share) * self.spec.capacity) - self._longest
        slots = self.spec.slots - len(self._held)
        return (limit, slots) if self.is_open and limit > 0 and slots > 0 else (0, 0)

    def fits_worst_case(self, demand: Demand) -> bool:
        """Whether it fits if it and all others reach their limits; alone, within the capacity."""
        longest = demand.longest(self.spec.block_size)
        if not self._held:
            return self.is_open and longest <= self.spec.capacity
        if _is_unlimited(demand):
            return False
        tokens, slots = self.spare()
        return slots > 0 and longest + self.spec.block_size <= tokens

    def used(self, now: float) -> int:
        """Tokens of KV held now, in whole blocks."""
        return int(self._columns.used(self.generated(now), self.spec.block_size).sum())

    @property
    def has_slots(self) -> bool:
        return self.is_open and len(self._held) < self.spec.slots

    def forecast(self, now: float, level: float, num_samples: int) -> SampledForecast:
        """What the worker will hold. Cached until the ledger changes or the worker made a step."""
        self.headroom.judged_at(level)
        moment = (self._steps(now), self.is_open, level)
        if self._forecast is not None and self._forecast[0] == moment:
            return self._forecast[1]
        columns, generated = self._columns, self.generated(now)
        remaining = np.zeros((0, num_samples), np.int64)
        if self._held and self._futures is not None:
            # At its limit an answer still has this step to go: its memory is not free yet.
            remaining = np.maximum(self._futures.remaining(columns.rows, generated), 1)
        forecast = SampledForecast(
            capacity=self.spec.capacity,
            limit=int((1.0 - self.headroom.share) * self.spec.capacity),
            level=level,
            slots=self.spec.slots - len(self._held) if self.is_open else 0,
            used=columns.used(generated, self.spec.block_size),
            remaining=remaining,
            ceilings=columns.ceilings,
        )
        self._forecast = (moment, forecast)
        return forecast

    def joined(
        self, forecast: SampledForecast, candidate: Candidate, now: float
    ) -> SampledForecast:
        """The `forecast` with the candidate added; its lease is in the ledger already."""
        joined = forecast.joined_by(candidate)
        self._forecast = ((self._steps(now), self.is_open, forecast.level), joined)
        return joined

    @property
    def load(self) -> float:
        """Tokens that its answers are expected to hold at their ends, by the capacity."""
        if self._unrenewed:
            self._renew()
        return self._expected / self.spec.capacity

    def _steps(self, now: float) -> int:
        """Steps since the last report: tokens that each listed answer has gained."""
        return int((now - self._reported_at) / self.step_s)

    def _hold(self, demand: Demand, until: float | None) -> _Holding:
        if self._futures is None:
            self._futures = HeldFutures(len(demand.uniforms))
        holding = _Holding(demand, demand.expected, until, generated=demand.generated)
        self._held[demand.request_id] = holding
        self._changed(holding, 1)
        return holding

    def _drop(self, request_id: str) -> bool:
        holding = self._held.pop(request_id, None)
        if holding is None:
            return False
        if self._futures is not None and holding.row >= 0:
            self._futures.remove(holding.row)
        self._leases -= holding.lease_until is not None
        self._changed(holding, -1)
        return True

    def _changed(self, holding: _Holding, num: int) -> None:
        """Account for a holding that was added (`num` 1) or removed (-1)."""
        self._expected += num * holding.expected
        if _is_unlimited(holding.demand):
            self._unlimited += num
        else:
            size = self.spec.block_size
            self._longest += num * (holding.demand.longest(size) + size)
        self._columns_held = self._progress = self._forecast = None


def _is_unlimited(demand: Demand) -> bool:
    return demand.length.max_tokens is None and demand.ceiling is None


def _is_over(holding: _Holding, now: float) -> bool:
    """Whether an unlisted answer has ended; the report may be older than its start."""
    if holding.lease_until is not None:
        return False
    return holding.listed or now - holding.reported_at > Ledger.REMEMBER_S
