"""The records of a journal as bytes: protos/penstock/internal/v1/journal.proto."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from google.protobuf.message import DecodeError

from penstock.protos.penstock.internal.v1 import journal_pb2 as pb
from penstock.workers.channel.codec import delta_from, delta_message
from penstock.workers.channel.peer import joined
from penstock.workers.request import Delta

VERSION = 1


class UnreadableError(ValueError):
    """A record that this release cannot read."""


@dataclass(frozen=True, slots=True)
class Head:
    """A call as it came.

    `route`: path of the HTTP endpoint, or full name of the gRPC method. `seed`: of the draws of a
    request that gave none. `ttl_s`: from the last record to the end of the journal.
    `before`: what the body only names, in a form of the endpoint's own. `key_id`: of the API key.
    `deadline_s`: the client's, in seconds since 1970; None: it gave none.
    """

    route: str
    body: bytes
    seed: int
    created_s: int
    ttl_s: float
    principal: str = ""
    client_id: str | None = None
    wants_timings: bool = False
    before: bytes = b""
    key_id: str = ""
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """What records have of one answer. `ended_s`: Unix time of its end; None: it has not ended.

    `computes`: WorkerInfo.computes of the worker that made its tokens; empty: unknown.
    """

    deltas: list[Delta] = field(default_factory=list)
    ended_s: int | None = None
    computes: str = ""


def head_bytes(head: Head) -> bytes:
    return pb.CallHead(
        version=VERSION,
        route=head.route,
        body=head.body,
        principal=head.principal,
        client_id=head.client_id or "",
        created_s=head.created_s,
        seed=head.seed,
        wants_timings=head.wants_timings,
        ttl_s=head.ttl_s,
        before=head.before,
        key_id=head.key_id,
        deadline_s=head.deadline_s or 0.0,
    ).SerializeToString()


def head_from(record: bytes) -> Head:
    """Raises UnreadableError."""
    try:
        message = pb.CallHead.FromString(record)
    except DecodeError as error:
        raise UnreadableError(str(error)) from None
    if message.version != VERSION:
        raise UnreadableError(f"version {message.version}, and this release reads {VERSION}")
    return Head(
        message.route,
        message.body,
        message.seed,
        message.created_s,
        message.ttl_s,
        message.principal,
        message.client_id or None,
        message.wants_timings,
        message.before,
        message.key_id,
        message.deadline_s or None,
    )


def record_bytes(deltas: Iterable[Delta], ended_s: Mapping[str, int] | None = None) -> bytes:
    """One record of all `deltas`; those of the same answer are joined.

    `ended_s`: Unix time at which answers ended, by their request ids.
    """
    by_answer: dict[str, Delta] = {}
    computes: dict[str, str] = {}
    for delta in deltas:
        if delta.computes:
            computes[delta.request_id] = delta.computes
        whole = by_answer.get(delta.request_id)
        if whole is None:  # a new one: the parts still belong to the stream
            whole = by_answer[delta.request_id] = Delta(delta.request_id, [])
        joined(whole, delta)
    entries = (
        pb.CallEntry(
            request_id=answer,
            delta=delta_message(delta, 0),
            ended_s=(ended_s or {}).get(answer, 0),
            computes=computes.get(answer, ""),
        )
        for answer, delta in by_answer.items()
    )
    return pb.CallRecord(entries=entries).SerializeToString()


def kept_from(records: Iterable[bytes]) -> dict[str, Kept]:
    """What is kept of each answer, by its request id. Raises UnreadableError."""
    kept: dict[str, Kept] = defaultdict(Kept)
    for record in records:
        try:
            message = pb.CallRecord.FromString(record)
        except DecodeError as error:
            raise UnreadableError(str(error)) from None
        for entry in message.entries:
            answer = kept[entry.request_id]
            answer.deltas.append(delta_from(entry.delta, entry.request_id))
            if entry.ended_s or entry.computes:
                kept[entry.request_id] = replace(
                    answer,
                    ended_s=entry.ended_s or answer.ended_s,
                    computes=entry.computes or answer.computes,
                )
    return dict(kept)
