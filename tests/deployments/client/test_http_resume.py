"""Events of a stream, as they come in pieces: nothing is lost, and nothing comes twice."""

from __future__ import annotations

import time

import pytest

from penstock.deployments.client import http_resume

REQUEST = http_resume._http.Request(
    "POST", "http://h:1/v1/completions", headers={"x-key": "k"}, content=b"{}"
)
EVENTS = b"id: ab/1.00000000\ndata: {1}\n\n: waiting\nid: ab/2.00000000\ndata: {2}\n\n"
LOST = b'data: {"error":{"message":"m","type":"t","param":null,"code":"worker_lost"}}\n\n'


def resumption() -> http_resume._Resumption:
    response = http_resume._http.Response(200, headers={"x-request-id": "ab"})
    return http_resume._Resumption(REQUEST, response, 60.0)


@pytest.mark.parametrize("cut", range(len(EVENTS) + 1))
def test_only_whole_events_are_passed_on(cut: int) -> None:
    stream = resumption()
    passed = stream.whole_events(EVENTS[:cut])
    assert EVENTS.startswith(passed) and (not passed or passed.endswith(b"\n\n"))
    asked = stream.lost()
    num = passed.count(b"data")
    assert asked.headers.get("last-event-id") == (f"ab/{num}.00000000" if num else None)
    assert str(asked.url) == "http://h:1/v1/penstock/streams/ab" and asked.method == "GET"
    assert asked.headers["x-key"] == "k" and "content-length" not in asked.headers
    assert passed + stream.whole_events(EVENTS[len(passed) :]) == EVENTS


@pytest.mark.parametrize("before", [b"", EVENTS])
def test_what_came_before_the_end_of_a_lost_stream_is_passed_on(before: bytes) -> None:
    stream = resumption()
    assert stream.whole_events(before + LOST) == before
    assert stream.is_lost
    stream.lost()
    assert not stream.is_lost
    other = LOST.replace(b"worker_lost", b"internal_error")
    assert stream.whole_events(other) == other and not stream.is_lost


def test_a_stream_is_given_up_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = resumption()
    assert stream.may_try()
    now[0] = 61.0
    assert not stream.may_try()
    assert stream.whole_events(LOST) == LOST
    stream.whole_events(EVENTS)
    assert stream.may_try()  # it went on meanwhile
