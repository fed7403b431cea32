"""The routes of OpenAI's Responses API: create, count tokens, look up, cancel, delete.

requests.py and schemas.py have the shapes, answers.py and background.py the answers.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from penstock.deployments.ingress.core.call import CallContext
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.http.asgi import (
    App,
    Headers,
    Receive,
    Scope,
    Send,
    read_json_body,
)
from penstock.deployments.ingress.http.events import RESPONSES_PATH
from penstock.deployments.ingress.http.ignored_fields import FieldPolicy
from penstock.deployments.ingress.http.journalled import RESUMABLE, JournalledCalls
from penstock.deployments.ingress.http.middleware import context_of
from penstock.deployments.ingress.http.openai.schemas import error_responses, request_schema
from penstock.deployments.ingress.http.responses.answers import PreparedResponse
from penstock.deployments.ingress.http.responses.background import BackgroundResponses
from penstock.deployments.ingress.http.responses.items import items_of
from penstock.deployments.ingress.http.responses.keeper import PREFIX, Keeper
from penstock.deployments.ingress.http.responses.kept import Kept
from penstock.deployments.ingress.http.responses.queries import (
    MAX_LISTED,
    check_query,
    list_query,
)
from penstock.deployments.ingress.http.responses.requests import ResponsesRequest
from penstock.deployments.ingress.http.responses.schemas import (
    Deleted,
    InputItems,
    InputTokens,
    ResponseBody,
)
from penstock.deployments.ingress.journal.records import Head
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


def add_response_routes(
    app: FastAPI, core: RequestCore, calls: JournalledCalls | None, policy: FieldPolicy
) -> None:
    """`calls`: those with a journal; None: there are none, and this process keeps responses."""
    service = _ResponseService(core, calls, policy)

    @app.post(
        RESPONSES_PATH,
        response_model=ResponseBody,
        responses={
            **error_responses(400, 401, 404, 413, 415, 429, 500, 503, 504),
            200: {"content": {"text/event-stream": {}}},
        },
        openapi_extra=request_schema(ResponsesRequest),
    )
    async def create_response(request: Request) -> Response:
        """Answer, and keep the response for later calls to go on from."""
        return await service.create(request)

    @app.post(
        f"{RESPONSES_PATH}/input_tokens",
        response_model=InputTokens,
        responses=error_responses(400, 401, 404, 413, 415, 503),
        openapi_extra=request_schema(ResponsesRequest),
    )
    async def count_input_tokens(request: Request) -> Response:
        """How many tokens the model would read, of the same body as for a response."""
        content = await read_json_body(request.scope, request.receive)
        return await service.answerer.count_tokens(content, context_of(request.scope))

    @app.get(
        _ONE,
        response_model=ResponseBody,
        responses={
            **error_responses(400, 401, 404, 503),
            200: {"content": {"text/event-stream": {}}},
        },
        openapi_extra={"parameters": _QUERY},
    )
    async def get_response(request: Request, response_id: str) -> Response:
        """A response as it is now, or (?stream=true&starting_after=N) its events."""
        streams, after = check_query(request.query_params)
        if streams:
            return await service.stream(request, response_id, after)
        return JSONResponse((await service.find(request, response_id)).body)

    @app.get(
        f"{_ONE}/input_items",
        response_model=InputItems,
        responses=error_responses(400, 401, 404, 503),
        openapi_extra={"parameters": _LIST_QUERY},
    )
    async def list_input_items(request: Request, response_id: str) -> Response:
        """The whole conversation that led to a response, the newest first."""
        kept = await service.find(request, response_id)
        asked = list_query(request.query_params)
        items = items_of(kept.messages[: kept.num_input], kept.request_id)
        return JSONResponse(asked.page(items))

    @app.post(
        f"{_ONE}/cancel", response_model=ResponseBody, responses=error_responses(400, 401, 404, 503)
    )
    async def cancel_response(request: Request, response_id: str) -> Response:
        """End a response that runs in the background."""
        kept = await service.find(request, response_id)
        if not kept.is_background:
            raise RequestError(
                "only a response that was made with background: true can be cancelled",
                param="response_id",
            )
        await service.background.cancel(kept)
        return JSONResponse((await service.find(request, response_id)).body)

    @app.delete(_ONE, response_model=Deleted, responses=error_responses(401, 404, 503))
    async def delete_response(request: Request, response_id: str) -> Response:
        """Forget a response; one that still runs is cancelled."""
        kept = await service.find(request, response_id)
        await service.background.delete(kept)
        return JSONResponse({"id": kept.body["id"], "object": "response", "deleted": True})


def fast_path(core: RequestCore, policy: FieldPolicy | None = None) -> App:
    """POST of responses as a plain ASGI app, for calls from within the process.

    Its responses are kept apart from those that clients made, and nothing reads them again.
    """
    service = _ResponseService(core, None, policy)

    async def create(scope: Scope, receive: Receive, send: Send) -> None:
        await (await service.create(Request(scope, receive)))(scope, receive, send)

    return create


class _ResponseService:
    """What the routes share; the Endpoint of journalled.py at /v1/responses."""

    def __init__(
        self, core: RequestCore, calls: JournalledCalls | None, policy: FieldPolicy | None
    ):
        journals = None if calls is None else calls.journals
        self.background = BackgroundResponses(core, Keeper(journals), journals, policy)
        self.answerer = self.background.answerer
        self._calls = calls
        if calls is not None:
            calls.add(RESPONSES_PATH, self)
            calls.journals.background.start(self.background)

    async def create(self, request: Request) -> Response:
        content = await read_json_body(request.scope, request.receive)
        if self._calls is not None:
            return await self._calls.created(request.scope, content)
        call = await self.prepare(content, context_of(request.scope), None)
        return await call.answer(None, [])

    async def prepare(
        self, content: bytes, context: CallContext, head: Head | None
    ) -> PreparedResponse:
        return await self.answerer.prepare(content, context, head)

    async def attached(
        self, call_id: str, principal: str, after: int, headers: Headers
    ) -> Response | None:
        """What goes on in the background is followed, and not taken over."""
        try:
            kept = await self.background.find(f"{PREFIX}{call_id}", principal, "request_id")
        except RequestError:
            return None
        if not kept.is_background:
            return None
        if kept.streams:
            return await self.background.stream(kept, after, headers)
        as_text = {name.decode(): value.decode() for name, value in headers}
        return JSONResponse(kept.body, headers=as_text)

    async def find(self, request: Request, response_id: str) -> Kept:
        principal = request.scope["state"]["principal"]
        return await self.background.find(response_id, principal, "response_id")

    async def stream(self, request: Request, response_id: str, after: int) -> Response:
        """The events of a response after number `after`.

        What runs in the background is followed; another stream is taken over, if it has a journal.
        """
        if self._calls is None or not response_id.startswith(PREFIX):
            kept = await self.find(request, response_id)
        else:
            try:
                kept = await self.find(request, response_id)
            except RequestError:  # a stream that has not ended is kept nowhere but in its journal
                call_id = response_id.removeprefix(PREFIX)
                return await self._calls.resumed(request.scope, call_id, after)
        if kept.is_background and kept.streams:
            headers = [] if self._calls is None else RESUMABLE
            return await self.background.stream(kept, after, headers)
        if self._calls is not None and not kept.is_background:
            try:
                return await self._calls.resumed(request.scope, kept.request_id, after)
            except RequestError as error:
                if error.code != "not_found":
                    raise
        raise RequestError(
            "only a response that was made with stream: true, and without a state store with "
            "background: true too, can be streamed again",
            param="stream",
        )
