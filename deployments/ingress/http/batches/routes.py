"""/v1/files and /v1/batches of OpenAI's API, over the data folder of this server.

Every call works on files (deployments/batch/), so each ingress that shares the folder can answer
it. The executor runs the batches; no call waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel

from penstock.deployments.batch.batch_store import (
    KEPT_S,
    BatchSpec,
    BatchStore,
    OwnerBatches,
    StoredBatch,
    new_batch_id,
)
from penstock.deployments.batch.file_store import FileStore, OwnerFiles, StoredFile
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.http.asgi import header, read_json_body
from penstock.deployments.ingress.http.batches.creation import created, not_found, once
from penstock.deployments.ingress.http.batches.schemas import (
    BatchBody,
    BatchList,
    CreateBatchRequest,
    FileBody,
    FileDeleted,
    FileList,
    batch_body,
    file_body,
    parse_create,
)
from penstock.deployments.ingress.http.batches.upload import read_upload
from penstock.deployments.ingress.http.body import refuse_unless_neutral
from penstock.deployments.ingress.http.openai.schemas import error_responses, request_schema
from penstock.deployments.ingress.journal.idempotency import (
    IdempotencyKeys,
    Key,
    checked_key,
    fingerprint_of_json,
)
from penstock.workers.request import RequestError

SCHEMAS: list[type[BaseModel]] = [CreateBatchRequest]
FILES_PATH, BATCHES_PATH = "/v1/files", "/v1/batches"
MAX_FILES_LISTED, MAX_BATCHES_LISTED = 10_000, 100
_UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "contentMediaType": "application/jsonl"},
                        "purpose": {"const": "batch"},
                        "expires_after[anchor]": {"const": "created_at"},
                        "expires_after[seconds]": {"type": "integer"},
                    },
                }
            }
        },
    }
}

T = TypeVar("T")


def add_batch_routes(app: FastAPI, folder: Path | None, keys: IdempotencyKeys | None) -> None:
    """`folder`: the data folder; None: every route answers `not_configured`.

    `keys`: of requests that create batches; None: they have no effect.
    """
    stores = _Stores(folder)
    _add_file_routes(app, stores)
    _add_batch_routes(app, stores, keys)


class _Stores:
    """The stores, and in them the files and batches of the caller."""

    def __init__(self, folder: Path | None):
        self._files = None if folder is None else FileStore(folder)
        self._batches = None if folder is None else BatchStore(folder)

    def files(self, request: Request) -> OwnerFiles:
        """The files of the caller's API key. Raises ServiceError."""
        if self._files is None:
            raise ServiceError("not_configured")
        return self._files.of(request.scope["state"]["principal"])

    def batches(self, request: Request) -> OwnerBatches:
        if self._batches is None:
            raise ServiceError("not_configured")
        return self._batches.of(request.scope["state"]["principal"])


