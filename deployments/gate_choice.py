"""Which workers are looked at for a request, and their rooms, each made when first asked for.

Up to `max_choices` workers all are looked at. Beyond that only those with the least to hold, by
tokens that their answers are expected to need: one number a worker, so that the cost of a decision
does not grow with the cluster. Lives for one moment; knows nothing of the order of requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist

import numpy as np

from penstock.deployments.gate_grid import GridRoom
from penstock.deployments.gate_ledger import Demand, Ledger
from penstock.deployments.gate_room import Candidate, Room
from penstock.deployments.gate_types import GateSettings
from penstock.deployments.length_distribution import Floats


class Choice:
    """The workers as they are now."""

    def __init__(self, ledgers: Mapping[str, Ledger], settings: GateSettings, now: float) -> None:
        self._ledgers, self._settings, self._now = ledgers, settings, now
        self._names = list(ledgers)
        self._rooms: dict[str, Room | GridRoom] = {}
        self._deviations = None
        if settings.rule == "gaussian":
            self._deviations = NormalDist().inv_cdf(min(settings.level, 1.0 - 1e-9))
        self._loads: Floats | None = None  # [workers], once somebody asks

    def __bool__(self) -> bool:
        return bool(self._names)

    def __getitem__(self, name: str) -> Room | GridRoom:
        if name not in self._rooms:
            settings = self._settings
            self._rooms[name] = self._ledgers[name].room(
                self._now, settings.level, settings.num_samples, self._deviations
            )
        return self._rooms[name]

    def near(self, demand: Demand) -> list[str]:
        """Workers to look at for this one, in no order."""
        most = self._settings.max_choices
        if len(self._names) <= most:
            return self._names
        if self._loads is None:
            books = self._ledgers.values()
            self._loads = np.array([e.load if e.has_slots else np.inf for e in books])
            self._capacities = np.array([each.spec.capacity for each in books])
            self._places = {name: i for i, name in enumerate(self._names)}
        loads = np.where(self._capacities >= demand.longest(1), self._loads, np.inf)
        return [self._names[i] for i in np.argpartition(loads, most)[:most].tolist()]

    def grant(self, name: str, candidate: Candidate) -> None:
        """The candidate is on that worker now; its ledger knows."""
        ledger = self._ledgers[name]
        self._rooms[name] = ledger.joined(self[name], candidate, self._now)
        if self._loads is not None:
            self._loads[self._places[name]] = ledger.load if ledger.has_slots else np.inf
