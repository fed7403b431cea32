"""Unknown fields of bodies: left out and named where the setting says so, refused where not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.deployments.ingress.http.ignored_fields import (
    HEADER,
    MAX_LOGGED,
    MAX_NAMED,
    FieldPolicy,
    IgnoredFields,
)
from penstock.workers.request import FinishReason, RequestError
from tests.deployments.serving import MODEL, scripted, tokenizer

USER = {"role": "user", "content": "a"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "a"},
    "/v1/messages": {"model": MODEL, "max_tokens": 4, "messages": [USER]},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": [USER]},
    "/v1/responses": {"input": "a"},
    "/tokenize": {"messages": [USER]},
    "/detokenize": {"tokens": [1]},
}
STREAMED = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]
UNKNOWN = {"mood": 1, "x\r\ny": "a", "temper ature": {"a": [1]}}


@pytest.fixture(scope="module")
def lenient() -> Iterator[httpx.Client]:
    ids = tokenizer().encode("Ja.")
    with scripted(ids, FinishReason.STOP, fields=FieldPolicy("ignore")) as (_, plain):
        yield plain


@pytest.fixture(scope="module")
def strict() -> Iterator[httpx.Client]:
    ids = tokenizer().encode("Ja.")
    with scripted(ids, FinishReason.STOP, fields=FieldPolicy("refuse")) as (_, plain):
        yield plain


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_are_left_out_and_named(lenient: httpx.Client, path: str) -> None:
    plain = lenient.post(path, json=BODIES[path])
    assert plain.status_code == 200, plain.text
    assert HEADER not in plain.headers
    answer = lenient.post(path, json=BODIES[path] | UNKNOWN | {"no": None, "off": False, "n_": 0})
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == "mood, x??y, temper?ature"


@pytest.mark.parametrize("path", STREAMED)
def test_streams_name_them_too(lenient: httpx.Client, path: str) -> None:
    answer = lenient.post(path, json=BODIES[path] | {"stream": True, "mood": 1})
    assert (answer.status_code, answer.headers[HEADER]) == (200, "mood")
    assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("path", BODIES)
def test_they_are_refused_where_the_setting_says_so(strict: httpx.Client, path: str) -> None:
    answer = strict.post(path, json=BODIES[path] | {"mood": 1})
    assert answer.status_code == 400
    assert "mood" in answer.text


@pytest.mark.parametrize(
    ("path", "changed", "named"),
    [
        ("/v1/chat/completions", {"messages": [{**USER, "mood": 1}]}, "messages.mood"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "m": 1}]}]},
            "messages.content.m",
        ),
        (
            "/v1/chat/completions",
            {"tools": [{"type": "function", "function": {"name": "a", "mood": 1}}], "mood": 2},
            "mood, tools.function.mood",
        ),
        ("/v1/messages", {"messages": [{**USER, "mood": 1}]}, "messages.mood"),
        (
            "/v1/messages",
            {"system": [{"type": "text", "text": "a", "mood": 1}]},
            "system.mood",
        ),
        ("/v1/responses", {"input": [{**USER, "mood": 1}]}, "input.mood"),
        ("/v1/responses", {"text": {"format": {"type": "text", "m": 1}}}, "text.format.m"),
    ],
)
def test_unknown_fields_of_parts_are_named_by_path(
    lenient: httpx.Client, path: str, changed: dict[str, Any], named: str
) -> None:
    answer = lenient.post(path, json=BODIES[path] | changed)
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == named


@pytest.mark.parametrize(
    ("path", "changed", "param"),
    [
        ("/v1/chat/completions", {"temperature": "hot"}, "temperature"),
        ("/v1/chat/completions", {"mood": 1, "max_tokens": 1.5}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"m": 1, "role": "user", "content": 5}]}, "content"),
        ("/v1/chat/completions", {"reasoning_effort": "huge"}, "reasoning_effort"),
        ("/v1/chat/completions", {"suffix": "b"}, "suffix"),
        ("/v1/chat/completions", {"mirostat": 2}, "mirostat"),
        ("/v1/chat/completions", {"structural_tag": "{}"}, "structural_tag"),
        ("/v1/completions", {"structured_outputs": {"structural_tag": "{}"}}, "structural_tag"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking"),
        ("/v1/messages", {"container": "a"}, "container"),
        ("/v1/responses", {"reasoning": {"effort": 5}}, "reasoning.effort"),
        ("/v1/responses", {"conversation": "a"}, "conversation"),
    ],
)
def test_bad_values_and_changed_meanings_are_refused_all_the_same(
    lenient: httpx.Client, path: str, changed: dict[str, Any], param: str
) -> None:
    answer = lenient.post(path, json=BODIES[path] | changed)
    assert answer.status_code == 400
    assert param in answer.text


def test_each_is_logged_once_and_not_without_bound(caplog: pytest.LogCaptureFixture) -> None:
    policy = FieldPolicy("ignore")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            IgnoredFields(policy).add("messages[7].mood", 1)
        assert [record.getMessage() for record in caplog.records] == [
            "a client sends the field messages.mood, which is ignored (said once)"
        ]
        for i in range(2 * MAX_LOGGED):
            IgnoredFields(policy).add(f"x{i}")
    assert len(caplog.records) == MAX_LOGGED


def test_the_header_is_bounded() -> None:
    left_out = IgnoredFields(FieldPolicy("ignore"))
    for i in range(10 * MAX_NAMED):
        left_out.add("é\r\n" * 1000 + str(i))  # one name, once it is cut
        left_out.add(f"field{i}")
    ((name, value),) = left_out.headers()
    names = value.decode().split(", ")
    assert (name.decode(), len(names), names[-1]) == (HEADER, MAX_NAMED + 1, "and-more")
    assert value.isascii() and b"\r" not in value


def test_without_a_policy_all_is_refused() -> None:
    with pytest.raises(RequestError, match="no such thing") as refusal:
        IgnoredFields().drop("tools.a", "no such thing", param="tools[0]")
    assert refusal.value.param == "tools[0]"
