"""New batches, also where a client asks for the same one again (Idempotency-Key)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from penstock.deployments.batch.batch_store import (
    BatchSpec,
    OwnerBatches,
    StoredBatch,
    TooManyBatches,
)
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.journal.batches import SharedBatch
from penstock.deployments.ingress.journal.idempotency import IdempotencyKeys, Key
from penstock.workers.request import RequestError

REPLAYED = {"idempotent-replayed": "true"}


async def created(batches: OwnerBatches, spec: BatchSpec, content: Path) -> StoredBatch:
    """A new batch. Raises RequestError or ServiceError."""
    try:
        return await asyncio.to_thread(batches.create, spec, content)
    except TooManyBatches as error:
        raise ServiceError("over_share", str(error)) from None
    except FileExistsError:  # the same request creates it at this moment
        raise ServiceError("overloaded") from None
    except FileNotFoundError:
        raise not_found("file", spec.input_file_id, "input_file_id") from None


async def once(
    keys: IdempotencyKeys,
    key: Key,
    batches: OwnerBatches,
    spec: BatchSpec,
    content: Path,
    find: Callable[[str], Awaitable[StoredBatch | SharedBatch | None]],
) -> tuple[StoredBatch | SharedBatch, dict[str, str]]:
    """The batch that `key` stands for, as it is now, and headers; a new one, where there is none.

    `find`: a batch that has been created, by its id. Raises RequestError or ServiceError.
    """
    known = await keys.claim(key, spec.id)
    if known is not None:
        batch = await find(known)
        if batch is not None:
            return batch, REPLAYED
        spec = replace(spec, id=known)  # the process that claimed it ended before it was created
    try:
        return await created(batches, spec, content), {}
    except (RequestError, ServiceError) as error:
        if error.code != "overloaded":
            await keys.release(key)
        raise


def not_found(noun: str, shown: str, param: str, more: str = "") -> RequestError:
    """`more`: of the message."""
    return RequestError(f"there is no {noun} {shown[:100]!a}{more}", param=param, code="not_found")
