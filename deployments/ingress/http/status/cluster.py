"""`GET /v1/penstock/status`: nodes, replicas and their nodes, queues, and scaling decisions.

Every figure is from the last heartbeat of a replica: no worker is called, and nothing is counted
here. Addresses of machines are left out: an API key does not entitle to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel

from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.http.jobs import JobBoard, JobStatus
from penstock.deployments.ingress.http.openai.schemas import ErrorBody, ModelBody, model_body
from penstock.deployments.supervision.view import ClusterView, IngressInfo, ScaleReport
from penstock.workers.stats import EngineStats, ExpertStats, WorkerInfo, worker_name

Workers = Callable[[], Iterable[tuple[WorkerInfo, EngineStats]]]
View = Callable[[], ClusterView]
HasLost = Callable[[int], bool]  # by the epoch of a worker


class NodeStatus(BaseModel):
    """A node of the Ray cluster."""

    node: str
    num_cpus: float
    num_gpus: float
    is_head: bool


class WorkerStatus(BaseModel):
    """One worker, by its last heartbeat. Totals count from its start."""

    id: str  # of one epoch of a worker; a restarted worker has another, and new totals
    node: str  # empty where there is no cluster
    is_draining: bool  # it finishes its requests and takes no new ones
    is_lost: bool  # its connection with this ingress has ended: it has, too, or is out of reach
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
    num_ranks: int  # processes with a part of the model each
    experts: ExpertStats | None  # of the first of them; None: no cache of experts


class IngressStatus(BaseModel):
    """One ingress, by its last heartbeat."""

    id: str
    node: str
    is_draining: bool
    num_workers: int  # with a connection to this ingress
    num_connections: int  # of HTTP clients, and gRPC calls that run
    num_waiting: int  # of its requests, at the gates
    warnings: list[str]  # what limits it now


class ScaleStatus(BaseModel):
    """A decision of the autoscaler."""

    deployment: str  # Worker or Ingress
    number: int  # replicas wanted
    ready: int
    minimum: int
    maximum: int
    kind: str  # up, down, hold, wake, sleep
    reason: str
    age_s: float


class Status(BaseModel):
    version: str
    is_ready: bool
    models: list[ModelBody]
    workers: list[WorkerStatus]
    nodes: list[NodeStatus]
    ingresses: list[IngressStatus]
    scaling: list[ScaleStatus]  # the last decision for each autoscaled deployment
    scale_changes: list[ScaleStatus]  # the last ones that changed a number, newest first
    jobs: list[JobStatus]  # batches of the tenant that run elsewhere, in the last minute
    has_batches: bool  # /v1/batches works: there is a data_dir
    num_failed_starts: int  # replicas that could not start, since the last deployment


def add_status_route(
    app: FastAPI,
    core: RequestCore,
    workers: Workers | None,
    view: View | None,
    jobs: JobBoard,
    *,
    has_batches: bool,
    has_lost: HasLost | None = None,
) -> None:
    """`workers`: by their last heartbeats. `view`: the registry's; None: no cluster. `has_lost`:
    whether this ingress has lost the connection with a worker; None: it has none to lose."""
    refusals: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody} for status in (401, 403)
    }

    @app.get("/v1/penstock/status", response_model=Status, responses=refusals)
    async def status(request: Request) -> Status:
        """How busy the cluster is: nodes, workers with queues, KV blocks and totals, scaling."""
        alive = sorted(workers() if workers is not None else (), key=lambda each: each[0].address)
        seen, caller = ClusterView() if view is None else view(), request.scope["state"]["caller"]
        return Status(
            version=app.version,
            is_ready=core.ready(),
            models=[
                ModelBody.model_validate(model_body(model, (info for info, _ in alive), name))
                for model in core.models()
                for name in model.names
            ],
            workers=[
                _worker_status(info, stats, has_lost is not None and has_lost(info.epoch))
                for info, stats in alive
            ],
            nodes=[NodeStatus(**asdict(each)) for each in seen.nodes],
            ingresses=[_ingress_status(each) for each in seen.ingresses],
            scaling=[_scale_status(each) for each in seen.scaling],
            scale_changes=[_scale_status(each) for each in reversed(seen.scale_changes)],
            jobs=jobs.of(None if caller.sees_all else caller.tenant, seen),
            has_batches=has_batches,
            num_failed_starts=seen.num_failures,
        )


def _worker_status(info: WorkerInfo, stats: EngineStats, is_lost: bool) -> WorkerStatus:
    return WorkerStatus(
        id=worker_name(info.epoch),
        node=info.node,
        is_draining=info.is_draining,
        is_lost=is_lost,
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
        num_ranks=max(1, len(stats.ranks)),
        experts=stats.experts,
    )


def _ingress_status(info: IngressInfo) -> IngressStatus:
    return IngressStatus(
        id=info.ingress_id[-8:],  # without the name of the machine
        node=info.node,
        is_draining=info.is_draining,
        num_workers=info.num_workers,
        num_connections=info.num_connections,
        num_waiting=info.num_waiting,
        warnings=[each.text for each in info.warnings],
    )


def _scale_status(report: ScaleReport) -> ScaleStatus:
    values = asdict(report)
    return ScaleStatus(age_s=max(time.time() - values.pop("at"), 0.0), **values)
