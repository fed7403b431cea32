"""POST /tokenize and /detokenize, in vLLM's shapes: text or messages to token ids, and back.

GET /tokenizer_info names the special tokens: evaluation tools ask for them.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from penstock.deployments.ingress.core.call import Call
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.core.validation import check_num_ids
from penstock.deployments.ingress.http.asgi import read_json_body
from penstock.deployments.ingress.http.body import (
    Strict,
    drop_ignored_fields,
    json_object,
    validated,
)
from penstock.deployments.ingress.http.events import json_bytes
from penstock.deployments.ingress.http.ignored_fields import FieldPolicy, IgnoredFields
from penstock.deployments.ingress.http.middleware import context_of
from penstock.deployments.ingress.http.openai.requests import ChatCompletionRequest, parse
from penstock.deployments.ingress.http.openai.schemas import error_responses, request_schema
from penstock.deployments.ingress.http.template_fields import fitted
from penstock.workers.request import RequestError

_ERRORS = error_responses(400, 401, 404, 413, 415, 500)


class TokenizeRequest(Strict):
    """A text, or `messages` and whatever else belongs to a chat request, to turn into token ids."""

    model: str | None = Field(None, description="as /v1/models names it; default: the first one")
    prompt: str
    add_special_tokens: bool | None = Field(None, description="default true")
    return_token_strs: bool | None = Field(None, description="default false")


class TokenizeChatRequest(ChatCompletionRequest):
    """A chat request of which only the prompt counts: the tokens it would have there."""

    return_token_strs: bool | None = None


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Strict):
    """Token ids to turn into text."""

    model: str | None = Field(None, description="as /v1/models names it; default: the first one")
    tokens: list[int]
    skip_special_tokens: bool | None = Field(None, description="default false")


class DetokenizeAnswer(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    """The special tokens as texts; null: the tokenizer has none of that name."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None


SCHEMAS: list[type[BaseModel]] = [TokenizeRequest, DetokenizeRequest]


def add_token_routes(app: FastAPI, core: RequestCore, policy: FieldPolicy) -> None:
    """`policy`: what is done with fields that are not served."""

    @app.post(
        "/tokenize",
        response_model=TokenizeAnswer,
        responses=_ERRORS,
        openapi_extra=request_schema(TokenizeRequest),
    )
    async def tokenize(request: Request) -> Response:
        """The token ids of a text, or of a conversation as the model would read it."""
        body = await read_json_body(request.scope, request.receive)
        values, context = json_object(body), context_of(request.scope)
        asked: TokenizeRequest | TokenizeChatRequest
        left_out = IgnoredFields(policy)
        if "messages" in values:
            asked = parse(TokenizeChatRequest, body, left_out)
            known = core.named(asked.model).tokenizer.template_variables
            prompt = fitted(asked.prompt(), asked.effort, known, left_out)
            call = Call(prompt, options=asked.options(), context=context)
            token_ids = list(await core.prompt_ids(call))
        else:
            fields = TokenizeRequest.model_fields
            kept = drop_ignored_fields(values, fields, {}, (), left_out)
            asked = validated(TokenizeRequest, kept, left_out)
            token_ids = await core.tokenize(
                asked.prompt,
                model=asked.model,
                add_special_tokens=asked.add_special_tokens is not False,
                principal=context.principal,
            )

        def answer() -> bytes:
            tokenizer = core.named(asked.model).tokenizer
            pieces = tokenizer.pieces(token_ids) if asked.return_token_strs else None
            return json_bytes(
                {
                    "count": len(token_ids),
                    "max_model_len": core.model(asked.model).max_model_len,
                    "tokens": token_ids,
                    "token_strs": pieces,
                }
            )

        content = await core.texts.run(context.principal, len(token_ids), answer)
        headers = left_out.text_headers()
        return Response(content, media_type="application/json", headers=headers)

    @app.post(
        "/detokenize",
        response_model=DetokenizeAnswer,
        responses=_ERRORS,
        openapi_extra=request_schema(DetokenizeRequest),
    )
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        values = json_object(await read_json_body(request.scope, request.receive))
        model, tokens = values.get("model"), values.get("tokens")
        if isinstance(tokens, list):  # before all of them are looked at
            most = core.model(model if isinstance(model, str) else None).max_model_len
            check_num_ids(tokens, most, "tokens")
        left_out = IgnoredFields(policy)
        kept = drop_ignored_fields(values, DetokenizeRequest.model_fields, {}, (), left_out)
        asked = validated(DetokenizeRequest, kept, left_out)
        try:
            text = await core.detokenize(
                asked.tokens,
                model=asked.model,
                skip_special_tokens=asked.skip_special_tokens is True,
                principal=context_of(request.scope).principal,
            )
        except RequestError as error:
            param = "tokens" if error.param == "token_ids" else error.param
            raise RequestError(error.message, param=param, code=error.code) from None
        return JSONResponse({"prompt": text}, headers=left_out.text_headers())

    @app.get("/tokenizer_info", response_model=TokenizerInfo, responses=error_responses(401, 404))
    async def tokenizer_info(model: str | None = None) -> Response:
        """The tokenizer's special tokens. `model`: as /v1/models names it; default: the first one.
        Without the chat template, which vLLM adds: a server renders it, and it may be private."""
        core.model(model)  # refuses a name that no model has
        known = core.named(model).tokenizer.special_tokens
        return JSONResponse({name: known.get(name) for name in TokenizerInfo.model_fields})
