"""Finds or creates the expert store actor of a node, and calls it.

No call waits for ever: a store that hangs is an error within seconds. Loads torch only in a process
that creates a store: the ingress and the command line import this module too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.deployments.experts.spec import HotExpert, StoreSpec
from penstock.deployments.supervision.actors import CALL_TIMEOUT_S, named_actor
from penstock.workers.errors import StoreUnavailable
from penstock.workers.experts.expert_file import Bytes, Manifest, RowIndices
from penstock.workers.stats import ExpertStats

log = logging.getLogger("penstock.experts")

ASK_S = 5.0  # longest that the store may take for one question
RESTART_TIMEOUT_S = 30.0  # for one question and all its repetitions, while the store restarts
START_TIMEOUT_S = (
    60.0  # for the store's process to start, or to write the expert file and be silent
)
# Less than the 5 s after which an engine without progress counts as hung: the request fails, and
# the worker goes on.
PACK_S = 4.0
MAX_HINTS = 4096
LIVENESS = "liveness"  # threads of the store that serve only the question whether it lives


class ExpertStoreClient:
    """The store of a node. The first caller creates the actor.

    Ray restarts it without limit. While it is down, workers keep using the file they have mapped.
    """

    def __init__(self, spec: StoreSpec, node: str | None = None):
        """`node`: id of the node whose store it is; None: this process's."""
        self._spec = spec
        self._node = node
        self._handle: Any = None
        self._is_away = False  # `pack` had no answer, and no heartbeat since then

    def manifest(self) -> Manifest:
        """Wait until the experts are loaded, for minutes where they are many, while the store
        lives. Raises LoadError or ConfigError if they cannot be, StoreUnavailable if it hangs."""
        return self._manifest("manifest")

    def manifest_for_start(self) -> Manifest:
        """`manifest`, for a worker that starts: the store waits for its first heartbeat."""
        return self._manifest("manifest_for_start")

    def is_on_this_node(self) -> bool:
        """Whether the store's file can be mapped here."""
        return not self._spec.is_single or self.ask("node") == _own_node()

    def pack(self, requests: Sequence[tuple[int, int, RowIndices]]) -> Bytes:
        """The rows of each (layer, expert, rows), as bytes. On the thread of a step's experts.

        Raises CorruptedExpert, and StoreUnavailable after PACK_S; from then on at once, until the
        store answers a heartbeat: a request after the other would keep the engine waiting.
        """
        if self._is_away:
            raise StoreUnavailable("the expert store has not answered, and sends no sign of life")
        try:
            packed: Bytes = self.ask("pack", requests, within_s=PACK_S)
        except StoreUnavailable as error:
            log.warning("no experts until the store answers a heartbeat: %s", error)
            self._is_away = True
            raise
        return packed

    def ask(self, method: str, *args: Any, within_s: float = RESTART_TIMEOUT_S) -> Any:
        """Call a method of the store, also while it is being restarted.

        Raises what the method raises, and StoreUnavailable without an answer in ASK_S, or if the
        store does not restart within `within_s`.
        """
        given_up_s = time.monotonic() + within_s
        while True:
            try:
                call = getattr(self.actor(), method).remote(*args)
                return ray.get(call, timeout=min(ASK_S, max(given_up_s - time.monotonic(), 0.0)))
            except RayTaskError as error:
                raise error.cause from None
            except GetTimeoutError:
                raise StoreUnavailable(
                    f"the expert store does not answer {method!r} within {min(ASK_S, within_s):g} s"
                ) from None
            except (ActorDiedError, ActorUnavailableError) as error:
                self._handle = None
                if time.monotonic() > given_up_s - 0.2:
                    raise StoreUnavailable(f"the expert store does not restart: {error}") from None
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
        self._is_away = False
        return epoch

    def call_now(self, method: str, *args: Any) -> Any:
        """Call a method of the store with a time limit."""
        return ray.get(getattr(self.actor(), method).remote(*args), timeout=CALL_TIMEOUT_S)

    def actor(self) -> Any:
        if self._handle is None:
            # Loads torch, which the ingress and the command line do not need.
            from penstock.deployments.experts.store import StoreActor

            node = self._node or _own_node()
            place = "one" if self._spec.is_single else node[:12]
            self._handle = named_actor(
                StoreActor,
                f"{self._spec.app_name}-experts-{self._spec.digest}-{place}",
                self._spec,
                max_concurrency=8,
                thread_groups={LIVENESS: 1},
                # Ray has an actor without resources placed by a random node, which under load may
                # not know the one that is asked for, and takes any other.
                memory=1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=self._spec.is_single),
            )
        return self._handle

    def _manifest(self, method: str) -> Manifest:
        answer, heard_s = None, time.monotonic()
        while True:
            try:
                if answer is None:
                    answer = getattr(self.actor(), method).remote()
                manifest: Manifest = ray.get(answer, timeout=ASK_S)
                return manifest
            except RayTaskError as error:
                raise error.cause from None
            except GetTimeoutError:
                if self._lives():
                    heard_s = time.monotonic()
            except (ActorDiedError, ActorUnavailableError):
                self._handle = answer = None
                time.sleep(0.2)
            if (silent_s := time.monotonic() - heard_s) > START_TIMEOUT_S:
                raise StoreUnavailable(
                    f"the expert store has given no sign of life for {silent_s:.0f} s; if its "
                    "process hangs, end it: Ray starts another one"
                )
            if silent_s > ASK_S:
                log.warning("waiting for the expert store, silent for %.0f s", silent_s)

    def _lives(self) -> bool:
        """Whether the store answers at all, as it does while it writes the expert file."""
        try:
            ask = self.actor().node.options(concurrency_group=LIVENESS).remote()
            return bool(ray.get(ask, timeout=ASK_S))
        except (GetTimeoutError, ActorDiedError, ActorUnavailableError):
            return False


def _own_node() -> str:
    return ray.get_runtime_context().get_node_id()
