"""The gate as a named Ray actor: found, made by the first process that asks, and killed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from penstock.deployments.gate.types import GateSetup
from penstock.deployments.gate.wire import GateAddress
from penstock.deployments.supervision.actors import CALL_TIMEOUT_S, NAMESPACE, named_actor

log = logging.getLogger("penstock.gate")

SAVE_S = 5.0  # longest that its end waits for it


class GateActor:
    """The gate of one model, from any process; the first caller makes the actor."""

    def __init__(self, scope: str, setup: GateSetup):
        """`scope`: ServeConfig.gate_scope."""
        self._name = gate_name(scope)
        self._setup = setup
        self._handle: Any = None
        self._is_overruled = False  # other settings than these are in force

    async def where(self) -> GateAddress:
        """Where the gate is. Raises Ray's errors or TimeoutError while it is unavailable."""
        # Looking up a name waits for Ray's control plane, which may be away: never on the loop.
        actor = self._handle or await asyncio.to_thread(self._actor)
        try:
            address: GateAddress = await asyncio.wait_for(
                actor.where.remote(self._setup), CALL_TIMEOUT_S
            )
        except RayActorError:
            self._handle = None
            raise
        if address.digest != self._setup.digest and not self._is_overruled:
            log.warning(
                "the gate keeps the settings of generation %d; those of this ingress, generation "
                "%d, are not in force",
                address.generation,
                self._setup.generation,
            )
        self._is_overruled = address.digest != self._setup.digest
        return address

    def _actor(self) -> Any:
        if self._handle is None:
            from penstock.deployments.gate.server import GateServer  # the driver needs none of it

            self._handle = named_actor(GateServer, self._name, self._setup, is_on_head=True)
        return self._handle


def gate_name(scope: str) -> str:
    """`scope`: of an application with one model its name; of one with several, ServeConfig's."""
    return f"{scope}-gate"


def end_gate(scope: str) -> None:
    """End the gate of that scope, if there is one, once it has saved what it learnt."""
    with contextlib.suppress(ValueError):
        actor = ray.get_actor(gate_name(scope), namespace=NAMESPACE)
        with contextlib.suppress(RayError, TimeoutError):
            ray.get(actor.save.remote(), timeout=SAVE_S)
        ray.kill(actor)
