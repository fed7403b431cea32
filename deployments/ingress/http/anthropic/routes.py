"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients speak them.

requests.py and rendering.py have the shapes, answers.py the answers; the EdgeMiddleware words the
errors.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from penstock.deployments.ingress.core.call import Call
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.http.anthropic.answers import MessagesEndpoint
from penstock.deployments.ingress.http.anthropic.rendering import (
    AnthropicError,
    MessageBody,
    TokensCount,
)
from penstock.deployments.ingress.http.anthropic.requests import (
    CountTokensRequest,
    MessagesRequest,
    parse,
)
from penstock.deployments.ingress.http.asgi import read_json_body
from penstock.deployments.ingress.http.events import ANTHROPIC_PATH
from penstock.deployments.ingress.http.ignored_fields import FieldPolicy, IgnoredFields
from penstock.deployments.ingress.http.journalled import JournalledCalls
from penstock.deployments.ingress.http.middleware import context_of
from penstock.deployments.ingress.http.openai.schemas import request_schema
from penstock.deployments.ingress.http.template_fields import fitted

SCHEMAS: list[type[BaseModel]] = [MessagesRequest, CountTokensRequest]
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": AnthropicError}
    for status in (400, 401, 403, 404, 413, 415, 429, 500, 504, 529)
}


def add_message_routes(
    app: FastAPI, core: RequestCore, calls: JournalledCalls | None, policy: FieldPolicy
) -> None:
    """`calls`: those with a journal; None: there are none."""
    endpoint = MessagesEndpoint(core, policy)
    if calls is not None:
        calls.add(ANTHROPIC_PATH, endpoint)

    @app.post(
        ANTHROPIC_PATH,
        response_model=MessageBody,
        responses={**_REFUSALS, 200: {"content": {"text/event-stream": {}}}},
        openapi_extra=request_schema(MessagesRequest),
    )
    async def messages(request: Request) -> Response:
        """Answer a conversation, as Anthropic's API does."""
        content = await read_json_body(request.scope, request.receive)
        if calls is not None:
            return await calls.created(request.scope, content)
        return await (await endpoint.prepare(content, context_of(request.scope))).answer()

    @app.post(
        f"{ANTHROPIC_PATH}/count_tokens",
        response_model=TokensCount,
        responses=_REFUSALS,
        openapi_extra=request_schema(CountTokensRequest),
    )
    async def count_tokens(request: Request) -> Response:
        """How many tokens a conversation has for the model."""
        left_out = IgnoredFields(policy)
        content = await read_json_body(request.scope, request.receive)
        body = parse(CountTokensRequest, content, left_out)
        known = core.named(body.model).tokenizer.template_variables
        prompt = fitted(body.prompt(), body.effort, known, left_out)
        call = Call(prompt, options=body.options(), context=context_of(request.scope))
        count = {"input_tokens": len(await core.prompt_ids(call))}
        return JSONResponse(count, headers=left_out.text_headers())
