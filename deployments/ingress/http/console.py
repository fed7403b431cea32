"""The web console at `/`: its files, and the figures that its live panel asks for every second.

The files hold no data and are public (app.PUBLIC_PATHS); the figures require an API key like
all else. They are what workers announced last: nothing is asked of a worker, nothing counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fastapi import FastAPI, Response
from pydantic import BaseModel

from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.http.openai.schemas import ErrorBody, ModelBody, model_body
from penstock.deployments.ingress.http.static import FILES, FOLDER, HEADERS
from penstock.workers.stats import EngineStats, ExpertStats, WorkerInfo

Workers = Callable[[], Iterable[tuple[WorkerInfo, EngineStats]]]


class WorkerStatus(BaseModel):
    """One worker as it last announced itself. Totals count from its start."""

    id: str  # of one life of a worker: another after a restart, so that totals begin anew
    model: str
    num_running: int
    num_waiting: int
    num_blocks: int
    num_live_blocks: int
    num_cached_blocks: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_preemptions: int
    experts: ExpertStats | None  # where there is a cache of experts


class Status(BaseModel):
    version: str
    is_ready: bool
    models: list[ModelBody]
    workers: list[WorkerStatus]


def add_console_routes(app: FastAPI, core: RequestCore, workers: Workers | None) -> None:
    """`workers`: all that are alive, as they last announced themselves."""
    for path, (name, media_type) in FILES.items():
        _add_file(app, path, (FOLDER / name).read_bytes(), media_type)

    refusals: dict[int | str, dict[str, Any]] = {401: {"model": ErrorBody}}

    @app.get("/v1/penstock/status", response_model=Status, responses=refusals)
    async def status() -> Status:
        """How busy the cluster is: models, and each worker's queue, KV blocks and totals."""
        alive = sorted(workers() if workers is not None else (), key=lambda each: each[0].address)
        return Status(
            version=app.version,
            is_ready=core.ready(),
            models=[
                ModelBody.model_validate(model_body(model, (info for info, _ in alive)))
                for model in core.models()
            ],
            workers=[_worker_status(info, stats) for info, stats in alive],
        )


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    async def file() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    app.get(path, include_in_schema=False)(file)


def _worker_status(info: WorkerInfo, stats: EngineStats) -> WorkerStatus:
    # Not its address: a client's key entitles it to answers, not to the addresses of machines.
    return WorkerStatus(
        id=f"{info.epoch:016x}"[:8],
        model=info.model,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_blocks=stats.num_blocks,
        num_live_blocks=stats.num_live_blocks,
        num_cached_blocks=stats.num_cached_blocks,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_generated_tokens=stats.num_generated_tokens,
        num_prefix_queried_tokens=stats.num_prefix_queried_tokens,
        num_prefix_hit_tokens=stats.num_prefix_hit_tokens,
        num_preemptions=stats.num_preemptions,
        experts=stats.experts,
    )
