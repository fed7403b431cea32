"""Which workers are looked at for a request, and their rooms, each made when first asked for.

Up to `max_choices` workers all are looked at. Beyond that only those with the least to hold, by
tokens that their answers are expected to need: one number a worker, so that the cost of a decision
does not grow with the cluster. Lives for one moment; knows nothing of the order of requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist

import numpy as np

from penstock.deployments.gate_demand import Demand
from penstock.deployments.gate_grid import GridRoom
from penstock.deployments.gate_ledger import Ledger
from penstock.deployments.gate_room import Candidate, Room
from penstock.deployments.gate_types import GateSettings
from penstock.deployments.length_distribution import Floats

LEEWAY = 0.1  # of a worker's memory: so much fuller it may become for a prefix that it has


def best_of(able: Sequence[tuple[float, str]], hits: Mapping[str, int]) -> str:
    """Of workers with room, each with its predicted peak as a share: longest cached prefix first.

    As far as it is not much fuller than the emptiest; then the smallest peak.
    """
    most = min(able)[0] + LEEWAY

    def rank(each: tuple[float, str]) -> tuple[int, float, str]:
        share, name = each
        return -hits.get(name, 0) if share <= most else 0, share, name

    return min(able, key=rank)[1]


class Choice:
    """The workers as they are now."""

    def __init__(
        self,
        ledgers: Mapping[str, Ledger],
        settings: GateSettings,
        now: float,
        longest_wait_s: float = 0.0,
    ) -> None:
        """`longest_wait_s`: of those that wait now. With nobody there caution costs nothing; with
        a queue it costs throughput, and the level falls."""
        self._ledgers, self._settings, self._now = ledgers, settings, now
        self._names = list(ledgers)
        self._rooms: dict[str, Room | GridRoom] = {}
        self._deviations = None
        self._level = settings.level_after(longest_wait_s)
        if settings.rule == "gaussian":
            self._deviations = NormalDist().inv_cdf(min(self._level, 1.0 - 1e-9))
        self._loads: Floats | None = None  # [workers], once somebody asks

    def __bool__(self) -> bool:
        return bool(self._names)

    def __getitem__(self, name: str) -> Room | GridRoom:
        if name not in self._rooms:
            settings = self._settings
            self._rooms[name] = self._ledgers[name].room(
                self._now, self._level, settings.num_samples, self._deviations
            )
        return self._rooms[name]

    def near(self, demand: Demand, hits: Iterable[str] = ()) -> list[str]:
        """Workers to look at for this one, in no order, those of `hits` (its prefix) among them."""
        most = self._settings.max_choices
        if len(self._names) <= most:
            return self._names
        if self._loads is None:
            books = self._ledgers.values()
            self._loads = np.array([e.load if e.has_slots else np.inf for e in books])
            self._capacities = np.array([each.spec.capacity for each in books])
            self._places = {name: i for i, name in enumerate(self._names)}
        loads = np.where(self._capacities >= demand.longest(1), self._loads, np.inf)
        least = [self._names[i] for i in np.argpartition(loads, most)[:most].tolist()]
        return [*least, *(name for name in hits if name not in least)]

    def grant(self, name: str, candidate: Candidate) -> None:
        """The candidate is on that worker now; its ledger knows."""
        ledger = self._ledgers[name]
        self._rooms[name] = ledger.joined(self[name], candidate, self._now)
        if self._loads is not None:
            self._loads[self._places[name]] = ledger.load if ledger.has_slots else np.inf
