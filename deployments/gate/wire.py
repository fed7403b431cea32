"""The gate's data as messages of its internal protocol (gate.proto), and back."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.deployments.gate.forecast.sampled import UNBOUNDED
from penstock.deployments.gate.types import (
    GateRequest,
    Refusal,
    Report,
    Running,
    Wait,
    WorkerSpec,
)
from penstock.deployments.prediction.distribution import MAX_LENGTH
from penstock.deployments.prediction.features import Features
from penstock.deployments.prediction.text_digest import TextDigest
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb

_SAME = (
    *("model", "tenant", "template", "prompt_tokens", "max_tokens", "min_tokens", "temperature"),
    *("top_p", "ignore_eos", "num_stop", "structured", "num_messages", "has_tools"),
)


def features_message(features: Features) -> pb.Features:
    message = pb.Features(**{name: getattr(features, name) for name in _SAME})
    if features.text is not None:
        message.text_keys = features.text.keys
        message.text_facts.extend(features.text.facts or ())
    return message


def features_from(message: pb.Features) -> Features:
    """Raises ValueError naming the invalid field."""
    values = {name: getattr(message, name) for name in _SAME}
    if not message.HasField("max_tokens"):
        values["max_tokens"] = None
    text = None
    if message.HasField("text_keys"):
        text = TextDigest(message.text_keys, tuple(message.text_facts) or None)
    return Features(**values, text=text)


def spec_from(message: pb.WorkerReport) -> WorkerSpec | None:
    """The worker of a report; None: its sizes are missing."""
    report = message.report
    if not (report.num_blocks and report.block_size and report.max_num_seqs):
        return None
    return WorkerSpec(
        message.address,
        message.epoch,
        capacity=report.num_blocks * report.block_size,
        block_size=report.block_size,
        slots=report.max_num_seqs,
    )


def request_from(message: pb.Offer, came_s: float) -> GateRequest:
    """The request of an offer that arrived at `came_s`. Raises ValueError for an invalid one."""
    deadline = came_s + message.remaining_s if message.HasField("remaining_s") else None
    return GateRequest(
        message.request_id,
        message.features.prompt_tokens,
        message.features.tenant,
        message.priority,
        deadline,
        message.ceiling or None,
        tuple(message.prefix),
    )


def reserved_request_from(message: pb.Offer, came_s: float, block_size: int) -> GateRequest:
    """The same for `reserve_max`: all tokens that it may need count as its prompt."""
    features, request = message.features, request_from(message, came_s)
    longest = features.max_tokens if features.HasField("max_tokens") else MAX_LENGTH
    whole = min(request.prompt_tokens + longest, request.ceiling or UNBOUNDED)
    reserved = -(-whole // block_size) * block_size
    return replace(request, prompt_tokens=reserved, ceiling=reserved)


def report_from(message: pb.WorkerReport) -> Report:
    report = message.report
    columns = (report.request_ids, report.generated, report.prompt_tokens, report.max_tokens)
    return Report(
        message.epoch,
        report.sequence,
        tuple(
            Running(name, generated, prompt, limit or None)
            for name, generated, prompt, limit in zip(*columns, strict=True)
        ),
        report.step_s,
        report.num_preemptions,
    )


def refusal_message(refusal: Refusal) -> pb.Refusal:
    return pb.Refusal(
        request_id=refusal.request_id,
        reason=refusal.reason,
        message=refusal.message,
        retry_after_s=refusal.retry_after_s,
    )


def wait_message(wait: Wait) -> pb.Wait:
    return pb.Wait(
        request_id=wait.request_id,
        tenant=wait.tenant,
        reason=wait.reason,
        waited_s=wait.waited_s,
        expected_s=wait.expected_s,
        worker=wait.worker or "",
        peak=wait.peak,
        limit=wait.limit,
    )


TOKEN_KEY = "penstock-gate-token"


@dataclass(frozen=True, slots=True)
class GateAddress:
    """Where the gate listens until its next restart, and the token to show."""

    address: str
    token: str
    pid: int