def _add_file_routes(app: FastAPI, stores: _Stores) -> None:
    @app.post(
        FILES_PATH,
        response_model=FileBody,
        responses=error_responses(400, 401, 404, 413, 415),
        openapi_extra=_UPLOAD,
    )
    async def create_file(request: Request) -> Response:
        """Upload the input of a batch: multipart, with `file` and `purpose` = batch."""
        files = stores.files(request)
        return JSONResponse(file_body(await read_upload(request.scope, request.receive, files)))

    @app.get(FILES_PATH, response_model=FileList, responses=error_responses(400, 401, 404))
    async def list_files(request: Request) -> Response:
        """The files of the key's tenant, the newest first."""
        files, query = stores.files(request), request.query_params
        page = _page_of(query, MAX_FILES_LISTED, MAX_FILES_LISTED, ("purpose",))
        purpose = query.get("purpose")
        known = await asyncio.to_thread(files.list)
        found = [each for each in known if purpose in (None, each.purpose)]
        return JSONResponse(page(found, file_body))

    one = f"{FILES_PATH}/{{file_id}}"

    @app.get(one, response_model=FileBody, responses=error_responses(401, 404))
    async def get_file(request: Request, file_id: str) -> Response:
        """The record of a file."""
        return JSONResponse(file_body(await _file(stores.files(request), file_id)))

    @app.get(
        f"{one}/content",
        response_class=Response,
        responses={
            200: {"content": {"application/octet-stream": {}}},
            **error_responses(401, 404),
        },
    )
    async def get_file_content(request: Request, file_id: str) -> Response:
        """The bytes of a file."""
        files = stores.files(request)
        path = files.path(await _file(files, file_id))
        return FileResponse(path, media_type="application/octet-stream")

    @app.delete(one, response_model=FileDeleted, responses=error_responses(401, 404))
    async def delete_file(request: Request, file_id: str) -> Response:
        """Remove a file. A batch over it continues."""
        files = stores.files(request)
        await asyncio.to_thread(files.delete, await _file(files, file_id))
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def _add_batch_routes(app: FastAPI, stores: _Stores, keys: IdempotencyKeys | None) -> None:
    @app.post(
        BATCHES_PATH,
        response_model=BatchBody,
        responses=error_responses(400, 401, 404, 413, 415, 422, 429, 503),
        openapi_extra=request_schema(CreateBatchRequest),
    )
    async def create_batch(request: Request) -> Response:
        """Create a batch over an uploaded file of requests."""
        files, batches = stores.files(request), stores.batches(request)
        body = await read_json_body(request.scope, request.receive)
        requested = parse_create(body)
        created_at, window_s = int(time.time()), requested.window_s
        file = await _file(files, requested.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise RequestError(
                f"input_file_id: that file's purpose is {file.purpose}; it must be batch",
                param="input_file_id",
            )
        principal = request.scope["state"]["principal"]
        expiry = requested.output_expires_after
        spec = BatchSpec(
            id=new_batch_id(),
            principal=principal,
            endpoint=requested.endpoint,
            input_file_id=file.id,
            completion_window=requested.completion_window,
            created_at=created_at,
            expires_at=created_at + window_s,
            metadata=requested.metadata,
            output_ttl_s=KEPT_S if expiry is None else expiry.seconds,
        )
        key = header(request.scope, b"idempotency-key")
        if key is None or keys is None:
            batch = await created(batches, spec, files.path(file))
            return JSONResponse(await asyncio.to_thread(batch_body, batch))
        digest = fingerprint_of_json(BATCHES_PATH, body)
        named = Key(principal, BATCHES_PATH, checked_key(key), digest)
        batch, headers = await once(keys, named, batches, spec, files.path(file))
        return JSONResponse(await asyncio.to_thread(batch_body, batch), headers=headers)

    @app.get(BATCHES_PATH, response_model=BatchList, responses=error_responses(400, 401, 404))
    async def list_batches(request: Request) -> Response:
        """The batches of the key's tenant, the newest first."""
        batches = stores.batches(request)
        page = _page_of(request.query_params, 20, MAX_BATCHES_LISTED)
        known = await asyncio.to_thread(batches.list)
        return JSONResponse(await asyncio.to_thread(page, known, batch_body))

    one = f"{BATCHES_PATH}/{{batch_id}}"

    @app.get(one, response_model=BatchBody, responses=error_responses(401, 404))
    async def get_batch(request: Request, batch_id: str) -> Response:
        """The progress of a batch."""
        batch = await _batch(stores.batches(request), batch_id)
        return JSONResponse(await asyncio.to_thread(batch_body, batch))

    @app.post(f"{one}/cancel", response_model=BatchBody, responses=error_responses(400, 401, 404))
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        """End a batch: no further request begins, and those that run have 10 s to finish."""
        batch = await _batch(stores.batches(request), batch_id)
        state = await asyncio.to_thread(batch.state)
        if state.status.is_final:
            raise RequestError(
                f"the batch is {state.status.value} and cannot be cancelled", param="batch_id"
            )
        await asyncio.to_thread(batch.cancel)
        return JSONResponse(await asyncio.to_thread(batch_body, batch))


async def _file(files: OwnerFiles, file_id: str, param: str = "file_id") -> StoredFile:
    file = await asyncio.to_thread(files.get, file_id)
    if file is None:
        raise not_found("file", file_id, param)
    return file


async def _batch(batches: OwnerBatches, batch_id: str) -> StoredBatch:
    batch = await asyncio.to_thread(batches.get, batch_id)
    if batch is None:
        raise not_found("batch", batch_id, "batch_id")
    return batch


Page = Callable[[Sequence[T], Callable[[T], dict[str, Any]]], dict[str, Any]]


def _page_of(
    query: Mapping[str, str], default: int, most: int, others: Sequence[str] = ()
) -> Page[Any]:
    """A function from items (the oldest first) to the body of the list that `query` selects.

    Raises RequestError.
    """
    for name, value in query.items():
        if name not in ("limit", "order", "after", *others):
            refuse_unless_neutral(ascii(name[:100])[1:-1], value, ())
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= most):
        raise RequestError(f"limit must lie in [1, {most}]", param="limit")
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise RequestError("order must be asc or desc", param="order")

    def page(items: Sequence[Any], render: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        bodies = [render(each) for each in items]
        if order == "desc":
            bodies.reverse()
        if after is not None:
            ids = [each["id"] for each in bodies]
            if after not in ids:
                raise RequestError("after names none of these items", param="after")
            bodies = bodies[ids.index(after) + 1 :]
        shown = bodies[: int(limit)]
        return {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(bodies) > len(shown),
        }

    return page
