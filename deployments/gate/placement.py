"""On which worker a request fits: now, soonest, and in the worst case.

By the quantile rule of each worker's forecast; among workers with room the one that probably has
the prompt's prefix cached. The first waiting request that fits nowhere has a reservation: the
worker, and the step at which it will fit (EASY backfill).

WorkerShortlist chooses the workers that are evaluated for a request: up to `max_choices` workers
all of them, beyond that the ones with the least expected tokens, one number a worker, so that the
cost of a decision does not grow with the cluster. It lives for one moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from penstock.deployments.gate.forecast.prefix_affinity import PrefixAffinity
from penstock.deployments.gate.forecast.sampled import Candidate, SampledForecast
from penstock.deployments.gate.ledger import Ledger
from penstock.deployments.gate.types import LOWEST_PRIORITY, Demand, GateSettings, Wait
from penstock.deployments.gate.wait_queue import Waiting
from penstock.deployments.prediction.distribution import Floats

# Of a worker's slots and memory: what requests of LOWEST_PRIORITY leave free, so that another one
# that arrives need not wait until one of them ends.
KEPT_SHARE = 0.125


class Placement:
    """Chooses among the workers of one gate. Reads the ledgers and changes none."""

    def __init__(self, ledgers: Mapping[str, Ledger]) -> None:
        self.ledgers = ledgers
        self.first_fits_at: float | None = None  # of the first waiting request
        self._reserved: tuple[str, str, float] | None = None  # request, worker, and when
        self._prefixes: PrefixAffinity[tuple[str, int]] = PrefixAffinity()  # by worker and epoch

    def could_fit(self, demand: Demand) -> bool:
        """Whether some worker could hold it at its longest; True while none has its tokenizer."""
        is_known = False
        for each in self.ledgers.values():
            if demand.is_for(each.spec):
                if demand.longest(each.spec.block_size) <= each.spec.capacity:
                    return True
                is_known = True
        return not is_known

    def largest(self, demand: Demand) -> int:
        """KV tokens of the largest worker with its tokenizer."""
        specs = (each.spec for each in self.ledgers.values())
        return max((spec.capacity for spec in specs if demand.is_for(spec)), default=0)

    def lacks_tokenizer(self, demand: Demand) -> bool:
        """Whether there are workers that take requests, and none of them has its tokenizer."""
        is_any_open = False
        for each in self.ledgers.values():
            if not each.is_draining:
                if demand.is_for(each.spec):
                    return False
                is_any_open = True
        return is_any_open

    def candidate(self, entry: Waiting, worker: str) -> Candidate:
        return entry.candidate(self.ledgers[worker].spec.block_size)

    def able(
        self, entries: Sequence[Waiting], shortlist: WorkerShortlist
    ) -> list[list[tuple[float, str]]]:
        """For each: workers with room for it, with its predicted peak as a share."""
        able: list[list[tuple[float, str]]] = [[] for _ in entries]
        asked: dict[str, list[int]] = {}  # by worker: indices of the entries that may go there
        for i, entry in enumerate(entries):
            for name in shortlist.workers_for(entry.demand, self.hits(entry.prefix)):
                asked.setdefault(name, []).append(i)
        for name, indices in asked.items():
            forecast = shortlist[name]
            peaks = forecast.peaks_if_admitted([self.candidate(entries[i], name) for i in indices])
            for i, peak in zip(indices, peaks):
                if peak is None:
                    continue
                share = peak / forecast.capacity
                if entries[i].priority > LOWEST_PRIORITY or self._leaves_room(
                    name, share, forecast
                ):
                    able[i].append((share, name))
        return able

    def _leaves_room(self, name: str, share: float, forecast: SampledForecast) -> bool:
        """Whether a request of LOWEST_PRIORITY may go there: KEPT_SHARE stays for other ones.

        A worker that holds nothing takes any, or a large one would never run.
        """
        ledger = self.ledgers[name]
        kept_slots = min(max(1, round(KEPT_SHARE * ledger.spec.slots)), ledger.spec.slots - 1)
        return not len(ledger) or (share <= 1.0 - KEPT_SHARE and forecast.slots > kept_slots)

    def best(self, able: Sequence[tuple[float, str]], entry: Waiting) -> str:
        """The best of workers that have room."""
        return best_of(able, self.hits(entry.prefix))

    def worst_case_fit(
        self, demand: Demand, prefix: Sequence[int], shortlist: WorkerShortlist
    ) -> str | None:
        """The best worker where it fits at its longest; None: it needs a prediction."""
        hits = self.hits(prefix)
        asked = shortlist.workers_for(demand, hits)
        able = [name for name in asked if self.ledgers[name].fits_worst_case(demand)]
        if not able or not hits.keys() <= set(able):
            return None  # a worker with its prefix cached may have room as well
        if len(able) == 1:
            return able[0]
        return best_of([(self.ledgers[name].load, name) for name in able], hits)

    def hits(self, prefix: Sequence[int]) -> dict[str, int]:
        """By worker: tokens of such a prompt that are probably in its prefix cache."""
        found = self._prefixes.hits(prefix) if len(self.ledgers) > 1 else {}
        return {
            name: tokens
            for (name, _), tokens in found.items()
            if name in self.ledgers and not self.ledgers[name].is_draining
        }

    def sent(self, prefix: Sequence[int], tokens: int, ledger: Ledger) -> None:
        """A request was sent there: `tokens` with its answer; its prefix will be cached."""
        spec = ledger.spec
        self._prefixes.note(prefix, (spec.name, spec.epoch), tokens, spec.capacity)

    def forget(self, ledger: Ledger) -> None:
        """That epoch of a worker is over."""
        self._prefixes.forget((ledger.spec.name, ledger.spec.epoch))

    def soonest(self, entry: Waiting, shortlist: WorkerShortlist) -> tuple[int, str] | None:
        """Where it fits soonest, and after how many steps there."""
        best: tuple[float, int, str] | None = None
        for name in shortlist.workers_for(entry.demand):
            steps = shortlist[name].fits_after(self.candidate(entry, name))
            if steps is not None:
                found = (steps * self.ledgers[name].step_s, steps, name)
                best = min(best, found) if best is not None else found
        return None if best is None else best[1:]

    def reserve(
        self, first: Waiting, shortlist: WorkerShortlist, now: float
    ) -> tuple[int, str] | None:
        """The reservation of the first one that waits, kept for the next time: steps, worker."""
        reserved = self._reservation(first, shortlist, now)
        if reserved is not None:
            steps, worker = reserved
            self.first_fits_at = now + steps * self.ledgers[worker].step_s
            self._reserved = (first.request_id, worker, self.first_fits_at)
        return reserved

    def explain(self, entry: Waiting, shortlist: WorkerShortlist, now: float) -> Wait:
        """Why the first request waits, and until when."""
        waited = now - entry.arrived
        soonest = self.soonest(entry, shortlist)
        if soonest is None:
            has_worker = bool(shortlist) and not self.lacks_tokenizer(entry.demand)
            reason = "slots" if has_worker else "no_worker"
            return Wait(entry.request_id, entry.tenant, 0, reason, waited, None)
        steps, name = soonest
        forecast = shortlist[name]
        peak = forecast.peak_with(self.candidate(entry, name))
        reason = "slots" if forecast.slots < 1 else "memory"
        seconds = steps * self.ledgers[name].step_s
        return Wait(
            entry.request_id, entry.tenant, 0, reason, waited, seconds, name, peak, forecast.limit
        )

    def _reservation(
        self, first: Waiting, shortlist: WorkerShortlist, now: float
    ) -> tuple[int, str] | None:
        """Where the first one will fit, and after how many steps: the soonest that is found.

        The earlier reservation is checked again: the rule is not monotone in time, and if a
        search misses the moment it found before, later requests would delay the first.
        """
        found = self.soonest(first, shortlist)
        request_id, worker, at = self._reserved or ("", "", 0.0)
        ledger = self.ledgers.get(worker)
        if request_id != first.request_id or ledger is None or ledger.is_draining:
            return found
        step_s = ledger.step_s
        steps = max(round((at - now) / step_s), 0)
        if found is not None and found[0] * self.ledgers[found[1]].step_s <= steps * step_s:
            return found
        holds = shortlist[worker].admits_after(steps, self.candidate(first, worker))
        return (steps, worker) if holds else found


LEEWAY = 0.1  # of a worker's memory: how much fuller it may be if it has the prefix cached


def best_of(able: Sequence[tuple[float, str]], hits: Mapping[str, int]) -> str:
    """Of workers with room, each with its predicted peak as a share: longest cached prefix first.

    As long as it is at most LEEWAY fuller than the emptiest; then the smallest peak.
    """
    most = min(able)[0] + LEEWAY

    def rank(each: tuple[float, str]) -> tuple[int, float, str]:
        share, name = each
        return -hits.get(name, 0) if share <= most else 0, share, name

    return min(able, key=rank)[1]


class WorkerShortlist:
    """The workers to evaluate at one moment, and their forecasts, each made when first used."""

    def __init__(
        self,
        ledgers: Mapping[str, Ledger],
        settings: GateSettings,
        now: float,
        pressed_s: float = 0.0,
    ) -> None:
        """`pressed_s`: of pressure. Without it caution costs nothing; else it costs throughput,
        and the level falls."""
        self._ledgers, self._settings, self._now = ledgers, settings, now
        self._names = [name for name, each in ledgers.items() if not each.is_draining]
        self._tokenizers = {ledgers[name].spec.tokenizer for name in self._names}
        self._forecasts: dict[str, SampledForecast] = {}
        self._level = settings.level_after(pressed_s)
        self._loads: Floats | None = None  # [workers], when first used

    def __bool__(self) -> bool:
        return bool(self._names)

    def __getitem__(self, name: str) -> SampledForecast:
        if name not in self._forecasts:
            self._forecasts[name] = self._ledgers[name].forecast(
                self._now, self._level, self._settings.num_samples
            )
        return self._forecasts[name]

    def workers_for(self, demand: Demand, hits: Iterable[str] = ()) -> list[str]:
        """Workers to evaluate for this demand, in no order, including all of `hits`."""
        most = self._settings.max_choices
        if demand.tokenizer and not self._tokenizers <= {demand.tokenizer, ""}:
            # Another model with another tokenizer, while one replaces the other.
            return [name for name in self._names if demand.is_for(self._ledgers[name].spec)]
        if len(self._names) <= most:
            return self._names
        if self._loads is None:
            ledgers = [self._ledgers[name] for name in self._names]
            self._loads = np.array([e.load if e.has_slots else np.inf for e in ledgers])
            self._capacities = np.array([each.spec.capacity for each in ledgers])
            self._places = {name: i for i, name in enumerate(self._names)}
        loads = np.where(self._capacities >= demand.longest(1), self._loads, np.inf)
        least = [self._names[i] for i in np.argpartition(loads, most)[:most].tolist()]
        return [*least, *(name for name in hits if name not in least)]

    def grant(self, name: str, candidate: Candidate) -> None:
        """The candidate has been added to that worker's ledger."""
        ledger = self._ledgers[name]
        self._forecasts[name] = ledger.joined(self[name], candidate, self._now)
        if self._loads is not None:
            self._loads[self._places[name]] = ledger.load if ledger.has_slots else np.inf
