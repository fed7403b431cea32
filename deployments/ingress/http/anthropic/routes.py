"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients speak them.

requests.py and rendering.py have the shapes; the EdgeMiddleware words the errors.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from penstock.deployments.ingress.core.call import Call
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.deployments.ingress.core.generation import Generation
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.http.anthropic.rendering import (
    AnthropicError,
    MessageBody,
    MessageRenderer,
    TokensCount,
)
from penstock.deployments.ingress.http.anthropic.requests import (
    CountTokensRequest,
    MessagesRequest,
    parse,
)
from penstock.deployments.ingress.http.asgi import StreamingAnswer, read_json_body
from penstock.deployments.ingress.http.body import renamed_fields
from penstock.deployments.ingress.http.events import ANTHROPIC_PATH
from penstock.deployments.ingress.http.middleware import context_of
from penstock.deployments.ingress.http.openai.schemas import request_schema
from penstock.workers.request import FinishReason

SCHEMAS: list[type[BaseModel]] = [MessagesRequest, CountTokensRequest]
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": AnthropicError} for status in (400, 401, 404, 413, 415, 500, 504, 529)
}


def add_message_routes(app: FastAPI, core: RequestCore) -> None:
    num_errors_returned = core.metrics.num_errors_returned

    @app.post(
        ANTHROPIC_PATH,
        response_model=MessageBody,
        responses={**_REFUSALS, 200: {"content": {"text/event-stream": {}}}},
        openapi_extra=request_schema(MessagesRequest),
    )
    async def messages(request: Request) -> Response:
        """Answer a conversation, as Anthropic's API does."""
        body = parse(MessagesRequest, await read_json_body(request.scope, request.receive))
        params, prompt = body.params(), body.prompt()
        call = Call(prompt, params, body.options(), context_of(request.scope))
        with renamed_fields({"stop": "stop_sequences"}):
            generation = await core.prepare(call)
        renderer = MessageRenderer(call.context.request_id, core.model(call.options.model).name)
        if body.stream:
            return StreamingAnswer(_events(core, generation, renderer), num_errors_returned)
        return StreamingAnswer(_message(core, generation, renderer), num_errors_returned)

    @app.post(
        f"{ANTHROPIC_PATH}/count_tokens",
        response_model=TokensCount,
        responses=_REFUSALS,
        openapi_extra=request_schema(CountTokensRequest),
    )
    async def count_tokens(request: Request) -> Response:
        """How many tokens a conversation has for the model."""
        body = parse(CountTokensRequest, await read_json_body(request.scope, request.receive))
        call = Call(body.prompt(), options=body.options(), context=context_of(request.scope))
        return JSONResponse({"input_tokens": len(await core.prompt_ids(call))})


async def _message(
    core: RequestCore, generation: Generation, renderer: MessageRenderer
) -> dict[str, Any]:
    async with aclosing(core.run(generation)) as pieces:
        async for _, piece in pieces:
            _refuse_aborted(piece.finish_reason)
            renderer.add(piece, generation.usage)
            if piece.finish_reason is not None:
                return renderer.whole(piece)
    raise ServiceError("worker_lost")


async def _events(
    core: RequestCore, generation: Generation, renderer: MessageRenderer
) -> AsyncGenerator[bytes, None]:
    async with aclosing(core.run(generation)) as pieces:
        async for _, piece in pieces:
            _refuse_aborted(piece.finish_reason)
            if event := renderer.add(piece, generation.usage):
                yield event


def _refuse_aborted(reason: FinishReason | None) -> None:
    """Their API has no stop_reason for an answer that was ended from outside."""
    if reason is FinishReason.ABORT:
        raise ServiceError("internal_error")
