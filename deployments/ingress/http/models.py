"""GET /v1/models and /v1/models/{model}, in OpenAI's shape; for Anthropic's clients in theirs.

Both APIs have these paths. Anthropic's clients name the version of their API in a header.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.http.openai.schemas import (
    ModelBody,
    ModelList,
    error_responses,
    model_body,
)
from penstock.deployments.ingress.http.status.cluster import Workers

ANTHROPIC_HEADER = "anthropic-version"


def add_model_routes(app: FastAPI, core: RequestCore, workers: Workers | None) -> None:
    """`workers`: those that are alive; None: what they serve is not known."""

    def bodies_of(*names: str) -> list[dict[str, Any]]:
        infos = [info for info, _ in workers()] if workers is not None else []
        return [model_body(core.model(name), infos, name) for name in names]

    @app.get("/v1/models", response_model=ModelList)
    async def list_models(request: Request) -> Response:
        """The models that are served. With the header anthropic-version: as Anthropic's API lists
        them, all at once."""
        names = [name for model in core.models() for name in model.names]
        bodies = bodies_of(*names)
        if ANTHROPIC_HEADER not in request.headers:
            return JSONResponse({"object": "list", "data": bodies})
        data = [anthropic_model(each) for each in bodies]
        ends = {"first_id": names[0], "last_id": names[-1]}
        return JSONResponse({"data": data, "has_more": False, **ends})

    @app.get("/v1/models/{model:path}", response_model=ModelBody, responses=error_responses(404))
    async def get_model(request: Request, model: str) -> Response:
        """One model; without a name all of them, as for /v1/models."""
        if not model:
            return await list_models(request)
        (body,) = bodies_of(model)
        if ANTHROPIC_HEADER in request.headers:
            body = anthropic_model(body)
        return JSONResponse(body)


def anthropic_model(body: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's shape of a model in Anthropic's."""
    made = datetime.fromtimestamp(body["created"], UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": body["id"],
        "display_name": body["id"],
        "created_at": made,
        "max_input_tokens": body["max_model_len"],
    }
