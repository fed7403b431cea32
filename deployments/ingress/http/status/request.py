"""`GET /v1/penstock/requests/REQUEST`: where a request has been, and what was decided about it.

What `penstock explain` shows. Of the requests that run at this ingress, and of the last that ended.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel

from penstock.deployments.ingress.core.history.recent_answers import MAX_CALLS, AnswerRecord
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.ingress.http.openai.schemas import ErrorBody
from penstock.deployments.ingress.http.status.queue import MAX_LISTED, WaitBody, wait_body
from penstock.workers.request import RequestError

# Of ids in bodies of answers.
ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_", "score-", "rerank-")


class EventBody(BaseModel):
    """Something that happened to an answer."""

    at_s: float  # since the request came
    name: str  # sent, worker_lost, continued, preempted, commit_decision
    about: dict[str, Any]  # emitted_tokens and worker; of a commit_decision nt, td_s, tl_s, ...


class AdmissionBody(BaseModel):
    """A wait for a worker."""

    why: str  # new, or why the worker before does not compute it any more
    at_s: float  # since the request came
    waited_s: float | None  # none: it still waits, or ended without a worker


class AnswerBody(BaseModel):
    """One answer of the request. Seconds count from when the request came."""

    request_id: str
    model: str
    tenant: str
    priority: int
    arrived_at: float  # seconds since 1970
    finish: str | None  # finish reason, or code of an error; none: it runs
    worker: str | None  # address of the last one
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    evicted_tokens: int
    queue_s: float | None  # at the worker
    prefill_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    total_s: float  # so far, or to its end
    admissions: list[AdmissionBody]
    events: list[EventBody]
    waits: WaitBody | None  # at the gate now


class RequestBody(BaseModel):
    answers: list[AnswerBody]


def add_request_route(app: FastAPI, core: RequestCore, gates: Mapping[str, GateClient]) -> None:
    """`gates`: by the name of their model; a model without one is not there."""
    refusals: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody} for status in (401, 403, 404)
    }

    @app.get("/v1/penstock/requests/{request_id}", response_model=RequestBody, responses=refusals)
    async def explain(request: Request, request_id: str) -> RequestBody:
        """Where a request has been, for how long, and what was decided about its memory, while it
        runs and for some time after. `request_id`: of the header x-request-id, or the `id` of the
        answer. With API keys: of the caller's tenant, or any for a key with the role admin."""
        caller = request.scope["state"]["caller"]
        records = [
            each
            for each in core.recent.of(_plain(request_id))
            if caller.sees_all or each.tenant == caller.tenant
        ]
        if not records:
            raise RequestError(
                f"no request {request_id[:80]!a} here: an ingress remembers those that run and "
                f"the last {MAX_CALLS}, and with several ingresses another one may have had it",
                param="request_id",
                code="not_found",
            )
        return RequestBody(answers=[await _answer(each, gates) for each in records])


def _plain(request_id: str) -> str:
    """The id of the call: as in the header, without what the answers' bodies put before it."""
    for prefix in ID_PREFIXES:
        request_id = request_id.removeprefix(prefix)
    return request_id


async def _answer(record: AnswerRecord, gates: Mapping[str, GateClient]) -> AnswerBody:
    now_s = time.monotonic() if record.ended_s is None else record.ended_s
    times, usage, trace = record.times, record.usage, record.trace
    timings = times.timings(now_s)
    wait = None
    gate = gates.get(record.model)
    if record.finish is None and not trace.worker and gate is not None:
        reply = await gate.explain(MAX_LISTED)
        waits = () if reply is None else reply.waits
        wait = next((each for each in waits if each.request_id == record.request_id), None)
    return AnswerBody(
        request_id=record.request_id,
        model=record.model,
        tenant=record.tenant,
        priority=record.priority,
        arrived_at=record.arrived_at,
        finish=record.finish,
        worker=trace.worker or None,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        evicted_tokens=usage.evicted_tokens,
        queue_s=timings.queue_s,
        prefill_s=timings.prefill_s,
        first_token_s=timings.first_token_s,
        last_token_s=None if times.first_token_s is None else times.last_token_s - times.start_s,
        total_s=timings.total_s,
        admissions=[
            AdmissionBody(
                why=each.why,
                at_s=each.start_s - times.start_s,
                waited_s=None if each.end_s is None else each.end_s - each.start_s,
            )
            for each in trace.waits
        ],
        events=[
            EventBody(
                at_s=each.at_s - times.start_s,
                name=each.name.removeprefix("penstock."),
                about={k.removeprefix("penstock."): v for k, v in each.attributes.items()},
            )
            for each in trace.events
        ],
        waits=None if wait is None else wait_body(wait),
    )
