"""POST /v1/chat/completions and /v1/completions, and GET /v1/penstock/streams.

The first two are fast paths: EdgeMiddleware calls their endpoints directly. FastAPI has the same
routes, for the OpenAPI document and for other methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.http.asgi import App, Receive, Scope, Send, read_json_body
from penstock.deployments.ingress.http.ignored_fields import FieldPolicy, IgnoredFields
from penstock.deployments.ingress.http.journalled import NOT_RESUMABLE, JournalledCalls
from penstock.deployments.ingress.http.middleware import context_of
from penstock.deployments.ingress.http.openai.answers import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    JournalledEndpoint,
    answer,
    prepared,
)
from penstock.deployments.ingress.http.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
)
from penstock.deployments.ingress.http.openai.schemas import (
    SCHEMA_REF,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ErrorBody,
    error_responses,
    request_schema,
)

SCHEMAS: list[type[BaseModel]] = [ChatCompletionRequest, CompletionRequest, ChatCompletionChunk]
_RESUME_PARAMETERS = [
    {"name": "Last-Event-ID", "in": "header", "schema": {"type": "string"}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
]


def add_openai_routes(
    app: FastAPI, core: RequestCore, calls: JournalledCalls | None, policy: FieldPolicy
) -> None:
    """The routes that the OpenAPI document describes. See `fast_paths`."""
    if calls is not None:
        for path in (CHAT_PATH, COMPLETIONS_PATH):
            calls.add(path, JournalledEndpoint(core, path, policy))

    @app.post(CHAT_PATH, **_documented(ChatCompletionRequest, ChatCompletion))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await _created(core, calls, policy, request.scope, request.receive)

    @app.post(COMPLETIONS_PATH, **_documented(CompletionRequest, Completion))
    async def completions(request: Request) -> Response:
        """Continue one prompt or several."""
        return await _created(core, calls, policy, request.scope, request.receive)

    @app.get(
        "/v1/penstock/streams/{request_id}",
        responses={
            200: {"content": {"text/event-stream": {"schema": _event_schema(ChatCompletionChunk)}}},
            **error_responses(400, 401, 404, 409, 501, 503),
        },
        openapi_extra={"parameters": _RESUME_PARAMETERS},
    )
    async def continue_stream(request: Request, request_id: str) -> Response:
        """The rest of a stream whose connection was lost: what follows the event `Last-Event-ID`,
        or all of it. `request_id`: the header x-request-id of its answer."""
        if calls is None:
            raise ServiceError("no_journal")
        return await calls.resumed(request.scope, request_id)


def fast_paths(
    core: RequestCore, calls: JournalledCalls | None = None, policy: FieldPolicy | None = None
) -> Mapping[str, App]:
    """The endpoints of POST by path. `policy` None: unknown fields are refused."""

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        await (await _created(core, calls, policy, scope, receive))(scope, receive, send)

    return {CHAT_PATH: endpoint, COMPLETIONS_PATH: endpoint}


async def _created(
    core: RequestCore,
    calls: JournalledCalls | None,
    policy: FieldPolicy | None,
    scope: Scope,
    receive: Receive,
) -> Response:
    """The answer to a POST. Raises RequestError, ServiceError or ClientGone."""
    content = await read_json_body(scope, receive)
    if calls is not None:
        return await calls.created(scope, content)
    left_out = IgnoredFields(policy)
    request = await prepared(core, scope["path"], content, context_of(scope), left_out)
    return answer(core, request, headers=NOT_RESUMABLE if request.body.stream else None)


def _documented(body: type[BaseModel], answer: type[BaseModel]) -> dict[str, Any]:
    """How a generation route is documented."""
    chunk = ChatCompletionChunk if answer is ChatCompletion else answer
    return {
        "response_model": answer,
        "responses": {
            200: {"content": {"text/event-stream": {"schema": _event_schema(chunk)}}},
            **error_responses(400, 401, 404, 413, 415, 429, 500, 503, 504),
        },
        "openapi_extra": request_schema(body),
    }


def _event_schema(chunk: type[BaseModel]) -> dict[str, Any]:
    """One event of a stream: its data is a chunk or an error as JSON, or the end marker."""
    models = [{"$ref": SCHEMA_REF.format(model=each.__name__)} for each in (chunk, ErrorBody)]
    as_json = {"contentMediaType": "application/json", "contentSchema": {"anyOf": models}}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, as_json]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}
