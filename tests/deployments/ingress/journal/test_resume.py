"""Streams that continue where they were cut: each answer is that of an undisturbed stream."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.deployments.serving import MODEL, EngineBackend, Serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Tell me of the sea and of ships."}]
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["sea", "ship"]}, "far": {"type": "boolean"}},
            "required": ["at", "far"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["one", "two"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, {"prompt": "It was", "temperature": 0, "max_tokens": 40}),
    "unseeded": (CHAT, {"messages": MESSAGES, "temperature": 1.3, "max_tokens": 40}),
    "stop": (
        COMPLETIONS,
        {"prompt": "It was", "temperature": 0, "max_tokens": 60, "stop": ["zzz", "\n\n", "and"]},
    ),
    "logprobs": (
        COMPLETIONS,
        {"prompt": "It was", "temperature": 0.8, "seed": 3, "max_tokens": 20, "logprobs": 2},
    ),
    "chat logprobs": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 12, "logprobs": True, "top_logprobs": 2},
    ),
    "prompt logprobs": (
        COMPLETIONS,
        {"prompt": "It was", "max_tokens": 9, "prompt_logprobs": 1, "return_token_ids": True},
    ),
    "penalties": (
        COMPLETIONS,
        {
            "prompt": "the the the",
            "temperature": 0,
            "max_tokens": 30,
            "repetition_penalty": 1.4,
            "frequency_penalty": 1.0,
            "presence_penalty": 0.5,
            "min_tokens": 20,
        },
    ),
    "schema": (
        CHAT,
        {
            "messages": MESSAGES,
            "max_tokens": 60,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "pair", "schema": SCHEMA},
            },
        },
    ),
    "tools": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 80, "tools": [LOOK], "tool_choice": "required"},
    ),
    "n": (COMPLETIONS, {"prompt": "It was", "n": 3, "max_tokens": 12, "temperature": 1.0}),
    "prompts": (COMPLETIONS, {"prompt": ["It was", "A ship"], "max_tokens": 12, "n": 2}),
    "sink window": (
        COMPLETIONS,
        {
            "prompt": "It was",
            "temperature": 0,
            "max_tokens": 150,
            "ignore_eos": True,
            "context_policy": "sink_window",
            "sinks": 4,
            "window": 32,
            "roll": 16,
        },
    ),
}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("state")
    folder.chmod(0o700)
    backend = EngineBackend()
    with Serving(backend, state_url=f"sqlite://{folder}") as servers:
        yield servers
    backend.stop()


@pytest.fixture(scope="module")
def http(serving: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serving.base_url, timeout=60) as client:
        yield client


def events_of(lines: Iterator[str], num: int | None = None) -> tuple[list[Any], list[str | None]]:
    """The first `num` events of a stream, and their ids; all without `num`."""
    bodies: list[Any] = []
    ids: list[str | None] = []
    event_id = None
    for line in lines:
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            bodies.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
            ids.append(event_id)
            event_id = None
            if len(bodies) == num:
                break
    return bodies, ids


def whole_of(events: list[Any]) -> dict[int, dict[str, Any]]:
    """What each choice came to. A role that comes twice is one."""
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) else ():
            whole = choices[choice["index"]]
            delta = choice.get("delta", {})
            whole["text"].append(choice.get("text") or delta.get("content") or "")
            whole["ids"] += choice.get("token_ids") or []
            for name, value in (choice.get("logprobs") or {}).items():
                whole[name] += value or []
            for call in delta.get("tool_calls", ()):
                whole["calls"].append(
                    (call["index"], call.get("id"), call["function"].get("name"))
                    if "id" in call
                    else call["index"]
                )
                whole["arguments"].append(call["function"]["arguments"])
            if choice["finish_reason"] is not None:
                whole["finish"].append((choice["finish_reason"], choice["stop_reason"]))
            if "prompt_logprobs" in choice:
                whole["prompt"].append(choice["prompt_logprobs"])
    for whole in choices.values():
        whole["text"], whole["arguments"] = "".join(whole["text"]), "".join(whole["arguments"])
        whole["calls"] = [each for each in whole["calls"] if isinstance(each, tuple)]
    return {index: dict(whole) for index, whole in choices.items()}


def stream(http: httpx.Client, path: str, body: dict[str, Any], num: int | None = None) -> Any:
    """The id of a stream, and its first `num` events with their ids; then it is cut."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["x-penstock-resumable"] == "1"
        return response.headers["x-request-id"], *events_of(response.iter_lines(), num)


def resume(http: httpx.Client, call_id: str, after: str | None) -> tuple[list[Any], list[Any]]:
    headers = {} if after is None else {"Last-Event-ID": after}
    with http.stream("GET", f"/v1/penstock/streams/{call_id}", headers=headers) as response:
        assert response.status_code == 200, response.read()
        return events_of(response.iter_lines())


