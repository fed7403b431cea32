"""/v1/files and /v1/batches of OpenAI's API, over the data folder of this server.

Every call works on files (deployments/batch/), so each ingress that shares the folder can answer
it; one with another folder answers for batches from the state store. The executor runs the batches;
no call waits for it.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel

from penstock.deployments.batch.batch_store import KEPT_S, BatchSpec, BatchStatus, new_batch_id
from penstock.deployments.ingress.http.asgi import header, read_json_body
from penstock.deployments.ingress.http.batches.creation import REPLAYED, created, once
from penstock.deployments.ingress.http.batches.directory import (
    CallerDirectory,
    Directory,
    shown,
)
from penstock.deployments.ingress.http.batches.paging import list_body, page_of
from penstock.deployments.ingress.http.batches.schemas import (
    BatchBody,
    BatchList,
    CreateBatchRequest,
    FileBody,
    FileDeleted,
    FileList,
    file_body,
    parse_create,
)
from penstock.deployments.ingress.http.batches.upload import read_upload
from penstock.deployments.ingress.http.openai.schemas import error_responses, request_schema
from penstock.deployments.ingress.journal.idempotency import (
    Key,
    checked_key,
    fingerprint_of_json,
)
from penstock.deployments.ingress.journal.journals import Journals
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


def add_batch_routes(app: FastAPI, folder: Path | None, journals: Journals | None) -> None:
    """`folder`: the data folder; None: every route answers `not_configured`.

    `journals`: for idempotency keys, and for batches of other folders; None: there are neither.
    """
    directory = Directory(folder, None if journals is None else journals.batches)
    _add_file_routes(app, directory)
    _add_batch_routes(app, directory, journals)


def _add_file_routes(app: FastAPI, directory: Directory) -> None:
    @app.post(
        FILES_PATH,
        response_model=FileBody,
        responses=error_responses(400, 401, 404, 413, 415),
        openapi_extra=_UPLOAD,
    )
    async def create_file(request: Request) -> Response:
        """Upload the input of a batch: multipart, with `file` and `purpose` = batch."""
        own = directory.of(request)
        file = await read_upload(request.scope, request.receive, own.files)
        await own.keep_file(file)
        return JSONResponse(file_body(file))

    @app.get(FILES_PATH, response_model=FileList, responses=error_responses(400, 401, 404))
    async def list_files(request: Request) -> Response:
        """The files of the key's tenant, the newest first."""
        own, query = directory.of(request), request.query_params
        page = page_of(query, MAX_FILES_LISTED, MAX_FILES_LISTED, ("purpose",))
        purpose = query.get("purpose")
        known = await asyncio.to_thread(own.files.list)
        found = {each.id: each for each in known if purpose in (None, each.purpose)}
        ids, has_more = page.of(list(found))
        return JSONResponse(list_body([file_body(found[each]) for each in ids], has_more))

    one = f"{FILES_PATH}/{{file_id}}"

    @app.get(one, response_model=FileBody, responses=error_responses(401, 404))
    async def get_file(request: Request, file_id: str) -> Response:
        """The record of a file."""
        return JSONResponse(file_body(await directory.of(request).file(file_id)))

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
        own = directory.of(request)
        path = own.files.path(await own.file(file_id))
        return FileResponse(path, media_type="application/octet-stream")

    @app.delete(one, response_model=FileDeleted, responses=error_responses(401, 404))
    async def delete_file(request: Request, file_id: str) -> Response:
        """Remove a file. A batch over it continues."""
        own = directory.of(request)
        await own.delete_file(await own.file(file_id))
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def _add_batch_routes(app: FastAPI, directory: Directory, journals: Journals | None) -> None:
    @app.post(
        BATCHES_PATH,
        response_model=BatchBody,
        responses=error_responses(400, 401, 404, 413, 415, 422, 429, 503),
        openapi_extra=request_schema(CreateBatchRequest),
    )
    async def create_batch(request: Request) -> Response:
        """Create a batch over an uploaded file of requests."""
        own = directory.of(request)
        body = await read_json_body(request.scope, request.receive)
        requested = parse_create(body)
        key = header(request.scope, b"idempotency-key")
        if key is None or journals is None:
            spec, content = await _spec(requested, own)
            batch = await created(own.batches, spec, content)
            await own.created(spec)
            return JSONResponse(await shown(batch))
        digest = fingerprint_of_json(BATCHES_PATH, body)
        named = Key(own.principal, BATCHES_PATH, checked_key(key), digest)
        # Before its file is looked for: that may be in another folder, or deleted.
        known = await journals.keys.find(named)
        found = None if known is None else await own.known(known)
        if found is not None:
            return JSONResponse(await shown(found), headers=REPLAYED)
        spec, content = await _spec(requested, own)
        made, headers = await once(journals.keys, named, own.batches, spec, content, own.known)
        if not headers:
            await own.created(made.spec)
        return JSONResponse(await shown(made), headers=headers)

    @app.get(BATCHES_PATH, response_model=BatchList, responses=error_responses(400, 401, 404))
    async def list_batches(request: Request) -> Response:
        """The batches of the key's tenant, the newest first."""
        own = directory.of(request)
        return JSONResponse(await own.list(page_of(request.query_params, 20, MAX_BATCHES_LISTED)))

    one = f"{BATCHES_PATH}/{{batch_id}}"

    @app.get(one, response_model=BatchBody, responses=error_responses(401, 404, 503))
    async def get_batch(request: Request, batch_id: str) -> Response:
        """The progress of a batch."""
        return JSONResponse(await shown(await directory.of(request).batch(batch_id)))

    @app.post(
        f"{one}/cancel", response_model=BatchBody, responses=error_responses(400, 401, 404, 503)
    )
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        """End a batch: no further request begins, and those that run have 10 s to finish."""
        own = directory.of(request)
        status = (await shown(await own.batch(batch_id)))["status"]
        if BatchStatus(status).is_final:
            raise RequestError(f"the batch is {status} and cannot be cancelled", param="batch_id")
        await own.cancel(await own.batch(batch_id))
        return JSONResponse(await shown(await own.batch(batch_id)))


async def _spec(requested: CreateBatchRequest, own: CallerDirectory) -> tuple[BatchSpec, Path]:
    """The settings of a new batch, and the content of its file. Raises RequestError."""
    created_at, expiry = int(time.time()), requested.output_expires_after
    expires_at = created_at + requested.window_s
    file = await own.file(requested.input_file_id, "input_file_id")
    if file.purpose != "batch":
        raise RequestError(
            f"input_file_id: that file's purpose is {file.purpose}; it must be batch",
            param="input_file_id",
        )
    spec = BatchSpec(
        id=new_batch_id(),
        principal=own.principal,
        endpoint=requested.endpoint,
        input_file_id=file.id,
        completion_window=requested.completion_window,
        created_at=created_at,
        expires_at=expires_at,
        metadata=requested.metadata,
        output_ttl_s=KEPT_S if expiry is None else expiry.seconds,
    )
    return spec, own.files.path(file)
