"""The routes of OpenAI's Responses API: create, look up, cancel, delete.

requests.py and draft.py have the shapes; the ResponseStore keeps the bounds.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from penstock.deployments.ingress.core.call import Call
from penstock.deployments.ingress.core.errors import describe
from penstock.deployments.ingress.core.generation import Generation
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.http.asgi import (
    App,
    Receive,
    Scope,
    Send,
    StreamingAnswer,
    read_json_body,
)
from penstock.deployments.ingress.http.body import renamed_fields
from penstock.deployments.ingress.http.events import RESPONSES_PATH, server_sent
from penstock.deployments.ingress.http.middleware import context_of
from penstock.deployments.ingress.http.openai.schemas import error_responses, request_schema
from penstock.deployments.ingress.http.responses.draft import (
    Deleted,
    InputItems,
    ResponseBody,
    ResponseBuilder,
)
from penstock.deployments.ingress.http.responses.items import Message, items_of
from penstock.deployments.ingress.http.responses.requests import (
    MAX_LISTED,
    ResponsesRequest,
    check_query,
    list_query,
    parse,
)
from penstock.deployments.ingress.http.responses.store import ResponseStore, StoredResponse
from penstock.workers.request import RequestError

SCHEMAS: list[type[BaseModel]] = [ResponsesRequest]
_ONE = f"{RESPONSES_PATH}/{{response_id}}"
_QUERY = [
    {"name": "stream", "in": "query", "schema": {"type": "boolean"}},
    {"name": "starting_after", "in": "query", "schema": {"type": "integer", "minimum": 0}},
]
_LIST_QUERY = [
    {
        "name": "limit",
        "in": "query",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": 20},
    },
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"], "default": "desc"}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
]


def add_response_routes(app: FastAPI, core: RequestCore) -> None:
    service = _ResponseService(core, ResponseStore())

    @app.post(
        RESPONSES_PATH,
        response_model=ResponseBody,
        responses={
            **error_responses(400, 401, 404, 413, 415, 500, 503, 504),
            200: {"content": {"text/event-stream": {}}},
        },
        openapi_extra=request_schema(ResponsesRequest),
    )
    async def create_response(request: Request) -> Response:
        """Answer, and keep the response for later calls to go on from."""
        return await service.create(request)

    @app.get(
        _ONE,
        response_model=ResponseBody,
        responses={**error_responses(400, 401, 404), 200: {"content": {"text/event-stream": {}}}},
        openapi_extra={"parameters": _QUERY},
    )
    async def get_response(request: Request, response_id: str) -> Response:
        """A response as it is now, or (?stream=true&starting_after=N) its events."""
        entry = service.find(request, response_id)
        streams, after = check_query(request.query_params)
        if not streams:
            return JSONResponse(entry.draft.body())
        if entry.frames is None:
            raise RequestError(
                "only a response that was made with background: true and stream: true can be "
                "streamed again",
                param="stream",
            )
        return service.streamed(entry.follow(after))

    @app.get(
        f"{_ONE}/input_items",
        response_model=InputItems,
        responses=error_responses(400, 401, 404),
        openapi_extra={"parameters": _LIST_QUERY},
    )
    async def list_input_items(request: Request, response_id: str) -> Response:
        """The whole conversation that led to a response, the newest first."""
        entry = service.find(request, response_id)
        asked = list_query(request.query_params)
        items = items_of(entry.messages[: entry.num_input], entry.request_id)
        return JSONResponse(asked.page(items))

    @app.post(
        f"{_ONE}/cancel", response_model=ResponseBody, responses=error_responses(400, 401, 404)
    )
    async def cancel_response(request: Request, response_id: str) -> Response:
        """End a response that runs in the background."""
        entry = service.find(request, response_id)
        if entry.task is None:
            raise RequestError(
                "only a response that was made with background: true can be cancelled",
                param="response_id",
            )
        await service.cancel(entry)
        return JSONResponse(entry.draft.body())

    @app.delete(_ONE, response_model=Deleted, responses=error_responses(401, 404))
    async def delete_response(request: Request, response_id: str) -> Response:
        """Forget a response; one that still runs is cancelled."""
        entry = service.find(request, response_id)
        await service.cancel(entry)
        service.store.remove(entry)
        return JSONResponse({"id": entry.draft.id, "object": "response", "deleted": True})


def fast_path(core: RequestCore) -> App:
    """POST of responses as a plain ASGI app, for calls from within the process.

    Its responses are kept apart from those that clients made, and nothing reads them again.
    """
    service = _ResponseService(core, ResponseStore())

    async def create(scope: Scope, receive: Receive, send: Send) -> None:
        await (await service.create(Request(scope, receive)))(scope, receive, send)

    return create


class _ResponseService:
    def __init__(self, core: RequestCore, store: ResponseStore):
        self._core = core
        self.store = store
        self._num_errors_returned = core.metrics.num_errors_returned

    async def create(self, request: Request) -> Response:
        asked = parse(await read_json_body(request.scope, request.receive))
        context = context_of(request.scope)
        messages = asked.messages(self._before(asked, context.principal))
        params, prompt = asked.params(), asked.prompt(messages)
        call = Call(prompt, params, asked.options(), context)
        with renamed_fields({"max_tokens": "max_output_tokens", "messages": "input"}):
            generation = await self._core.prepare(call)
        draft = ResponseBuilder(
            call.context.request_id, self._core.model(call.options.model).name, asked
        )
        entry = StoredResponse(
            draft,
            call.context.principal,
            messages,
            request_id=call.context.request_id,
            num_input=len(messages),
            texts=(
                asked.instructions or "",
                json.dumps(asked.echoed_fields()),
                *itertools.chain(*(asked.metadata or {}).items()),
            ),
            frames=[] if asked.background and asked.stream else None,
        )
        keeps = asked.store is not False
        if not asked.background:
            if asked.stream:
                return self.streamed(self._events(generation, entry, keeps=keeps))
            return StreamingAnswer(
                self._body(generation, entry, keeps=keeps), self._num_errors_returned
            )
        self.store.check_room()
        # Nothing is awaited between the check and the task, so no other call comes between.
        entry.tell(_frames(draft.created()))
        entry.task = asyncio.create_task(self._go_on(generation, entry))
        self.store.put(entry)
        return self.streamed(entry.follow(-1)) if asked.stream else JSONResponse(draft.body())

    def streamed(self, events: AsyncGenerator[bytes, None]) -> StreamingAnswer:
        return StreamingAnswer(events, self._num_errors_returned)

    def find(self, request: Request, response_id: str) -> StoredResponse:
        return self._find(response_id, request.scope["state"]["principal"], "response_id")

    async def cancel(self, entry: StoredResponse) -> None:
        """End `entry` if it runs, and wait until it has ended."""
        if entry.task is not None and entry.is_running:
            self._core.cancel(entry.request_id, entry.principal)
            await asyncio.wait((entry.task,))

    async def _body(
        self, generation: Generation, entry: StoredResponse, *, keeps: bool
    ) -> dict[str, Any]:
        async with aclosing(self._core.run(generation)) as pieces:
            async for _, piece in pieces:
                entry.draft.add(piece)
        if keeps:
            self._keep(entry)
        return entry.draft.body()

    async def _events(
        self, generation: Generation, entry: StoredResponse, *, keeps: bool
    ) -> AsyncGenerator[bytes, None]:
        """The answer for a client that waits for it; once it has begun, failures are events."""
        draft = entry.draft
        has_begun = False
        try:
            async with aclosing(self._core.run(generation)) as pieces:
                async for _, piece in pieces:
                    events = [] if has_begun else draft.created()
                    has_begun = True
                    events += draft.add(piece)
                    if draft.is_done and keeps:
                        self._keep(entry)
                    for frame in _frames(events):
                        yield frame
        except Exception as error:
            if not has_begun:
                raise
            for frame in _frames(
                draft.fail(describe(error, entry.request_id, self._num_errors_returned))
            ):
                yield frame

    async def _go_on(self, generation: Generation, entry: StoredResponse) -> None:
        """Generate a response in the background, whether or not a client waits for it."""
        draft = entry.draft
        try:
            async with aclosing(self._core.run(generation)) as pieces:
                async for _, piece in pieces:
                    entry.tell(_frames(draft.add(piece)))
        except Exception as error:
            entry.tell(
                _frames(draft.fail(describe(error, entry.request_id, self._num_errors_returned)))
            )
        if self.store.has(entry):
            self._keep(entry)

    def _keep(self, entry: StoredResponse) -> None:
        entry.messages = (*entry.messages, entry.draft.message())
        self.store.put(entry)

    def _before(self, asked: ResponsesRequest, principal: str) -> tuple[Message, ...]:
        """The conversation that a request goes on from."""
        if asked.previous_response_id is None:
            return ()
        entry = self._find(asked.previous_response_id, principal, "previous_response_id")
        if entry.draft.status not in ("completed", "incomplete"):
            raise RequestError(
                f"the response to go on from is {entry.draft.status}", param="previous_response_id"
            )
        return entry.messages

    def _find(self, response_id: str, principal: str, param: str) -> StoredResponse:
        entry = self.store.get(response_id, principal)
        if entry is None:
            shown = ascii(response_id[:100])
            raise RequestError(
                f"there is no response {shown} here (any more)", param=param, code="not_found"
            )
        return entry


def _frames(events: list[dict[str, Any]]) -> list[bytes]:
    return [server_sent(event, event["type"]) for event in events]
