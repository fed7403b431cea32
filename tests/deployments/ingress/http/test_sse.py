"""The JSON and the events that clients read."""

from __future__ import annotations

import json
import math

from penstock.deployments.ingress.http.errors import json_bytes, server_sent


def test_json_is_short_and_in_utf8() -> None:
    body = {"text": 'a "quoted"\n thé 東京 \u2028', "none": None, "n": 1.5e-07, "list": [True, 1]}
    written = json_bytes(body)
    assert json.loads(written) == body
    assert "東京".encode() in written
    assert b": " not in written


def test_numbers_beyond_64_bits_are_told_again_as_they_came() -> None:
    body = {"maximum": 10**40, "minimum": -(1 << 64)}
    assert json.loads(json_bytes(body)) == body


def test_what_json_cannot_say_is_null() -> None:
    assert json.loads(json_bytes({"logprob": -math.inf})) == {"logprob": None}


def test_an_event_is_one_frame() -> None:
    assert server_sent({"a": "x\ny"}) == b'data: {"a":"x\\ny"}\n\n'
    assert server_sent({"a": 1}, "ping") == b'event: ping\ndata: {"a":1}\n\n'
