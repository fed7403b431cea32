"""`GET /v1/penstock/queue`: which requests wait at the gate, for how long and why, and its state.

Asks the gate for each answer; `gate: false` while this ingress has no connection to it. Several
models have a gate each: the answer is of all of them, or of the one that `?model=` names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel

from penstock.deployments.ingress.core.billing import BATCH_PREFIX
from penstock.deployments.ingress.core.service import RequestCore
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.ingress.http.openai.schemas import ErrorBody
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb
from penstock.workers.request import RequestError

MAX_LISTED = 1000


class WaitBody(BaseModel):
    """A request that waits; the list is in the order of admission."""

    request_id: str
    tenant: str
    reason: str  # "memory", "slots", "behind" (others go first), "no_worker"
    waited_s: float
    expected_s: float | None  # predicted time until its admission; none: unknown
    worker: str | None  # of the first request: the worker where it fits soonest
    peak_tokens: int | None  # peak there, at the quantile, if it were admitted now
    limit_tokens: int | None  # the most that the peak may be


class WorkerAccountBody(BaseModel):
    """What a worker holds, by the gate's accounts."""

    worker: str  # `id` of /v1/penstock/status
    num_held: int
    slots: int
    used_tokens: int
    capacity_tokens: int
    headroom: float  # share of the memory that is kept free for wrong predictions
    is_open: bool  # false: it declined a request for lack of room and has not reported since


class QueueBody(BaseModel):
    gate: bool  # whether this ingress is connected to the gate
    admission: str
    breaker: str  # "closed", "open" (the gate is not asked for some seconds), "half_open"
    num_waiting: int
    num_passed: int  # requests of this ingress that were admitted on credit
    num_asked: int  # those that asked the gate
    num_fallback: int  # those that were sent without the gate
    num_learnt: int  # answers that the predictor has learnt from since the gate started
    waiting: list[WaitBody]
    workers: list[WorkerAccountBody]


def add_queue_route(
    app: FastAPI, core: RequestCore, gates: Mapping[str, GateClient], admission: str
) -> None:
    """`gates`: by the name of their model; a model without one is not there."""
    refusals: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody} for status in (401, 403)
    }

    @app.get("/v1/penstock/queue", response_model=QueueBody, responses=refusals)
    async def queue(request: Request) -> QueueBody:
        """The requests that wait at the gate, each with its predicted wait and the reason: the
        first 50, or the first `limit`. With API keys: those of the caller's tenant, or all for a
        key with the role admin. With several models: of all, or of `model` alone."""
        limit, caller = _limit(request), request.scope["state"]["caller"]
        most = limit if caller.sees_all else MAX_LISTED
        asked = list(gates.values())
        if name := request.query_params.get("model"):
            asked = [gate for of, gate in gates.items() if of == core.model(name).model]
        replies = await asyncio.gather(*(gate.explain(most) for gate in asked))
        reached = [reply for reply in replies if reply is not None]
        waits = [wait for reply in reached for wait in reply.waits][:most]
        breakers = [gate.breaker_state for gate in asked]
        if not caller.sees_all:
            own = (caller.tenant, f"{BATCH_PREFIX}{caller.tenant}")
            waits = [each for each in waits if each.tenant in own][:limit]
        return QueueBody(
            gate=bool(asked) and len(reached) == len(asked),
            admission=admission,
            breaker=next((each for each in breakers if each != "closed"), "closed"),
            num_waiting=sum(reply.num_waiting for reply in reached),
            num_passed=sum(gate.num_on_credit for gate in asked),
            num_asked=sum(gate.num_asked for gate in asked),
            num_fallback=sum(gate.num_fallback for gate in asked),
            num_learnt=sum(gate.figures.num_learnt for gate in asked),
            waiting=[wait_body(each) for each in waits],
            workers=[_account(each) for reply in reached for each in reply.workers],
        )


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", "50")
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= MAX_LISTED):
        raise RequestError(f"limit must lie in [1, {MAX_LISTED}]", param="limit")
    return int(text)


def wait_body(wait: pb.Wait) -> WaitBody:
    return WaitBody(
        request_id=wait.request_id,
        tenant=wait.tenant,
        reason=wait.reason,
        waited_s=wait.waited_s,
        expected_s=wait.expected_s if wait.HasField("expected_s") else None,
        worker=wait.worker or None,
        peak_tokens=wait.peak if wait.HasField("peak") else None,
        limit_tokens=wait.limit if wait.HasField("limit") else None,
    )


def _account(account: pb.WorkerAccount) -> WorkerAccountBody:
    return WorkerAccountBody(
        worker=account.worker,
        num_held=account.num_held,
        slots=account.slots,
        used_tokens=account.used,
        capacity_tokens=account.capacity,
        headroom=account.headroom,
        is_open=account.is_open,
    )