def usage_of(events: list[Any]) -> dict[str, Any]:
    (usage,) = [event["usage"] for event in events if isinstance(event, dict) and event["usage"]]
    usage.pop("prompt_tokens_details")  # what the cache had differs
    return dict(usage)


@pytest.mark.parametrize("name", BODIES)
def test_a_stream_that_was_cut_ends_as_if_it_were_not(http: httpx.Client, name: str) -> None:
    path, body = BODIES[name]
    for cut in (1, 2, 5):
        call_id, begun, ids = stream(http, path, body, cut)
        rest, _ = resume(http, call_id, ids[-1])
        again, all_ids = resume(http, call_id, None)
        assert whole_of(begun + rest) == whole_of(again)
        assert usage_of(rest) == usage_of(again)
        assert rest[-1] == again[-1] == "[DONE]"
        assert {each["created"] for each in begun + rest + again if each != "[DONE]"} == {
            begun[0]["created"]
        }
        # and after each event of the whole stream, where nothing is computed any more
        for num, event_id in enumerate(all_ids):
            if event_id is not None:
                rest, _ = resume(http, call_id, event_id)
                assert whole_of(again[: num + 1] + rest) == whole_of(again)


@pytest.mark.parametrize("name", ["greedy", "logprobs", "stop", "penalties", "sink window"])
def test_the_answer_is_that_of_a_server_without_journals(http: httpx.Client, name: str) -> None:
    path, body = BODIES[name]
    backend = EngineBackend()
    with Serving(backend) as plain, httpx.Client(base_url=plain.base_url, timeout=60) as client:
        given = {**body, "stream": True}
        with client.stream("POST", path, json=given) as response:
            alone, ids = events_of(response.iter_lines())
            assert response.headers["x-penstock-resumable"] == "0"
        assert ids == [None] * len(ids)
        refused = client.get("/v1/penstock/streams/ab")
        assert refused.status_code == 501 and refused.json()["error"]["code"] == "no_journal"
    backend.stop()
    call_id, begun, ids = stream(http, path, body, 4)
    rest, _ = resume(http, call_id, ids[-1])
    assert whole_of(begun + rest) == whole_of(alone)


RESPONSES, ANTHROPIC = "/v1/responses", "/v1/messages"
LOOK_FUNCTION = {"type": "function", **LOOK["function"]}
LOOK_TOOL = {"name": "look", "input_schema": LOOK["function"]["parameters"]}
NUMBERED: dict[str, tuple[str, dict[str, Any]]] = {
    "response": (RESPONSES, {"input": "Of ships.", "temperature": 1.2, "max_output_tokens": 14}),
    "response stop": (
        RESPONSES,
        {"input": "It was", "temperature": 0, "max_output_tokens": 60, "stop": ["and", "e "]},
    ),
    "response tools": (
        RESPONSES,
        {"input": "Look", "max_output_tokens": 80, "tools": [LOOK_FUNCTION]}
        | {"tool_choice": "required"},
    ),
    "message": (
        ANTHROPIC,
        {"model": MODEL, "messages": MESSAGES, "temperature": 1.0, "max_tokens": 14},
    ),
    "message tools": (
        ANTHROPIC,
        {"model": MODEL, "messages": MESSAGES, "max_tokens": 80, "tools": [LOOK_TOOL]}
        | {"tool_choice": {"type": "any"}},
    ),
}


@pytest.mark.parametrize("name", NUMBERED)
def test_streams_with_numbered_events_go_on_after_any_event(http: httpx.Client, name: str) -> None:
    path, body = NUMBERED[name]
    call_id, begun, ids = stream_numbered(http, path, body, 4)
    rest, _ = resume(http, call_id, ids[-1])
    again, all_ids = resume(http, call_id, None)
    assert begun + rest == again
    assert None not in all_ids and len(set(all_ids)) == len(all_ids)
    assert ids == all_ids[: len(ids)]
    for num in [*range(0, len(again) - 1, 1 + len(again) // 12), len(again) - 1]:
        rest, rest_ids = resume(http, call_id, all_ids[num])
        assert rest == again[num + 1 :] and rest_ids == all_ids[num + 1 :]
    if path == RESPONSES:
        assert [event["sequence_number"] for event in again] == list(range(len(again)))
        query = {"stream": "true", "starting_after": "5"}
        with http.stream("GET", f"{path}/resp_{call_id}", params=query) as response:
            assert events_of(response.iter_lines())[0] == again[6:]
        assert http.get(f"{path}/resp_{call_id}").json() == again[-1]["response"]


def stream_numbered(http: httpx.Client, path: str, body: dict[str, Any], num: int) -> Any:
    """As `stream`, without what only the first two endpoints know."""
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["x-penstock-resumable"] == "1"
        return response.headers["x-request-id"], *events_of(response.iter_lines(), num)
