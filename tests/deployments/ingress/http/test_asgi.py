"""The JSON and the events that clients read."""

from __future__ import annotations

import json
import math

import httpx

from penstock.deployments.ingress.http import asgi
from penstock.deployments.ingress.http.events import json_bytes, server_sent
from penstock.workers.request import FinishReason
from tests.deployments.serving import HeldBackend, Serving, scripted


def test_json_is_short_and_in_utf8() -> None:
    body = {"text": 'a "quoted"\n thé 東京 \u2028', "none": None, "n": 1.5e-07, "list": [True, 1]}
    written = json_bytes(body)
    assert json.loads(written) == body
    assert "東京".encode() in written
    assert b": " not in written


def test_numbers_beyond_64_bits_are_echoed_as_they_came() -> None:
    body = {"maximum": 10**40, "minimum": -(1 << 64)}
    assert json.loads(json_bytes(body)) == body


def test_what_json_cannot_say_is_null() -> None:
    assert json.loads(json_bytes({"logprob": -math.inf})) == {"logprob": None}


def test_an_event_is_one_frame() -> None:
    assert server_sent({"a": "x\ny"}) == b'data: {"a":"x\\ny"}\n\n'
    assert server_sent({"a": 1}, "ping") == b'event: ping\ndata: {"a":1}\n\n'


def test_a_stream_that_waits_gets_comments_and_its_events_follow(monkeypatch) -> None:
    monkeypatch.setattr(asgi, "KEEP_ALIVE_S", 0.15)
    body = {"prompt": "x", "max_tokens": 4, "stream": True}
    backend, seen = HeldBackend([300], [301], FinishReason.LENGTH), []
    with (
        Serving(backend) as servers,
        httpx.stream("POST", f"{servers.base_url}/v1/completions", json=body, timeout=60) as answer,
    ):
        assert answer.status_code == 200  # before there is any token
        for line in answer.iter_lines():
            seen += [line] if line else []
            if len(seen) == 2:
                backend.may_answer.set()
    comments = [line for line in seen if line.startswith(":")]
    events = [line for line in seen if line.startswith("data: ")]
    assert len(comments) >= 2 and seen[: len(comments)] == comments
    assert events[-1] == "data: [DONE]" and len(events) >= 2
    assert len(comments) + len(events) == len(seen)


def test_a_stream_with_events_gets_no_comment_and_an_early_failure_keeps_its_status() -> None:
    body = {"prompt": "x", "max_tokens": 4, "stream": True}
    with scripted([300], FinishReason.LENGTH) as (_, plain):
        assert ": waiting" not in plain.post("/v1/completions", json=body).text
    with scripted("no_worker") as (_, plain):
        answer = plain.post("/v1/completions", json=body)
        assert answer.status_code == 503 and "retry-after" in answer.headers


def test_a_failure_after_a_comment_is_an_event(monkeypatch) -> None:
    monkeypatch.setattr(asgi, "KEEP_ALIVE_S", 0.1)
    body = {"prompt": "x", "max_tokens": 4, "stream": True}
    backend, text = HeldBackend("no_worker"), ""
    with (
        Serving(backend) as servers,
        httpx.stream("POST", f"{servers.base_url}/v1/completions", json=body, timeout=60) as answer,
    ):
        for piece in answer.iter_text():
            text += piece
            if text.count(asgi.COMMENT.decode()) >= 2:
                backend.may_answer.set()
    assert answer.status_code == 200
    comments, _, event = text.rpartition(asgi.COMMENT.decode())
    assert comments.count(asgi.COMMENT.decode()) >= 1 and '"code":"no_worker"' in event
