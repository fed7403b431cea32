"""`POST /v1/penstock/jobs`: batches that run outside this server say how far they are.

`penstock batch` sends such a report every few seconds to the server that it uses; a job of Ray is
one, too. Reports are kept for a minute, and pass between ingresses in their heartbeats, so each
ingress knows all. The status route shows them to the tenant that sent them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field

from penstock.deployments.ingress.http.asgi import read_json_body
from penstock.deployments.ingress.http.body import (
    Strict,
    drop_ignored_fields,
    json_object,
    validated,
)
from penstock.deployments.ingress.http.middleware import context_of
from penstock.deployments.ingress.http.openai.schemas import error_responses, request_schema
from penstock.deployments.supervision.view import ClusterView, JobReport

KEPT_S = 60.0
MAX_JOBS = 64  # of one ingress; beyond that the oldest reports are dropped
_Count = Annotated[int, Field(ge=0, le=2**53)]
_Text = Annotated[str, Field(max_length=200)]


class ReportRequest(Strict):
    """How far a batch is. A later report of the same `id` and a higher `number` replaces it."""

    id: Annotated[str, Field(min_length=1, max_length=128)]
    number: _Count = Field(description="of the report: 1, 2, ...")
    name: _Text = Field(description="of its input")
    host: _Text = Field(description="on which it runs")
    state: Literal["running", "finished", "interrupted", "failed"]
    num_lines: _Count
    num_completed: _Count
    num_failed: _Count
    num_in_flight: _Count
    cause: _Text = Field("", description="why requests are sent again; empty: none are")


class ReportKept(BaseModel):
    kept_s: float


class JobStatus(BaseModel):
    """A batch outside this server, by its own last report."""

    id: str
    name: str
    host: str
    state: str  # running, finished, interrupted, failed
    num_lines: int
    num_completed: int
    num_failed: int
    num_in_flight: int
    cause: str  # why requests are sent again; empty: none are
    age_s: float  # of the report


SCHEMAS: list[type[BaseModel]] = [ReportRequest]


class JobBoard:
    """The reports that this ingress got in the last minute. `clock`: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._reports: dict[tuple[str, str], JobReport] = {}  # by owner and id

    def add(self, report: JobReport) -> None:
        known = self._reports.pop((report.owner, report.job), None)
        newest = report if known is None or known.number <= report.number else known
        self._reports[report.owner, report.job] = newest
        while len(self._reports) > MAX_JOBS:
            del self._reports[next(iter(self._reports))]

    def own(self) -> tuple[JobReport, ...]:
        """For the heartbeat of this ingress."""
        oldest = self._clock() - KEPT_S
        self._reports = {key: each for key, each in self._reports.items() if each.at >= oldest}
        return tuple(self._reports.values())

    def of(self, owner: str | None, view: ClusterView) -> list[JobStatus]:
        """Jobs of a tenant, by the reports that any ingress got; None: those of all tenants."""
        newest: dict[tuple[str, str], JobReport] = {}
        for each in (*self.own(), *(job for ingress in view.ingresses for job in ingress.jobs)):
            known = newest.get((each.job, each.owner))
            if owner in (None, each.owner) and (known is None or known.number < each.number):
                newest[each.job, each.owner] = each
        return [self._status(newest[name]) for name in sorted(newest)]

    def _status(self, report: JobReport) -> JobStatus:
        return JobStatus(
            id=report.job,
            name=report.name,
            host=report.host,
            state=report.state,
            num_lines=report.num_lines,
            num_completed=report.num_completed,
            num_failed=report.num_failed,
            num_in_flight=report.num_in_flight,
            cause=report.cause,
            age_s=max(self._clock() - report.at, 0.0),
        )


def add_job_route(app: FastAPI, board: JobBoard) -> None:
    @app.post(
        "/v1/penstock/jobs",
        response_model=ReportKept,
        responses=error_responses(400, 401, 413, 415),
        openapi_extra=request_schema(ReportRequest),
    )
    async def report(request: Request) -> ReportKept:
        """Say how far a batch is that runs elsewhere; the status shows it for a minute."""
        values = json_object(await read_json_body(request.scope, request.receive))
        fields: Any = ReportRequest.model_fields
        asked = validated(ReportRequest, drop_ignored_fields(values, fields, {}, ()))
        given = asked.model_dump()
        job = given.pop("id")
        owner = context_of(request.scope).principal
        board.add(JobReport(job=job, owner=owner, at=time.time(), **given))
        return ReportKept(kept_s=KEPT_S)
