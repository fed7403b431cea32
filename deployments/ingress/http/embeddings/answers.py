"""Answers: embeddings as OpenAI's API has them, scores as vLLM's, ranks as Jina's.

The models document the answers; the functions write them as JSON, off the event loop.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from penstock.deployments.ingress.core.call import TokenUsage
from penstock.deployments.ingress.core.embeddings.embed import Embeddings
from penstock.deployments.ingress.http.embeddings.requests import Encoding


class _AnswerPart(BaseModel):
    model_config = ConfigDict(extra="forbid")


class EmbeddingUsage(_AnswerPart):
    prompt_tokens: int
    total_tokens: int


class EmbeddingBody(_AnswerPart):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # a string: base64


class EmbeddingList(_AnswerPart):
    """The embeddings, in the order of the input."""

    object: Literal["list"]
    data: list[EmbeddingBody]
    model: str
    usage: EmbeddingUsage


class ScoreBody(_AnswerPart):
    object: Literal["score"]
    index: int
    score: float


class ScoreList(_AnswerPart):
    """The cosine of the embeddings of each pair, or the score of a reranker."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreBody]
    usage: EmbeddingUsage


class RankedDocument(_AnswerPart):
    text: str


class RankBody(_AnswerPart):
    index: int  # of the document in the request
    relevance_score: float
    document: RankedDocument | None = None


class Ranking(_AnswerPart):
    """The documents, best first. A score is the cosine of the embeddings of query and document, or
    that of a reranker."""

    id: str
    model: str
    results: list[RankBody]
    usage: EmbeddingUsage


def embedding_list(found: Embeddings, model: str, encoding: Encoding) -> orjson.Fragment:
    """An EmbeddingList as JSON."""
    write = _base64 if encoding == "base64" else _numbers
    data = [
        {"object": "embedding", "index": index, "embedding": orjson.Fragment(write(each))}
        for index, each in enumerate(found.vectors)  # apart: other threads have turns between them
    ]
    body = {"object": "list", "data": data, "model": model, "usage": usage_body(found.usage)}
    return orjson.Fragment(orjson.dumps(body))


def _base64(vector: NDArray[np.float32]) -> bytes:
    return b'"%b"' % base64.b64encode(vector.astype("<f4").tobytes())


def _numbers(vector: NDArray[np.float32]) -> bytes:
    """The shortest numbers that are read as the same fp32."""
    return orjson.dumps(np.ascontiguousarray(vector), option=orjson.OPT_SERIALIZE_NUMPY)


def ranked(scores: Sequence[float], most: int | None) -> list[int]:
    """Indexes of the best scores, best first; equal ones in their order. `most` 0 or None: all."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return order[: most or None]


def score_list(id: str, model: str, scores: Sequence[float], usage: TokenUsage) -> dict[str, Any]:
    """A ScoreList."""
    data = [{"object": "score", "index": index, "score": each} for index, each in enumerate(scores)]
    return {
        **{"id": id, "object": "list", "created": int(time.time()), "model": model, "data": data},
        "usage": usage_body(usage),
    }


def ranking(
    id: str,
    model: str,
    scores: Sequence[float],
    order: Sequence[int],
    documents: Sequence[str] | None,
    usage: TokenUsage,
) -> dict[str, Any]:
    """A Ranking. `order`: indexes, best first. `documents`: their texts; None: without."""
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index]} for index in order
    ]
    if documents is not None:
        for each in results:
            each["document"] = {"text": documents[each["index"]]}
    return {"id": id, "model": model, "results": results, "usage": usage_body(usage)}


def usage_body(usage: TokenUsage) -> dict[str, int]:
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
