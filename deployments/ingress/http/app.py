"""The OpenAI-compatible HTTP interface: routes, and how they map to the request core.

Knows nothing of workers or tokens: what a body means is for openai_types, what happens for the
core, and what fails inside is answered by the EdgeMiddleware.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from penstock.deployments.ingress.core.call import Call, TextDelta, TokenUsage
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.generation import Generation
from penstock.deployments.ingress.core.logprobs import num_listed_tokens
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.core.streams import run_off_loop_if_large
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.ingress.http import middleware as asgi
from penstock.deployments.ingress.http import tokenize as http_tokens
from penstock.deployments.ingress.http.anthropic import routes as http_messages
from penstock.deployments.ingress.http.anthropic.routes import add_message_routes
from penstock.deployments.ingress.http.body import renamed_fields
from penstock.deployments.ingress.http.call_context import SCHEMA_REF, about, read_body, takes
from penstock.deployments.ingress.http.console import Workers, add_console_routes
from penstock.deployments.ingress.http.docs_page import CONTENT_SECURITY_POLICY, DOCS_PAGE
from penstock.deployments.ingress.http.errors import server_sent
from penstock.deployments.ingress.http.openai.rendering import ChatRenderer, CompletedChoice
from penstock.deployments.ingress.http.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    parse,
)
from penstock.deployments.ingress.http.openai.schemas import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ErrorBody,
    ModelBody,
    ModelList,
    model_body,
)
from penstock.deployments.ingress.http.openapi import document_of
from penstock.deployments.ingress.http.queue_status import add_queue_route
from penstock.deployments.ingress.http.responses import routes as http_responses
from penstock.deployments.ingress.http.responses.routes import add_response_routes
from penstock.deployments.ingress.http.tokenize import add_token_routes
from penstock.deployments.security.api_keys import ApiKeys
from penstock.workers.request import RequestError

_MORE_ROUTES = (http_messages, http_responses, http_tokens)
_CODE_OF_STATUS = {404: "not_found", 405: "method_not_allowed"}


def build_app(
    core: RequestCore,
    *,
    api_keys: Sequence[str] = (),
    workers: Workers | None = None,
    gate: GateClient | None = None,
    admission: str = "optimistic",
) -> FastAPI:
    """The ASGI app over `core`, for uvicorn or `serve.ingress`.

    With `api_keys` (keys, or 'sha256:' and their hex digests) every path but /health, /live, /ready
    and the console's files wants one of them as a Bearer token. `workers`: all that are alive, as
    they last announced themselves. `gate`: this ingress's end of it, where there is one.
    """
    app = FastAPI(
        title="Penstock",
        version=importlib.metadata.version("penstock"),
        description="Text generation, compatible with OpenAI's clients.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    short_ways: dict[str, asgi.Answerer] = {}
    app.add_middleware(asgi.EdgeMiddleware, keys=ApiKeys(api_keys), short_ways=short_ways)
    app.add_exception_handler(HTTPException, _on_http_exception)
    _add_generation_routes(app, core, short_ways)
    add_message_routes(app, core)
    add_response_routes(app, core)
    add_token_routes(app, core)
    _add_model_routes(app, core, workers)
    add_console_routes(app, core, workers)
    add_queue_route(app, gate, admission)
    _add_service_routes(app, core)
    return app


def _add_generation_routes(
    app: FastAPI, core: RequestCore, short_ways: dict[str, asgi.Answerer]
) -> None:
    """The routes, for the documentation and for other methods, and the short ways to them."""

    @app.post("/v1/chat/completions", **_generates(ChatCompletionRequest, ChatCompletion))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        body = parse(ChatCompletionRequest, await read_body(request))
        call = Call(body.prompt(), body.params(), **body.options(), **about(request))
        newer = body.max_completion_tokens is not None
        with renamed_fields({"max_tokens": "max_completion_tokens"} if newer else {}):
            generations = await core.prepare_choices(call, body.num_choices)
        return _answer(core, body, generations)

    @app.post("/v1/completions", **_generates(CompletionRequest, Completion))
    async def completions(request: Request) -> Response:
        """Continue one prompt or several."""
        body = parse(CompletionRequest, await read_body(request))
        said = about(request)
        prompts, params = body.prompts(), body.params()
        calls = [
            Call(
                prompt,
                params,
                **body.options(),
                **{**said, "request_id": _nth_id(said["request_id"], i, len(prompts))},
            )
            for i, prompt in enumerate(prompts)
        ]
        generations = [
            generation
            for call in calls
            for generation in await core.prepare_choices(call, body.num_choices)
        ]
        return _answer(core, body, generations)

    short_ways["/v1/chat/completions"] = lambda *asked: chat_completions(Request(*asked))
    short_ways["/v1/completions"] = lambda *asked: completions(Request(*asked))


def _add_model_routes(app: FastAPI, core: RequestCore, workers: Workers | None) -> None:
    @app.get("/v1/models", response_model=ModelList)
    async def list_models() -> Response:
        """The models that are served."""
        infos = [info for info, _ in workers()] if workers is not None else []
        bodies = [model_body(model, infos) for model in core.models()]
        return JSONResponse({"object": "list", "data": bodies})

    @app.get("/v1/models/{model:path}", response_model=ModelBody, responses=_errors(404))
    async def get_model(model: str) -> Response:
        """One model."""
        infos = [info for info, _ in workers()] if workers is not None else []
        return JSONResponse(model_body(core.model(model), infos))


def _add_service_routes(app: FastAPI, core: RequestCore) -> None:
    @app.get("/live")
    async def live() -> dict[str, str]:
        """Whether this process answers; says nothing of models."""
        return {"status": "ok"}

    @app.get("/ready", responses=_errors(503))
    async def ready() -> dict[str, str]:
        """Whether a request would be served now."""
        if not core.ready():
            raise ServiceError("no_worker")
        return {"status": "ok"}

    @app.get("/health", responses=_errors(503))
    async def health() -> dict[str, str]:
        """The same as /ready."""
        return await ready()

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The version of this server."""
        return {"version": app.version}

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        policy = {"content-security-policy": CONTENT_SECURITY_POLICY}
        return HTMLResponse(DOCS_PAGE, headers=policy)

    bodies: list[type[BaseModel]] = [ChatCompletionRequest, CompletionRequest, ChatCompletionChunk]
    more = [kind for each in _MORE_ROUTES for kind in each.SCHEMAS]
    document = document_of(app, core.models(), bodies + more)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return JSONResponse(document)


