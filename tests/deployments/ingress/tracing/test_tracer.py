"""The tracer alone: trace ids, who decides what is sampled, times, errors."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import SpanKind, StatusCode

from penstock.deployments.ingress.core.errors import CATALOGUE
from penstock.deployments.ingress.core.tracing import SpanEvent, SpanRecord
from tests.deployments.ingress.tracing.spans import (
    NOT_SAMPLED,
    PARENT,
    SAMPLED,
    TRACE,
    Kept,
    about,
    below,
    id_of,
    one,
    parent_of,
    trace_of,
)

RESPONSE = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def test_a_trace_of_a_caller_goes_on():
    kept = Kept()
    trace = kept.tracer.begin("POST /x", {"a": 1}, SAMPLED, "vendor=1,other=2")
    trace.annotate({"b": "2"})
    assert kept.take() == []  # until it has ended
    trace.end()
    (span,) = kept.take()
    assert (trace_of(span), parent_of(span), trace.trace_id) == (TRACE, PARENT, TRACE)
    assert trace.response == f"00-{TRACE}-{id_of(span)}-01"
    assert span.context is not None
    assert span.context.trace_state.to_header() == "vendor=1,other=2"
    assert (span.name, span.kind, about(span)) == ("POST /x", SpanKind.SERVER, {"a": 1, "b": "2"})
    assert span.status.status_code is StatusCode.UNSET


BAD = (
    None,
    "",
    "nonsense",
    f"00-{'0' * 32}-{PARENT}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"ff-{TRACE}-{PARENT}-01",
    f"00-{TRACE.upper()}-{PARENT}-01",
    f"00-{TRACE}-{PARENT}",
    f"00-{TRACE}-{PARENT}-01-more",
)


@pytest.mark.parametrize("traceparent", BAD)
def test_without_a_valid_parent_a_trace_begins(traceparent):
    kept = Kept()
    trace = kept.tracer.begin("r", {}, traceparent, "vendor=1")
    trace.end()
    (span,) = kept.take()
    assert span.parent is None and trace_of(span) == trace.trace_id != TRACE
    found = RESPONSE.fullmatch(trace.response)
    assert found is not None and found.groups()[:2] == (trace.trace_id, id_of(span))
    assert int(found[3], 16) & 1  # sampled; a further flag says that the id is random


@given(st.text(max_size=80), st.text(max_size=80))
def test_no_header_makes_it_fail(traceparent, tracestate):
    trace = Kept().tracer.begin("r", {}, traceparent, tracestate)
    trace.end()
    assert RESPONSE.fullmatch(trace.response)


@pytest.mark.parametrize(
    ("ratio", "traceparent", "is_sampled"),
    [(1.0, None, True), (0.0, None, False), (0.0, SAMPLED, True), (1.0, NOT_SAMPLED, False)],
)
def test_who_decides_what_is_sampled(ratio, traceparent, is_sampled):
    kept = Kept(ratio)
    trace = kept.tracer.begin("r", {}, traceparent, None)
    assert trace.is_sampled is is_sampled
    assert int(trace.response[-2:], 16) & 1 == is_sampled
    if traceparent is not None:
        assert trace.trace_id == TRACE
    trace.end()
    assert len(kept.take()) == is_sampled


def test_the_part_that_is_sampled():
    kept = Kept(0.25)
    for _ in range(4000):
        kept.tracer.begin("r", {}, None, None).end()
    assert 800 < len(kept.take()) < 1200  # 1000, and 7 standard deviations


def test_spans_below_have_their_own_times_and_are_within_each_other():
    kept, began_ns = Kept(), time.time_ns()
    trace = kept.tracer.begin("r", {}, None, None)
    at_s = time.monotonic()
    child = SpanRecord("child", at_s + 1, at_s + 2, {"n": 3})
    event = SpanEvent("moved", at_s + 1.5, {"to": "there"})
    trace.add(SpanRecord("answer", at_s, at_s + 4, {}, (event,), (child,)))
    trace.end()
    spans = kept.take()
    root, answer, inner = (one(spans, name) for name in ("r", "answer", "child"))
    assert below(spans, root) == [answer] and below(spans, answer) == [inner]
    assert {trace_of(span) for span in spans} == {trace.trace_id}
    assert {answer.kind, inner.kind} == {SpanKind.INTERNAL}
    assert answer.start_time is not None and inner.start_time is not None
    assert (answer.end_time or 0) - answer.start_time == pytest.approx(4e9, abs=1000)
    assert inner.start_time - answer.start_time == pytest.approx(1e9, abs=1000)
    assert (inner.end_time or 0) - inner.start_time == pytest.approx(1e9, abs=1000)
    assert answer.events[0].timestamp - answer.start_time == pytest.approx(1.5e9, abs=1000)
    assert (answer.events[0].name, dict(answer.events[0].attributes or {})) == (
        "moved",
        {"to": "there"},
    )
    assert about(inner) == {"n": 3}
    assert began_ns <= (root.start_time or 0) <= answer.start_time


def test_a_span_below_may_come_after_the_end():
    """As of a response that goes on in the background."""
    kept = Kept()
    trace = kept.tracer.begin("r", {}, None, None)
    trace.end()
    trace.add(SpanRecord("answer", time.monotonic(), time.monotonic()))
    spans = kept.take()
    assert below(spans, one(spans, "r")) == [one(spans, "answer")]


@pytest.mark.parametrize("code", CATALOGUE)
def test_an_error_is_one_of_the_server_or_of_the_caller(code):
    kept = Kept()
    trace = kept.tracer.begin("r", {}, None, None)
    trace.fail(code)
    trace.add(SpanRecord("answer", 1.0, 2.0, error=code))
    trace.end()
    spans = kept.take()
    root, answer = one(spans, "r"), one(spans, "answer")
    is_fault = CATALOGUE[code].http_status >= 500
    assert root.status.status_code is (StatusCode.ERROR if is_fault else StatusCode.UNSET)
    assert about(root) == about(answer) == {"error.type": code}
    assert (answer.status.status_code, answer.status.description) == (StatusCode.ERROR, code)
