"""Where responses are kept: in this process, or in the state store, for all ingresses."""

from __future__ import annotations

import asyncio

from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.http.responses.kept import Kept
from penstock.deployments.ingress.http.responses.store import ResponseStore, StoredResponse
from penstock.deployments.ingress.journal.journals import Journals

PREFIX = "resp_"
RETRY_S = 1.0  # between attempts to write how a response in the background ended


class Keeper:
    """Over the journals' store, or without one over the memory of this process alone.

    What runs in the background here is in memory in either case.
    """

    def __init__(self, journals: Journals | None, local: ResponseStore | None = None):
        self._values = None if journals is None else journals.responses
        self.local = local or ResponseStore()

    async def find(self, response_id: str, principal: str) -> Kept | None:
        """Raises ServiceError state_unavailable."""
        entry = self.local.get(response_id, principal)
        if entry is not None:
            return Kept.of(entry)
        if not response_id.startswith(PREFIX):
            return None
        kept = await self.of_call(response_id.removeprefix(PREFIX))
        return kept if kept is not None and kept.principal == principal else None

    async def of_call(self, call_id: str) -> Kept | None:
        """What the state store has, of anyone. Raises ServiceError state_unavailable."""
        found = None if self._values is None else await self._values.get(call_id)
        return None if found is None else Kept.from_value(*found)

    async def check(self, call_id: str) -> None:
        """Raise ServiceError state_unavailable unless a response could be kept now."""
        if self._values is not None:
            await self._values.get(call_id)

    async def keep(self, entry: StoredResponse) -> bool:
        """Keep a response that has ended; False: the state store could not take it."""
        self._complete(entry)
        if self._values is None:
            self.local.put(entry)
            return True
        try:
            return await self._values.put(entry.request_id, Kept.of(entry).value()) is not None
        except ServiceError:
            return False

    async def write_running(self, entry: StoredResponse) -> None:
        """Let other ingresses find a response that begins. Raises ServiceError."""
        if self._values is not None:
            entry.version = await self._values.put(
                entry.request_id, Kept.of(entry).value(), is_running=True, expect=entry.version
            )
            if entry.version is None:
                raise ServiceError("state_unavailable", retry_after_s=2.0)

    async def finish(self, entry: StoredResponse) -> None:
        """Keep a response that has ended in the background, however long the store is down."""
        self._complete(entry)
        self.local.put(entry)
        if self._values is None:
            return
        while self.local.get(entry.draft.id, entry.principal) is entry:
            try:
                # Another version is of an ingress that took over, which has the same answer; or
                # the client has deleted the response.
                await self._values.put(
                    entry.request_id, Kept.of(entry).value(), expect=entry.version
                )
            except ServiceError:
                await asyncio.sleep(RETRY_S)
            else:
                self.local.remove(entry)

    async def remove(self, kept: Kept) -> None:
        """Raises ServiceError state_unavailable."""
        entry = self.local.get(str(kept.body["id"]), kept.principal)
        if entry is not None:
            self.local.remove(entry)
        if self._values is not None:
            await self._values.delete(kept.request_id)

    def _complete(self, entry: StoredResponse) -> None:
        entry.messages = (*entry.messages[: entry.num_input], entry.draft.message())
