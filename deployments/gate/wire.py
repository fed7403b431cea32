"""The gate's data as messages of its internal protocol (gate.proto), and back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.deployments.gate.forecast.sampled import UNBOUNDED
from penstock.deployments.gate.types import (
    Expiry,
    GateRequest,
    Outcome,
    Report,
    Running,
    Ticket,
    Wait,
    WorkerSpec,
)
from penstock.deployments.prediction.distribution import MAX_LENGTH
from penstock.deployments.prediction.features import Features
from penstock.deployments.prediction.text_digest import TextDigest
from penstock.protos.penstock.internal.v1 import gate_pb2 as pb

STEP_S = (1e-5, 60.0)  # least and most that is believed of a step's duration
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


def text_message(request_id: str, features: pb.Features) -> pb.TextFeatures:
    """The text's part of `features`."""
    return pb.TextFeatures(
        request_id=request_id, keys=features.text_keys, facts=features.text_facts
    )


def features_from(message: pb.Features, sent_text: pb.TextFeatures | None = None) -> Features:
    """`sent_text`: of an offer, whose features have none. Raises ValueError naming the invalid
    field."""
    values = {name: getattr(message, name) for name in _SAME}
    if not message.HasField("max_tokens"):
        values["max_tokens"] = None
    text = None
    if sent_text is not None:
        text = TextDigest(sent_text.keys, tuple(sent_text.facts) or None)
    elif message.HasField("text_keys"):
        text = TextDigest(message.text_keys, tuple(message.text_facts) or None)
    return Features(**values, text=text)


def spec_from(message: pb.WorkerReport, tokenizer: str = "") -> WorkerSpec | None:
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
        tokenizer=tokenizer,
    )


def request_from(message: pb.Offer, came_s: float, tokenizer: str = "") -> GateRequest:
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
        tokenizer,
        message.generated,
        message.weight or 1.0,
    )


def reserved_request_from(
    message: pb.Offer, came_s: float, block_size: int, tokenizer: str = ""
) -> GateRequest:
    """The same for `reserve_max`: all tokens that it may need count as its prompt."""
    features, request = message.features, request_from(message, came_s, tokenizer)
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
        min(max(report.step_s, STEP_S[0]), STEP_S[1]) if report.step_s > 0 else 0.0,
        report.num_preemptions,
        report.is_draining,
        tuple(report.step_costs),
    )


def add_outcome(message: pb.ToIngress, outcome: Outcome) -> None:
    """Add the decision to what is sent to the ingress of its request."""
    name = outcome.request_id
    if isinstance(outcome, Ticket):
        message.tickets.add(request_id=name, epoch=outcome.epoch)
    elif isinstance(outcome, Expiry):
        message.expired.append(name)
    else:
        message.refusals.add(
            request_id=name,
            reason=outcome.reason,
            message=outcome.message,
            retry_after_s=outcome.retry_after_s,
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


@dataclass(frozen=True, slots=True)
class GateAddress:
    """Where the gate listens until its next restart, the token that both ends prove to know, and
    what is in force."""

    address: str
    token: str = field(repr=False)
    pid: int
    generation: int = 0  # of its settings
    digest: str = ""  # of its settings (GateSetup.digest)
    certificate: bytes = b""  # of the gate, DER; empty: it is reached in the clear
