"""Keeps what the gate's predictor has learnt: in a file, in Redis, or in both.

The file stays with its machine; Redis also serves a gate that starts on another one. A Redis that
does not answer holds nothing up: it is skipped, and asked again at the next turn.
"""

from __future__ import annotations

import asyncio
import copy
import logging

from penstock.deployments.gate.learner import GateLearner
from penstock.deployments.gate.types import GateSetup
from penstock.deployments.options import AUTO_FILE, StateOptions
from penstock.deployments.prediction import predictor_file
from penstock.deployments.prediction.predictor import LengthPredictor
from penstock.deployments.prediction.snapshot import SnapshotError, restore, snapshot
from penstock.deployments.state.factory import open_store
from penstock.deployments.state.store import StateError, Store
from penstock.workers.errors import ConfigError

log = logging.getLogger("penstock.gate")

BUDGET_S = 2.0  # of each call to the store
FILE, STORE = "file", "store"  # places


class PredictorSnapshots:
    """Of one gate: `restore` when it starts, and before each `save` until the store answered."""

    def __init__(self) -> None:
        self._options: StateOptions | None = None
        self._store: Store | None = None
        self._is_restored = False  # the store has answered: what is in it may be replaced
        self._num_saved = 0
        self._automatic: tuple[tuple[str, str], str | None] | None = None  # of whom, and its file
        self._faults: dict[str, str] = {}  # why a place was not written, by place

    @property
    def fault(self) -> str:
        """Why what was learnt is not kept now; empty: it is, or nothing was to be kept yet."""
        return "; ".join(self._faults.values())

    def load(self, setup: GateSetup) -> LengthPredictor:
        """The predictor of the file; a new one if there is none."""
        return predictor_file.load(self._file(setup))

    def _file(self, setup: GateSetup) -> str | None:
        """Found once for each application and model, so that a warning comes once."""
        if setup.snapshot_file != AUTO_FILE:
            return setup.snapshot_file
        if self._automatic is None or self._automatic[0] != setup.snapshot_of:
            found = predictor_file.automatic(*setup.snapshot_of)
            self._automatic = (setup.snapshot_of, found)
        return self._automatic[1]

    async def restore(self, setup: GateSetup, learner: GateLearner) -> None:
        """Give the learner what the store has. Failures are logged, and in `fault`."""
        if setup.state != self._options:
            await self.close()
            self._options, self._is_restored = setup.state, False
            self._faults.pop(STORE, None)  # it was another one, or there is none
        if self._options is None or self._is_restored:
            return
        try:
            if self._store is None:
                self._store = await open_store(self._options)
            found = await self._store.get(setup.snapshot_key, budget_s=BUDGET_S)
            self._is_restored = True
            if found is not None:
                learner.predictor = await asyncio.to_thread(restore, found.value)
            self._faults.pop(STORE, None)
        except (StateError, ConfigError, SnapshotError) as error:
            self._failed(STORE, f"cannot take the predictor from the state store: {error}")

    async def save(self, setup: GateSetup, learner: GateLearner) -> None:
        """Save if something was learnt since the last time. Failures are logged, and in `fault`."""
        await self.restore(setup, learner)  # if it failed so far: what is there is not overwritten
        store = self._store if self._is_restored else None
        file, num_learnt = self._file(setup), learner.num_learnt
        if file is None:
            self._faults.pop(FILE, None)  # settings have changed
        if num_learnt == self._num_saved or (file is None and store is None):
            return
        copied = copy.deepcopy(learner.predictor)  # the original learns meanwhile
        self._num_saved = num_learnt
        if file is not None:
            await self._write(file, copied)
        if store is not None:
            data = await asyncio.to_thread(snapshot, copied)
            try:
                await store.put(setup.snapshot_key, data, budget_s=BUDGET_S)
                self._faults.pop(STORE, None)
            except StateError as error:
                self._failed(STORE, f"cannot save the predictor in the state store: {error}")
                self._num_saved = -1  # again at the next turn

    async def _write(self, file: str, predictor: LengthPredictor) -> None:
        try:
            await asyncio.to_thread(predictor_file.save, file, predictor)
            self._faults.pop(FILE, None)
        except OSError as error:
            remedy = predictor_file.REMEDY
            self._failed(FILE, f"cannot save the predictor to {file}: {error.strerror}; {remedy}")
            self._num_saved = -1  # again at the next turn

    def _failed(self, place: str, fault: str) -> None:
        """It is logged once, until it has passed."""
        if place not in self._faults:
            log.warning("%s", fault)
        self._faults[place] = fault

    async def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            await store.close()
