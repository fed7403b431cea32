"""Batches in the state store: what an ingress can say of those that lie in another data folder.

The files of a batch, its results and its run are in one data folder (deployments/batch/). The
executor of that folder notes here how far each of its batches is, so that every ingress can show
them, and cancel them. To read a file, an ingress needs the folder itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import random
import time
from dataclasses import asdict, dataclass, fields
from typing import Any

from penstock.deployments.batch.batch_store import (
    BATCH_ID,
    KEPT_S,
    BatchSpec,
    BatchState,
    BatchStatus,
)
from penstock.deployments.batch.file_store import FILE_ID
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.state.store import ABSENT, Conflict, StateDown, StateError, Store

log = logging.getLogger("penstock.batch")

WRITE_S = 0.25
RETRY_S = 1.0  # while the store cannot be reached
BUDGET_S = 0.5
MAX_LISTED = 1000  # newest batches of one tenant
MAX_TRIES = 30  # of one change of a list, while other ingresses change it


@dataclass(frozen=True, slots=True)
class SharedBatch:
    """A batch as the executor of its folder noted it last. `holder`: the ingress of that one."""

    spec: BatchSpec
    state: BatchState
    holder: str


class SharedBatches:
    """Made on the event loop, on which it writes. Reads raise ServiceError state_unavailable."""

    def __init__(self, store: Store, holder: str):
        """`holder`: names this ingress, for those who look for a file."""
        self._store, self._holder = store, holder
        self._noted: dict[str, tuple[BatchSpec, BatchState]] = {}  # not written yet
        self._listed: set[str] = set()
        self._is_complaining = False
        self._writing = asyncio.ensure_future(self._write())

    def note(self, spec: BatchSpec, state: BatchState) -> None:
        """The newest state of a batch of this ingress's folder. Never waits."""
        self._noted[spec.id] = spec, state

    async def created(self, spec: BatchSpec) -> None:
        """A client has created a batch here. Never fails: its executor notes it, too."""
        value = self._bytes_of(spec, BatchState())
        with contextlib.suppress(StateError, ValueError):
            with contextlib.suppress(Conflict):  # the executor was faster, and knows more
                await self._store.put(
                    f"batch/{spec.id}", value, ttl_s=KEPT_S, expect=ABSENT, budget_s=BUDGET_S
                )
            await self._list(spec)

    async def note_file(self, file_id: str, principal: str, ttl_s: float) -> None:
        """This ingress's folder has that file. Never fails: without it, an error says less."""
        value = json.dumps({"principal": principal, "holder": self._holder}).encode()
        with contextlib.suppress(StateError, ValueError):
            name = f"file/{file_id}"
            await self._store.put(name, value, ttl_s=max(ttl_s, 1.0), budget_s=BUDGET_S)

    async def forget_file(self, file_id: str) -> None:
        with contextlib.suppress(StateError, ValueError):
            await self._store.delete(f"file/{file_id}", budget_s=BUDGET_S)

    async def holder_of(self, file_id: str, principal: str) -> str | None:
        """The ingress whose folder has that file of `principal`; None: no folder is known to."""
        found = await self._value(f"file/{file_id}") if FILE_ID.fullmatch(file_id) else None
        if found is None or found["principal"] != principal:
            return None
        return str(found["holder"])

    async def get(self, batch_id: str, principal: str) -> SharedBatch | None:
        """A batch of `principal`."""
        if BATCH_ID.fullmatch(batch_id) is None:
            return None
        found = await self._value(f"batch/{batch_id}")
        if found is None or found["spec"]["principal"] != principal:
            return None
        values = _known(BatchState, found["state"])
        state = BatchState(**{**values, "status": BatchStatus(values["status"])})
        spec = BatchSpec(**_known(BatchSpec, found["spec"]))
        if state.may_be_cancelled and (at := await self.cancelled_at(batch_id)) is not None:
            state = state.cancelling(at)
        return SharedBatch(spec, state, str(found["holder"]))

    async def ids(self, principal: str) -> list[tuple[int, str]]:
        """When each of the newest batches of `principal` was created, and its id."""
        found = await self._value(_list_name(principal))
        return [(created_at, batch_id) for created_at, batch_id in found or []]

    async def cancel(self, batch_id: str) -> None:
        """Have the executor of its folder end a batch. May be repeated."""
        try:
            await self._store.put(
                f"batch/{batch_id}/cancel",
                str(int(time.time())).encode(),
                ttl_s=KEPT_S,
                expect=ABSENT,
                budget_s=BUDGET_S,
            )
        except Conflict:  # it was cancelled before
            return
        except StateError:
            raise _unavailable() from None

    async def cancelled_at(self, batch_id: str) -> int | None:
        """When a client cancelled the batch at an ingress with another folder."""
        found = await self._value(f"batch/{batch_id}/cancel")
        return None if found is None else int(found)

    async def is_cancelled(self, batch_id: str) -> bool:
        """The same for the executor, which looks each second: False while it is not known."""
        try:
            return await self.cancelled_at(batch_id) is not None
        except ServiceError:
            return False

    async def close(self) -> None:
        """Write the rest, if the store takes it."""
        self._writing.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)
        with contextlib.suppress(StateError):
            await self._flush()

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(WRITE_S)
            try:
                await self._flush()
                self._is_complaining = False
            except StateError as error:
                if not self._is_complaining:
                    log.warning("other ingresses do not see the progress of batches: %s", error)
                self._is_complaining = True
                await asyncio.sleep(RETRY_S)
            except Exception:
                log.exception("the progress of a batch cannot be written to the state store")

    async def _flush(self) -> None:
        """Write what was noted. Raises StateError; what was not written stays noted."""
        for batch_id, (spec, state) in list(self._noted.items()):
            try:
                await self._put(spec, state)
                if batch_id not in self._listed:
                    await self._list(spec)
                    self._listed.add(batch_id)
            except ValueError as error:  # it is too large for the store
                log.warning("other ingresses do not see the progress of %s: %s", batch_id, error)
            if self._noted.get(batch_id) == (spec, state):
                del self._noted[batch_id]
            if state.status.is_final:
                self._listed.discard(batch_id)
                for file_id in (state.output_file_id, state.error_file_id):
                    if file_id is not None:
                        await self.note_file(file_id, spec.principal, spec.output_ttl_s)

    async def _put(self, spec: BatchSpec, state: BatchState) -> None:
        """Replace what is there, unless it says that the batch has ended: what an executor noted
        before another one took over its folder may come late. Raises StateError, ValueError."""
        name = f"batch/{spec.id}"
        found = await self._store.get(name, budget_s=BUDGET_S)
        if found is not None and not state.status.is_final:
            noted = json.loads(found.value)["state"]["status"]
            if BatchStatus(noted).is_final:
                return
        await self._store.put(
            name,
            self._bytes_of(spec, state),
            ttl_s=KEPT_S,
            expect=ABSENT if found is None else found.version,
            budget_s=BUDGET_S,
        )

    def _bytes_of(self, spec: BatchSpec, state: BatchState) -> bytes:
        value = {"spec": asdict(spec), "state": asdict(state), "holder": self._holder}
        return json.dumps(value).encode()

    async def _list(self, spec: BatchSpec) -> None:
        """Have a batch in the list of its tenant. Raises StateError."""
        name, entry = _list_name(spec.principal), [spec.created_at, spec.id]
        for _ in range(MAX_TRIES):
            found = await self._store.get(name, budget_s=BUDGET_S)
            listed = [] if found is None else json.loads(found.value)
            if entry in listed:
                return
            value = json.dumps(sorted([*listed, entry])[-MAX_LISTED:]).encode()
            expect = ABSENT if found is None else found.version
            try:
                await self._store.put(name, value, ttl_s=KEPT_S, expect=expect, budget_s=BUDGET_S)
            except Conflict:
                await asyncio.sleep(random.uniform(0, 0.02))
            else:
                return
        raise StateDown("the list of a tenant's batches is changed all the time")

    async def _value(self, name: str) -> Any:
        """What a JSON value says; None: there is none. Raises ServiceError."""
        try:
            found = await self._store.get(name, budget_s=BUDGET_S)
        except StateError:
            raise _unavailable() from None
        return None if found is None else json.loads(found.value)


def _list_name(principal: str) -> str:
    return f"batches/{hashlib.blake2b(principal.encode(), digest_size=16).hexdigest()}"


def _known(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Without the fields of another release."""
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _unavailable() -> ServiceError:
    return ServiceError("state_unavailable", retry_after_s=2.0)