class AnswerResponse(Response):
    """Sends an answer while it is made, and drops it as soon as the client has gone."""

    def __init__(
        self,
        core: RequestCore,
        generations: Sequence[Generation],
        shape: ChatRenderer,
        *,
        streams: bool,
    ):
        super().__init__()
        self._core = core
        self._generations = generations
        self._shape = shape
        self._streams = streams

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if self._streams:
            request_id = scope["state"]["request_id"]
            work = asgi.send_events(send, self._events(), request_id)
        else:
            work = self._send_whole(send)
        await asgi.until_disconnect(receive, work)

    async def _send_whole(self, send: asgi.Send) -> None:
        choices = [CompletedChoice() for _ in self._generations]
        async with aclosing(self._core.run_many(self._generations)) as pieces:
            async for index, piece in pieces:
                choices[index].add(piece)
        size = sum(choice.size for choice in choices)
        body = await run_off_loop_if_large(size, self._shape.whole, choices)
        await asgi.send_json(send, 200, body)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        usages: list[TokenUsage] = []
        opened: set[int] = set()
        async with aclosing(self._core.run_many(self._generations)) as pieces:
            async for index, piece in pieces:
                event = b""
                if self._shape.is_chat and index not in opened:
                    opened.add(index)
                    event = server_sent(self._shape.opening(index))
                if piece.logprobs or piece.prompt_logprobs:
                    size = num_listed_tokens(piece.logprobs, piece.prompt_logprobs)
                    event += await run_off_loop_if_large(size, self._written, index, piece)
                else:
                    event += self._written(index, piece)
                if event:
                    yield event
                if piece.usage is not None:
                    usages.append(piece.usage)
        if self._shape.shows_usage:
            yield server_sent(self._shape.usage_chunk(usages))

    def _written(self, index: int, piece: TextDelta) -> bytes:
        return b"".join(map(server_sent, self._shape.chunks(index, piece)))


def _answer(
    core: RequestCore,
    body: ChatCompletionRequest | CompletionRequest,
    generations: Sequence[Generation],
) -> AnswerResponse:
    call = generations[0].call
    shape = ChatRenderer(
        call.request_id.partition("-")[0],
        core.model(call.model).name,
        is_chat=isinstance(body, ChatCompletionRequest),
        shows_usage=body.wants_usage_chunk,
        shows_logprobs=call.params.logprobs is not None,
        prompts=[each.request.prompt_ids for each in generations] if body.return_token_ids else (),
    )
    return AnswerResponse(core, generations, shape, streams=bool(body.stream))


def _nth_id(request_id: str, index: int, num_prompts: int) -> str:
    """Each prompt of a call is a request of its own."""
    return f"{request_id}-{index}" if num_prompts > 1 else request_id


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """What the router refuses goes the way of all errors."""
    assert isinstance(error, HTTPException)
    code = _CODE_OF_STATUS.get(error.status_code)
    if code is None:
        raise ServiceError("internal_error")
    path = ascii(request.scope["path"][:100])
    message = f"there is nothing at {path}"
    if code == "method_not_allowed":
        message = f"{path} does not take {request.method[:20]}"
        allowed = ", ".join(sorted(_methods_of(request)))
        request.scope["state"]["error_headers"] = [(b"allow", allowed.encode())]
    raise RequestError(message, code=code)


def _methods_of(request: Request) -> set[str]:
    """What the path takes; several routes may share it, of which the router names but one."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    return {method for route in matching for method in route.methods or ()}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorBody} for status in statuses}


def _generates(body: type[BaseModel], answer: type[BaseModel]) -> dict[str, Any]:
    """How a generation route is documented."""
    chunk = ChatCompletionChunk if answer is ChatCompletion else answer
    return {
        "response_model": answer,
        "responses": {
            200: {"content": {"text/event-stream": {"schema": _event(chunk)}}},
            **_errors(400, 401, 404, 413, 415, 429, 500, 503, 504),
        },
        "openapi_extra": takes(body),
    }


def _event(chunk: type[BaseModel]) -> dict[str, Any]:
    """One event of a stream: its data is a chunk, or an error, as JSON, or the mark of the end."""
    models = [{"$ref": SCHEMA_REF.format(model=each.__name__)} for each in (chunk, ErrorBody)]
    spelt = {"contentMediaType": "application/json", "contentSchema": {"anyOf": models}}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, spelt]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}
