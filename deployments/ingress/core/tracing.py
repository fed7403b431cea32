"""What is recorded of a request for its trace, and by whom: `Tracer` and `RequestTrace`.

Plain records without OpenTelemetry: ingress/tracing/ turns them into spans, and only where traces
are switched on and the request is sampled. They hold times, counts and addresses of workers, and
never a word of a prompt or an answer. All times are seconds on time.monotonic().
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.workers import stats
from penstock.workers.stats import MemoryEvent

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]

SENT, LOST, CONTINUED = "penstock.sent", "penstock.worker_lost", "penstock.continued"
PREEMPTED, DECIDED = "penstock.preempted", "penstock.commit_decision"
NEW = "new"  # why a request asks for admission; others are admission_gate.Returned


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened at a point in time."""

    name: str
    at_s: float
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One span that has ended, with those inside it. `error`: a code of the error catalogue."""

    name: str
    start_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    children: Sequence[SpanRecord] = ()
    error: str | None = None


@dataclass(slots=True)
class AdmissionWait:
    """From when an answer asked for a worker until it was sent to one.

    `end_s` None: it was not sent to any.
    """

    why: str  # NEW, or why the worker before does not compute it any more
    start_s: float
    end_s: float | None = None


@dataclass(slots=True, eq=False)
class AnswerTrace:
    """Where one answer has been. The pool writes it; core/history/ reads it."""

    waits: list[AdmissionWait] = field(default_factory=list)
    events: list[SpanEvent] = field(default_factory=list)
    worker: str = ""  # the address of the last one

    def asks(self, why: str) -> None:
        """It waits for admission."""
        self.waits.append(AdmissionWait(why, time.monotonic()))

    def sent(self, worker: str) -> None:
        """It was sent to the worker of that address, which ends its wait."""
        now_s, self.worker = time.monotonic(), worker
        if self.waits and self.waits[-1].end_s is None:
            self.waits[-1].end_s = now_s
        self.events.append(SpanEvent(SENT, now_s, {"penstock.worker": worker}))

    def note(self, name: str, num_emitted: int) -> None:
        """`name` happened at its worker, after so many tokens of the answer."""
        about: Attributes = {"penstock.worker": self.worker, "penstock.emitted_tokens": num_emitted}
        self.events.append(SpanEvent(name, time.monotonic(), about))

    def on_worker(self, event: MemoryEvent) -> None:
        """Its worker has preempted it, or decided whether to commit or to recompute."""
        about: dict[str, Value] = {
            "penstock.worker": self.worker,
            "penstock.emitted_tokens": event.num_generated,
            "penstock.tokens": event.num_tokens,
        }
        if event.kind == stats.DECIDED:
            about |= {
                "penstock.branch": event.branch,
                "penstock.other_rows": event.num_scheduled,
                "penstock.nt": event.ridge_tokens,
                "penstock.td_s": event.compute_s,
                "penstock.tl_s": event.load_s,
                "penstock.is_pressed": event.is_pressed,
            }
        name = DECIDED if event.kind == stats.DECIDED else PREEMPTED
        self.events.append(SpanEvent(name, time.monotonic(), about))

    def sent_before(self, at_s: float) -> float | None:
        """When it was last sent to a worker before `at_s`; None: it was not."""
        sent = [each.at_s for each in self.events if each.name == SENT and each.at_s <= at_s]
        return sent[-1] if sent else None


class RequestTrace(Protocol):
    """The trace of one request: the span of its connection, and what hangs below. Never fails."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, the caller's where it sent a `traceparent`."""
        ...

    @property
    def response(self) -> str:
        """The value of the header `traceresponse`: 00-TRACE-SPAN-FLAGS."""
        ...

    @property
    def is_sampled(self) -> bool:
        """Whether spans are sent; if not, nothing needs to be recorded."""
        ...

    def add(self, span: SpanRecord) -> None:
        """A span below this request's own, which may have ended before."""
        ...

    def annotate(self, attributes: Attributes) -> None:
        """What is known of the request only now."""
        ...

    def fail(self, code: str) -> None:
        """The request ends with this error of the catalogue. Nothing, once it has ended."""
        ...

    def end(self) -> None:
        """The request is over."""
        ...


class Tracer(Protocol):
    """Begins the traces of requests."""

    def begin(
        self, name: str, attributes: Attributes, traceparent: str | None, tracestate: str | None
    ) -> RequestTrace:
        """A request has come. `traceparent`, `tracestate`: W3C's headers as the caller sent them;
        None, or not valid: the trace begins here."""
        ...

    def close(self) -> None:
        """Send what is left, for a few seconds at most. Blocks: call it in a thread."""
        ...
