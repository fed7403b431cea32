"""The files and batches that one ingress can answer for: of its data folder, and by the state store
the batches of ingresses with other folders."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from starlette.requests import Request

from penstock.deployments.batch.batch_store import BatchSpec, BatchStore, OwnerBatches, StoredBatch
from penstock.deployments.batch.file_store import FileStore, OwnerFiles, StoredFile
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.http.batches.creation import not_found
from penstock.deployments.ingress.http.batches.paging import Page, list_body
from penstock.deployments.ingress.http.batches.schemas import batch_body
from penstock.deployments.ingress.journal.batches import SharedBatch, SharedBatches


class Directory:
    """Of all callers. Reads files on other threads."""

    def __init__(self, folder: Path | None, shared: SharedBatches | None):
        """`folder`: the data folder; None: there is none. `shared`: None: there is no store."""
        self._files = None if folder is None else FileStore(folder)
        self._batches = None if folder is None else BatchStore(folder)
        self._shared = shared

    def of(self, request: Request) -> CallerDirectory:
        """What the caller's API key may see. Raises ServiceError not_configured."""
        if self._files is None or self._batches is None:
            raise ServiceError("not_configured")
        principal = request.scope["state"]["principal"]
        files, batches = self._files.of(principal), self._batches.of(principal)
        return CallerDirectory(principal, files, batches, self._shared)


class CallerDirectory:
    """What one caller may see. `files`, `batches`: in the folder of this ingress."""

    def __init__(
        self,
        principal: str,
        files: OwnerFiles,
        batches: OwnerBatches,
        shared: SharedBatches | None,
    ):
        self.principal, self.files, self.batches = principal, files, batches
        self._shared = shared

    async def file(self, file_id: str, param: str = "file_id") -> StoredFile:
        """A file of this ingress's folder. Raises RequestError not_found; where another folder has
        it, that says so."""
        file = await asyncio.to_thread(self.files.get, file_id)
        if file is not None:
            return file
        holder = None
        if self._shared is not None:
            holder = await self._shared.holder_of(file_id, self.principal)
        if holder is None:
            raise not_found("file", file_id, param)
        raise not_found(
            "file",
            file_id,
            param,
            f" in the data_dir of this ingress; ingress {holder} has it: data_dir must be one "
            "folder that all ingresses share (a file system that all their nodes mount)",
        )

    async def keep_file(self, file: StoredFile) -> None:
        """Let other ingresses know that this one has a new file."""
        if self._shared is not None:
            ends_s = time.time() if file.expires_at is None else file.expires_at
            await self._shared.note_file(file.id, self.principal, ends_s - time.time())

    async def delete_file(self, file: StoredFile) -> None:
        await asyncio.to_thread(self.files.delete, file)
        if self._shared is not None:
            await self._shared.forget_file(file.id)

    async def created(self, spec: BatchSpec) -> None:
        """Let other ingresses know of a new batch."""
        if self._shared is not None:
            await self._shared.created(spec)

    async def known(self, batch_id: str) -> StoredBatch | SharedBatch | None:
        """A batch of any folder. Raises ServiceError state_unavailable."""
        own = await asyncio.to_thread(self.batches.get, batch_id)
        if own is not None or self._shared is None:
            return own
        return await self._shared.get(batch_id, self.principal)

    async def batch(self, batch_id: str) -> StoredBatch | SharedBatch:
        """The same. Raises RequestError not_found, too."""
        found = await self.known(batch_id)
        if found is None:
            raise not_found("batch", batch_id, "batch_id")
        return found

    async def cancel(self, batch: StoredBatch | SharedBatch) -> None:
        """Have its executor end a batch. Raises ServiceError state_unavailable."""
        if isinstance(batch, StoredBatch):
            await asyncio.to_thread(batch.cancel)
        else:
            assert self._shared is not None, "it came from there"
            await self._shared.cancel(batch.spec.id)

    async def list(self, page: Page) -> dict[str, Any]:
        """One page of the batches of all folders; of this one alone, while the store is away."""
        own = {each.spec.id: each for each in await asyncio.to_thread(self.batches.list)}
        created = {batch_id: each.spec.created_at for batch_id, each in own.items()}
        if self._shared is not None:
            try:
                others = await self._shared.ids(self.principal)
            except ServiceError:
                others = []
            created = {batch_id: at for at, batch_id in others} | created
        ids = sorted(created, key=lambda each: (created[each], each))
        selected, has_more = page.of(ids)
        bodies = []
        for batch_id in selected:
            batch = own.get(batch_id) or await self.known(batch_id)
            if batch is not None:  # else it has expired
                bodies.append(await shown(batch))
        return list_body(bodies, has_more)


async def shown(batch: StoredBatch | SharedBatch) -> dict[str, Any]:
    """The body of a batch."""
    if isinstance(batch, StoredBatch):
        return batch_body(batch.spec, await asyncio.to_thread(batch.state))
    return batch_body(batch.spec, batch.state)
