"""Finds or creates the expert store actor of a node, and calls it.

Loads torch only in a process that creates a store: the ingress and the command line import this
module too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.deployments.experts.spec import HotExpert, StoreSpec
from penstock.deployments.supervision.actors import CALL_TIMEOUT_S, named_actor
from penstock.workers.errors import LoadError
from penstock.workers.experts.expert_file import Manifest
from penstock.workers.stats import ExpertStats

log = logging.getLogger("penstock.experts")

RESTART_TIMEOUT_S = 30.0  # that a worker waits for a dead store to restart
MAX_HINTS = 4096


class ExpertStoreClient:
    """The store of this node. The first caller creates the actor.

    Ray restarts it without limit. While it is down, workers keep using the file they have mapped.
    """

    def __init__(self, spec: StoreSpec):
        self._spec = spec
        self._handle: Any = None

    def manifest(self) -> Manifest:
        """Wait until the experts are loaded. Raises LoadError or ConfigError if they cannot be."""
        manifest: Manifest = self.ask("manifest")
        return manifest

    def manifest_for_start(self) -> Manifest:
        """`manifest`, for a worker that starts: the store waits for its first heartbeat."""
        manifest: Manifest = self.ask("manifest_for_start")
        return manifest

    def is_on_this_node(self) -> bool:
        """Whether the store's file can be mapped here."""
        return not self._spec.is_single or self.ask("node") == _own_node()

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the store without a time limit, also while it is being restarted.

        Raises what the method raises, and LoadError if the store does not restart in time.
        """
        given_up_s: float | None = None
        while True:
            try:
                return ray.get(getattr(self.actor(), method).remote(*args))
            except RayTaskError as error:
                raise error.cause from None
            except (ActorDiedError, ActorUnavailableError) as error:
                self._handle = None
                given_up_s = given_up_s or time.monotonic() + RESTART_TIMEOUT_S
                if time.monotonic() > given_up_s:
                    raise LoadError(f"the expert store does not restart: {error}") from None
                time.sleep(0.2)

    async def heartbeat(self, worker: int, stats: ExpertStats, hot: Sequence[HotExpert]) -> int:
        """Send a heartbeat; returns the store's epoch. Raises Ray's errors or TimeoutError while
        the store is down."""
        actor = self._handle or await asyncio.to_thread(self.actor)
        try:
            call = actor.heartbeat.remote(worker, stats, hot)
            epoch: int = await asyncio.wait_for(call, CALL_TIMEOUT_S)
        except ActorDiedError:
            self._handle = None
            raise
        return epoch

    def call_now(self, method: str, *args: Any) -> Any:
        """Call a method of the store with a time limit."""
        return ray.get(getattr(self.actor(), method).remote(*args), timeout=CALL_TIMEOUT_S)

    def actor(self) -> Any:
        if self._handle is None:
            # Loads torch, which the ingress and the command line do not need.
            from penstock.deployments.experts.store import StoreActor

            node = _own_node()
            place = "one" if self._spec.is_single else node[:12]
            self._handle = named_actor(
                StoreActor,
                f"{self._spec.app_name}-experts-{self._spec.digest}-{place}",
                self._spec,
                max_concurrency=8,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=self._spec.is_single),
            )
        return self._handle


def _own_node() -> str:
    return ray.get_runtime_context().get_node_id()
