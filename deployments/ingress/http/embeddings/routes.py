"""POST /v1/embeddings, /v1/score and /v1/rerank.

All three are embeddings of texts: a score is the cosine of two of them. A reranker reads both texts
of a pair together, and scores them itself. What ends the connection drops what is not computed yet.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from penstock.deployments.ingress.core.call import CallContext, ServedModel
from penstock.deployments.ingress.core.embeddings.embed import Embeddings, embed
from penstock.deployments.ingress.core.embeddings.vectors import cosines, pair_scores
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.core.streams import run_off_loop_if_large
from penstock.deployments.ingress.http.asgi import (
    App,
    Receive,
    Scope,
    Send,
    StreamingAnswer,
    read_json_body,
)
from penstock.deployments.ingress.http.embeddings.answers import (
    EmbeddingList,
    Ranking,
    ScoreList,
    embedding_list,
    ranked,
    ranking,
    score_list,
)
from penstock.deployments.ingress.http.embeddings.requests import (
    BODIES,
    EMBEDDINGS_PATH,
    RERANK_PATH,
    SCORE_PATH,
    EmbeddingRequest,
    PairsRequest,
    RerankRequest,
    ScoreRequest,
    parse,
)
from penstock.deployments.ingress.http.ignored_fields import FieldPolicy, IgnoredFields
from penstock.deployments.ingress.http.middleware import context_of
from penstock.deployments.ingress.http.openai.schemas import error_responses, request_schema

PATHS = tuple(BODIES)
SCHEMAS: list[type[BaseModel]] = [*BODIES.values()]

# Checks a body, and gives what is to be awaited for the answer. Raises RequestError.
_Answer = Callable[[RequestCore, bytes, CallContext, IgnoredFields], Awaitable[Any]]


def add_embedding_routes(app: FastAPI, core: RequestCore, policy: FieldPolicy) -> None:
    """`policy`: what is done with fields that are not served."""

    @app.post(EMBEDDINGS_PATH, **_documented(EmbeddingRequest, EmbeddingList))
    async def embeddings(request: Request) -> Response:
        """Embed texts."""
        return await _created(core, policy, _embeddings, request.scope, request.receive)

    @app.post(SCORE_PATH, **_documented(ScoreRequest, ScoreList))
    async def score(request: Request) -> Response:
        """How alike texts are: the cosine of their embeddings, or the score of a reranker."""
        return await _created(core, policy, _scores, request.scope, request.receive)

    @app.post(RERANK_PATH, **_documented(RerankRequest, Ranking))
    async def rerank(request: Request) -> Response:
        """Rank documents for a query: by the cosines of their embeddings, or by a reranker."""
        return await _created(core, policy, _ranking, request.scope, request.receive)


def fast_paths(core: RequestCore, policy: FieldPolicy | None) -> Mapping[str, App]:
    """The endpoint of embeddings alone, for batches. `policy` None: unknown fields are refused."""

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        answer = await _created(core, policy, _embeddings, scope, receive)
        await answer(scope, receive, send)

    return {EMBEDDINGS_PATH: endpoint}


async def _created(
    core: RequestCore,
    policy: FieldPolicy | None,
    make: _Answer,
    scope: Scope,
    receive: Receive,
) -> Response:
    """The answer to a POST. Raises RequestError, ServiceError or ClientGone."""
    content = await read_json_body(scope, receive)
    left_out = IgnoredFields(policy)
    body = make(core, content, context_of(scope), left_out)
    return StreamingAnswer(body, core.metrics.num_errors_returned, headers=left_out.headers())


def _embeddings(
    core: RequestCore, content: bytes, context: CallContext, left_out: IgnoredFields
) -> Awaitable[Any]:
    asked = parse(EmbeddingRequest, content, left_out)
    call = asked.call(context)

    async def answer() -> Any:
        found, encoding = await embed(core, call), asked.encoding_format or "float"
        name = core.model(asked.model).name
        size = int(found.vectors.size)
        return await run_off_loop_if_large(size, embedding_list, found, name, encoding)

    return answer()


def _scores(
    core: RequestCore, content: bytes, context: CallContext, left_out: IgnoredFields
) -> Awaitable[Any]:
    asked = parse(ScoreRequest, content, left_out)
    model = core.model(asked.model)
    _check_instruction(asked, model, left_out)
    call = asked.call(context, as_pairs=model.scores_pairs)

    async def answer() -> Any:
        found = await embed(core, call)
        scores = await _scored(found, asked, model, asked.num_ones)
        return score_list(f"score-{context.request_id}", model.name, scores, found.usage)

    return answer()


def _ranking(
    core: RequestCore, content: bytes, context: CallContext, left_out: IgnoredFields
) -> Awaitable[Any]:
    asked = parse(RerankRequest, content, left_out)
    model = core.model(asked.model)
    _check_instruction(asked, model, left_out)
    call = asked.call(context, as_pairs=model.scores_pairs)

    async def answer() -> Any:
        found = await embed(core, call)
        scores = await _scored(found, asked, model, 1)
        return ranking(
            f"rerank-{context.request_id}",
            model.name,
            scores,
            ranked(scores, asked.top_n),
            None if asked.return_documents is False else asked.documents,
            found.usage,
        )

    return answer()


def _check_instruction(asked: PairsRequest, model: ServedModel, left_out: IgnoredFields) -> None:
    if asked.instruction and not model.scores_pairs:
        left_out.drop(
            "instruction",
            "instruction: this model is no reranker, and compares embeddings: write it into the "
            "query, as the model was trained with it",
        )


async def _scored(
    found: Embeddings, asked: PairsRequest, model: ServedModel, num_ones: int
) -> list[float]:
    """Of each pair: the reranker's score, or the cosine of the first `num_ones` vectors, or the
    only one, with the others."""
    if model.scores_pairs:
        return pair_scores(found.vectors, as_logits=asked.use_activation is False)
    vectors = found.vectors
    ones, others = vectors[:num_ones], vectors[num_ones:]
    return await run_off_loop_if_large(int(vectors.size), cosines, ones, others)


def _documented(body: type[BaseModel], answer: type[BaseModel]) -> dict[str, Any]:
    """How a route is documented."""
    return {
        "response_model": answer,
        "responses": error_responses(400, 401, 404, 409, 413, 415, 429, 500, 503, 504),
        "openapi_extra": request_schema(body),
    }
