"""`GET /v1/penstock/queue`: who waits at the gate, until when and why, and how the gate does.

Asks the gate; while it is away, says so. Knows nothing of how the gate decides.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel

from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.ingress.http.openai.schemas import ErrorBody
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb
from penstock.workers.request import RequestError

MAX_LISTED = 1000


class WaitBody(BaseModel):
    """A request that waits, in the order in which they would go in."""

    request_id: str
    tenant: str
    reason: str  # "memory", "slots", "behind" (others go first), "no_worker"
    waited_s: float
    expected_s: float | None  # until it goes in, as predicted; none: cannot be told
    worker: str | None  # of the first: where it fits soonest
    peak_tokens: int | None  # that would be needed there, at the quantile, were it to go in now
    limit_tokens: int | None  # that may be


class BookBody(BaseModel):
    """What a worker holds, as the gate knows it."""

    worker: str  # `id` of /v1/penstock/status
    num_held: int
    slots: int
    used_tokens: int
    capacity_tokens: int
    headroom: float  # share of the memory that is kept free for what was foretold wrongly
    is_open: bool  # false: it had no room after all, and has not reported since


class QueueBody(BaseModel):
    gate: bool  # whether this ingress is connected with the gate
    admission: str
    breaker: str  # "closed", "open" (nobody asks for some seconds), "half_open"
    num_waiting: int
    num_passed: int  # of this ingress: came in with a pass, asked, went without the gate
    num_asked: int
    num_fallback: int
    num_learnt: int  # answers, since the gate started
    waiting: list[WaitBody]
    workers: list[BookBody]


def add_queue_route(app: FastAPI, gate: GateClient | None, admission: str) -> None:
    refusals: dict[int | str, dict[str, Any]] = {401: {"model": ErrorBody}}

    @app.get("/v1/penstock/queue", response_model=QueueBody, responses=refusals)
    async def queue(request: Request) -> QueueBody:
        """Who waits at the gate, until when as far as can be foretold, and why: the first 50, or
        as many as `limit` says."""
        told = None if gate is None else await gate.explain(_limit(request))
        return QueueBody(
            gate=told is not None,
            admission=admission,
            breaker="closed" if gate is None else gate.breaker_state,
            num_waiting=0 if told is None else told.num_waiting,
            num_passed=0 if gate is None else gate.num_on_credit,
            num_asked=0 if gate is None else gate.num_asked,
            num_fallback=0 if gate is None else gate.num_fallback,
            num_learnt=0 if gate is None else gate.figures.num_learnt,
            waiting=[] if told is None else [_wait(each) for each in told.waits],
            workers=[] if told is None else [_book(each) for each in told.workers],
        )


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", "50")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_LISTED):
        raise RequestError(f"limit must lie in [1, {MAX_LISTED}]", param="limit")
    return int(text)


def _wait(wait: pb.Wait) -> WaitBody:
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


def _book(book: pb.WorkerAccount) -> BookBody:
    return BookBody(
        worker=book.worker,
        num_held=book.num_held,
        slots=book.slots,
        used_tokens=book.used,
        capacity_tokens=book.capacity,
        headroom=book.headroom,
        is_open=book.is_open,
    )
