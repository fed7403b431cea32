"""Requests that ended three workers, in the state store: every ingress refuses them.

The store is asked only in the ten minutes after this ingress began or saw a worker end: a request
that ended workers was refused within that time, or is forgotten. Where the store does not answer,
each ingress knows its own refusals.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from penstock.deployments.state.store import StateError, Store

log = logging.getLogger("penstock.channel")

REMEMBER_S = 600.0  # clients send a refused request again
PUT_BUDGET_S = 2.0  # its client waits; seldom enough
GET_BUDGET_S = 0.25
PAUSE_S = 2.0  # after a failure of the store


class SharedRefusals:
    """The refused requests of all ingresses, by fingerprint. Lives on one event loop."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic):
        self._store = store
        self._clock = clock
        self._not_before_s = 0.0
        self._until_s = clock() + REMEMBER_S

    def saw_loss(self) -> None:
        """A worker has ended: perhaps a request was at fault, and another ingress finds it."""
        self._until_s = self._clock() + REMEMBER_S

    async def add(self, mark: bytes) -> None:
        """Have all ingresses refuse the request. Never fails."""
        try:
            await self._store.put(_name(mark), b"", ttl_s=REMEMBER_S, budget_s=PUT_BUDGET_S)
        except StateError as error:
            log.warning("other ingresses do not learn of a refused request: %s", error)

    def asks(self) -> bool:
        """Whether the store is asked now."""
        return self._not_before_s <= self._clock() < self._until_s

    async def has(self, mark: bytes) -> bool:
        """Whether an ingress refused the request of late. False where the store is down."""
        try:
            return await self._store.get(_name(mark), budget_s=GET_BUDGET_S) is not None
        except StateError:
            self._not_before_s = self._clock() + PAUSE_S
            return False


def _name(mark: bytes) -> str:
    return f"fatal/{mark.hex()}"
