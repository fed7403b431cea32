"""Bodies recorded from real clients, replayed: all are served, and the official types read them.

tools/client_recordings made the recordings. docs/reference/clients.md is their table.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic.types
import httpx
import openai.types
import openai.types.chat
import openai.types.responses
import pytest
from pydantic import TypeAdapter

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.http.ignored_fields import HEADER, FieldPolicy
from penstock.workers.request import Delta
from tests.deployments.serving import EngineBackend, Serving
from tools.client_recordings.table import has_result

FILES = sorted((Path(__file__).parent / "clients" / "recorded").glob("*.json"))
RECORDINGS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FILES}
EXCHANGES = [
    pytest.param(exchange, id=f"{name}-{i}")
    for name, recording in RECORDINGS.items()
    for i, exchange in enumerate(recording["exchanges"])
]
# Of each path: the types of an answer, and of an event of a stream.
TYPES: dict[str, tuple[Any, Any]] = {
    "/v1/chat/completions": (
        openai.types.chat.ChatCompletion,
        openai.types.chat.ChatCompletionChunk,
    ),
    # The type says that each chunk has a finish_reason, which the API itself does not do.
    "/v1/completions": (openai.types.Completion, dict[str, Any]),
    "/v1/responses": (
        openai.types.responses.Response,
        openai.types.responses.ResponseStreamEvent,
    ),
    "/v1/messages": (anthropic.types.Message, anthropic.types.RawMessageStreamEvent),
    "/v1/messages/count_tokens": (anthropic.types.MessageTokensCount, None),
    "/tokenize": (dict[str, int | list[int] | None], None),
}
# The type of the last event of a stream that went well.
LAST = {"message_stop", "response.completed", "response.incomplete", None}
MAX_TOKENS = 24  # of an answer, whatever the body says: agents ask for 32 000


class BriefEngine(EngineBackend):
    """The real engine, which is asked for short answers."""

    async def generate(self, admission: AdmissionRequest) -> AsyncIterator[Delta]:
        request = admission.request
        most = min(request.params.max_tokens or MAX_TOKENS, MAX_TOKENS)  # None: the whole context
        params = replace(request.params, max_tokens=most, min_tokens=0)
        brief = replace(admission, request=replace(request, params=params))
        async for delta in super().generate(brief):
            yield delta


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    backend = BriefEngine()
    with (
        Serving(backend, fields=FieldPolicy("ignore"), max_model_len=2048) as servers,
        httpx.Client(base_url=servers.base_url, timeout=60) as plain,
    ):
        yield plain
    backend.stop()


def events_of(text: str) -> list[Any]:
    """The data of the events of a stream, without the word that ends those of chat."""
    data = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    events = [json.loads(each) for each in data if each != "[DONE]"]
    return [each for each in events if each.get("type") != "ping"]  # of which no type is made


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_it_is_served_and_the_official_types_read_the_answer(
    server: httpx.Client, exchange: dict[str, Any]
) -> None:
    path, body = exchange["path"], exchange["body"]
    answer = server.post(path, json=body, headers=exchange.get("headers", {}))
    assert answer.status_code == 200, answer.text
    named = answer.headers.get(HEADER, "")
    assert sorted(named.split(", ")) == sorted(exchange.get("ignored", [""]))
    whole, event = TYPES[path.partition("?")[0]]
    if not body.get("stream"):
        TypeAdapter(whole).validate_json(answer.text)
        return
    events = events_of(answer.text)
    for each in events:
        TypeAdapter(event).validate_python(each)
    assert len(events) > 2 and events[-1].get("type") in LAST
    assert not [each for each in events if "error" in (each.get("type"), *each)]


def test_the_recordings_cover_each_endpoint_and_conversations_with_tools() -> None:
    by_path: dict[str, set[str]] = {}
    for name, recording in RECORDINGS.items():
        for exchange in recording["exchanges"]:
            path = exchange["path"].partition("?")[0]
            is_later, is_streamed = has_result(exchange["body"]), exchange["body"].get("stream")
            by_path.setdefault(path, set()).update([name] if is_later and is_streamed else [])
    assert by_path.keys() == TYPES.keys()
    assert {"codex", "openai", "langchain-openai"} <= by_path["/v1/responses"]
    assert {"claude-code", "anthropic", "litellm"} <= by_path["/v1/messages"]
    assert {"litellm", "langchain-openai", "openai-agents"} <= by_path["/v1/chat/completions"]
