"""Calls that go on without a client: which ingress runs each, and which one takes over.

One value of the store is the index: each running call and its owner. An owner renews its lease, a
value of its own that expires. What an owner without a lease left behind is claimed in the index, by
one ingress, since the index is only replaced in the version that was read.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import secrets
from collections.abc import Callable, Collection
from typing import Protocol

from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.state.store import ABSENT, Conflict, StateError, Store

log = logging.getLogger("penstock.background")

LEASE_S = 3.0
BEAT_S = 1.0
BUDGET_S = 0.5
MAX_TRIES = 30  # of one change of the index, while other ingresses change it
MAX_ADOPTED = 16  # calls at a look
INDEX = "background/index"
UNOWNED = ""  # owner of a call that was handed over


class BackgroundWork(Protocol):
    """What runs the calls of this ingress."""

    async def adopt(self, call_id: str) -> object:
        """Continue a call that was claimed."""

    def on_lost(self, call_id: str) -> None:
        """Another ingress has claimed a call that this one runs: end it."""

    async def stop(self) -> None:
        """End all calls, so that others can continue them. Never fails."""


class BackgroundCalls:
    """Those of one ingress, and the look for those that need one. Lives on the event loop."""

    def __init__(self, store: Store):
        self._store = store
        self._owner = secrets.token_hex(8)  # an ingress that starts again is another one
        self._ended: set[str] = set()  # to be removed from the index
        self._changing = asyncio.Lock()
        self._has_lease = False
        self._is_leaving = False  # it has handed over, and takes nothing more
        self._work: BackgroundWork | None = None
        self._own: set[str] = set()
        self._beating: asyncio.Task[None] | None = None

    def start(self, work: BackgroundWork) -> None:
        """Begin to renew the lease, and to look for calls."""
        self._work = work
        self._beating = asyncio.ensure_future(self._beat())

    async def add(self, call_id: str) -> None:
        """This ingress runs a call from now on. Raises ServiceError state_unavailable."""

        def change(index: dict[str, str]) -> bool:
            index[call_id] = self._owner
            return True

        try:
            if not self._has_lease:
                await self._renew()
            await self._change(change)
        except StateError:
            raise _unavailable() from None
        self._own.add(call_id)

    def remove(self, call_id: str) -> None:
        """A call has ended. The index learns it soon."""
        self._own.discard(call_id)
        self._ended.add(call_id)

    async def claim(self, call_id: str, *, from_living: bool = False) -> bool:
        """Become the owner of a call, if its owner has no lease, or with `from_living` from any
        other; False: it has one, or it has ended. Raises ServiceError state_unavailable."""
        try:
            owner = (await self._index()).get(call_id)
            if owner is None or owner == self._owner:
                return False
            if not from_living and (self._is_leaving or await self._is_alive(owner)):
                return False
            return await self._take(call_id, owner)
        except StateError:
            raise _unavailable() from None

    async def hand_over(self) -> None:
        """End what this ingress runs, and let others claim it. Never fails."""
        self._is_leaving = True
        if self._work is not None:
            await self._work.stop()
        try:
            await self._give_up(self._own)
            await self._forget_ended()
        except (StateError, ServiceError) as error:
            log.warning("background responses wait for the end of a lease: state store: %s", error)

    async def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            try:
                await self._renew()
                await self._look()
            except (StateError, ServiceError):
                self._has_lease = False  # perhaps; the journals complain of the store
            except Exception:
                log.exception("the look for background responses failed")
            await asyncio.sleep(BEAT_S * random.uniform(0.8, 1.2))

    async def _renew(self) -> None:
        await self._store.put(f"ingress/{self._owner}", b"1", ttl_s=LEASE_S, budget_s=BUDGET_S)
        self._has_lease = True

    async def _look(self) -> None:
        """Forget what has ended, note what was claimed by others, and claim what has no owner."""
        await self._forget_ended()
        assert self._work is not None
        own = set(self._own)  # before the index is read: what comes meanwhile is in a later one
        index = await self._index()
        for call_id in own & self._own:
            if index.get(call_id) != self._owner:
                self._own.discard(call_id)
                self._work.on_lost(call_id)
        if self._is_leaving:
            return
        alive = {
            owner: await self._is_alive(owner) for owner in set(index.values()) - {self._owner}
        }
        orphans = [each for each, owner in index.items() if not alive.get(owner, True)]
        random.shuffle(orphans)
        for call_id in orphans[:MAX_ADOPTED]:
            if await self._take(call_id, index[call_id]):
                try:
                    await self._work.adopt(call_id)
                except Exception:
                    log.exception("the background response of %s cannot go on here", call_id)
                    await self._give_up({call_id})

    async def _give_up(self, call_ids: Collection[str]) -> None:
        given = set(call_ids)

        def change(index: dict[str, str]) -> bool:
            own = [each for each in given if index.get(each) == self._owner]
            index.update(dict.fromkeys(own, UNOWNED))
            return bool(own)

        self._own -= given
        if given:
            await self._change(change)

    async def _forget_ended(self) -> None:
        ended = set(self._ended)

        def change(index: dict[str, str]) -> bool:
            gone = [each for each in ended if index.get(each) == self._owner]
            for call_id in gone:
                del index[call_id]
            return bool(gone)

        if ended:
            await self._change(change)
            self._ended -= ended

    async def _take(self, call_id: str, owner: str) -> bool:
        def change(index: dict[str, str]) -> bool:
            if index.get(call_id) != owner:
                return False
            index[call_id] = self._owner
            return True

        is_taken = await self._change(change)
        if is_taken:
            self._own.add(call_id)
        return is_taken

    async def _is_alive(self, owner: str) -> bool:
        if owner == UNOWNED:
            return False
        return await self._store.get(f"ingress/{owner}", budget_s=BUDGET_S) is not None

    async def _index(self) -> dict[str, str]:
        found = await self._store.get(INDEX, budget_s=BUDGET_S)
        return {} if found is None else dict(json.loads(found.value))

    async def _change(self, change: Callable[[dict[str, str]], bool]) -> bool:
        """Replace the index by what `change` makes of it; False: it changes nothing.

        Raises StateError.
        """
        async with self._changing:
            for _ in range(MAX_TRIES):
                found = await self._store.get(INDEX, budget_s=BUDGET_S)
                index = {} if found is None else dict(json.loads(found.value))
                if not change(index):
                    return False
                expect = ABSENT if found is None else found.version
                try:
                    await self._store.put(
                        INDEX, json.dumps(index).encode(), expect=expect, budget_s=BUDGET_S
                    )
                except Conflict:
                    await asyncio.sleep(random.uniform(0, 0.02))
                else:
                    return True
        raise _unavailable()


def _unavailable() -> ServiceError:
    return ServiceError("state_unavailable", retry_after_s=2.0)
