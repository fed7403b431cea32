"""POST /v1/chat/completions and /v1/completions: from the body to Calls, and the answers' events.

Both are fast paths: EdgeMiddleware calls their endpoints directly. FastAPI has the same routes, for
the OpenAPI document and for other methods.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from penstock.deployments.ingress.core.call import Call, TokenUsage
from penstock.deployments.ingress.core.generation import Generation
from penstock.deployments.ingress.core.logprobs import num_listed_tokens
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.core.streams import run_off_loop_if_large
from penstock.deployments.ingress.http.asgi import (
    App,
    Receive,
    Scope,
    Send,
    StreamingAnswer,
    read_json_body,
    server_sent,
)
from penstock.deployments.ingress.http.body import renamed_fields
from penstock.deployments.ingress.http.middleware import context_of
from penstock.deployments.ingress.http.openai.rendering import ChatRenderer, CompletedChoice
from penstock.deployments.ingress.http.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    parse,
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


def add_openai_routes(app: FastAPI, core: RequestCore) -> None:
    """The routes that the OpenAPI document describes. See `fast_paths`."""

    @app.post("/v1/chat/completions", **_documented(ChatCompletionRequest, ChatCompletion))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await _chat_completions(core, request.scope, request.receive)

    @app.post("/v1/completions", **_documented(CompletionRequest, Completion))
    async def completions(request: Request) -> Response:
        """Continue one prompt or several."""
        return await _completions(core, request.scope, request.receive)


def fast_paths(core: RequestCore) -> Mapping[str, App]:
    """The endpoints of POST by path, as plain ASGI apps."""

    async def chat_completions(scope: Scope, receive: Receive, send: Send) -> None:
        await (await _chat_completions(core, scope, receive))(scope, receive, send)

    async def completions(scope: Scope, receive: Receive, send: Send) -> None:
        await (await _completions(core, scope, receive))(scope, receive, send)

    return {"/v1/chat/completions": chat_completions, "/v1/completions": completions}


async def _chat_completions(core: RequestCore, scope: Scope, receive: Receive) -> StreamingAnswer:
    body = parse(ChatCompletionRequest, await read_json_body(scope, receive))
    call = Call(body.prompt(), body.params(), body.options(), context_of(scope))
    is_newer_name = body.max_completion_tokens is not None
    with renamed_fields({"max_tokens": "max_completion_tokens"} if is_newer_name else {}):
        generations = await core.prepare_choices(call, body.num_choices)
    return _answer(core, body, call, generations)


async def _completions(core: RequestCore, scope: Scope, receive: Receive) -> StreamingAnswer:
    body = parse(CompletionRequest, await read_json_body(scope, receive))
    context, prompts = context_of(scope), body.prompts()
    params, options = body.params(), body.options()
    generations = []
    for i, prompt in enumerate(prompts):
        call = Call(prompt, params, options, context.of_prompt(i, len(prompts)))
        generations += await core.prepare_choices(call, body.num_choices)
    return _answer(core, body, Call(prompts[0], params, options, context), generations)


def _answer(
    core: RequestCore,
    body: ChatCompletionRequest | CompletionRequest,
    call: Call,
    generations: Sequence[Generation],
) -> StreamingAnswer:
    renderer = ChatRenderer(
        call.context.request_id,
        core.model(call.options.model).name,
        is_chat=isinstance(body, ChatCompletionRequest),
        shows_usage=body.wants_usage_chunk,
        shows_logprobs=call.params.logprobs is not None,
        prompts=[each.request.prompt_ids for each in generations] if body.return_token_ids else (),
    )
    answer = _events if body.stream else _whole
    return StreamingAnswer(answer(core, generations, renderer), core.metrics.num_errors_returned)


async def _whole(
    core: RequestCore, generations: Sequence[Generation], renderer: ChatRenderer
) -> dict[str, Any]:
    choices = [CompletedChoice() for _ in generations]
    async with aclosing(core.run_many(generations)) as pieces:
        async for index, piece in pieces:
            choices[index].add(piece)
    size = sum(choice.size for choice in choices)
    return await run_off_loop_if_large(size, renderer.whole, choices)


async def _events(
    core: RequestCore, generations: Sequence[Generation], renderer: ChatRenderer
) -> AsyncGenerator[bytes, None]:
    usages: list[TokenUsage] = []
    opened: set[int] = set()
    async with aclosing(core.run_many(generations)) as pieces:
        async for index, piece in pieces:
            event = b""
            if renderer.is_chat and index not in opened:
                opened.add(index)
                event = server_sent(renderer.opening(index))
            if piece.logprobs or piece.prompt_logprobs:
                size = num_listed_tokens(piece.logprobs, piece.prompt_logprobs)
                event += await run_off_loop_if_large(size, renderer.events, index, piece)
            else:
                event += renderer.events(index, piece)
            if event:
                yield event
            if piece.usage is not None:
                usages.append(piece.usage)
    if renderer.shows_usage:
        yield server_sent(renderer.usage_chunk(usages))


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
