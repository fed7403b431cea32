"""Tools, shapes and thinking over Anthropic's Messages API, as its official client reads them.

Oracles: the client; json and jsonschema; the prompt that the model got.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest

from penstock.deployments.ingress.http.anthropic.blocks import known_turn, messages_of
from penstock.deployments.ingress.http.anthropic.rendering import MessageBody
from penstock.deployments.ingress.http.ignored_fields import IgnoredFields
from penstock.workers.request import FinishReason
from penstock.workers.text.reasoning import PUBLISHED
from tests.deployments.serving import MODEL, EngineBackend, ScriptedBackend, Serving, tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"name": "get_weather", "description": "Tells the weather.", "input_schema": CITY}
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 1}}\n</tool_call>'
)
TURNS: Any = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Serving]:
    backend = EngineBackend()
    with Serving(backend, max_model_len=1024) as started:
        yield started
    backend.stop()


def scripted(text: str, finish: FinishReason = FinishReason.STOP, **options: Any) -> Serving:
    steps = ([token_id] for token_id in tokenizer().encode(text))
    return Serving(ScriptedBackend(*steps, finish), max_model_len=1024, **options)


def ask(
    server: Serving, *, stream: bool = False, events: list[Any] | None = None, **body: Any
) -> Any:
    """A message; of a stream, what the client puts together of its events."""
    known = {"model": MODEL, "max_tokens": 200, "messages": TURNS, **body}
    with anthropic.Anthropic(base_url=server.base_url, api_key="none", max_retries=0) as client:
        if not stream:
            answer = client.messages.create(**known)
            MessageBody.model_validate(answer.model_dump(exclude_unset=True))
            return answer
        with client.messages.stream(**known) as running:
            for event in running:
                (events if events is not None else []).append(event)
            return running.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_calls_in_an_answer(stream: bool) -> None:
    with scripted(f"I look.\n{CALL}\n{CALL}") as server:
        answer = ask(server, tools=[WEATHER], stream=stream)
        single: Any = {"type": "auto", "disable_parallel_tool_use": True}
        one = ask(server, tools=[WEATHER], tool_choice=single, stream=stream)
        none = ask(server, tools=[WEATHER], tool_choice={"type": "none"}, stream=stream)
    said, *calls = answer.content
    assert (said.type, said.text.strip(), answer.stop_reason) == ("text", "I look.", "tool_use")
    assert [(each.type, each.name) for each in calls] == [("tool_use", "get_weather")] * 2
    assert calls[0].input == calls[1].input == {"city": "Köln", "days": 1}
    assert calls[0].id != calls[1].id and calls[0].id.startswith("toolu_")
    assert len(one.content) == 2
    assert [block.type for block in none.content] == ["text"]
    assert none.stop_reason == "end_turn"


def test_the_events_of_a_call() -> None:
    events: list[Any] = []
    with scripted(CALL) as server:
        ask(server, tools=[WEATHER], stream=True, events=events)
    raw = [event for event in events if event.type.startswith(("message", "content_block"))]
    deltas = [event.delta for event in raw if event.type == "content_block_delta"]
    assert {delta.type for delta in deltas} == {"input_json_delta"} and len(deltas) > 3
    given = json.loads("".join(delta.partial_json for delta in deltas))
    assert given == {"city": "Köln", "days": 1}
    [started] = [event for event in raw if event.type == "content_block_start"]
    assert (started.index, started.content_block.name) == (0, "get_weather")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_forced_calls(engine: Serving, choice: Any, stream: bool) -> None:
    chosen = {**choice, "disable_parallel_tool_use": True}
    answer = ask(engine, tools=[WEATHER], tool_choice=chosen, stream=stream)
    [block] = answer.content
    assert (block.type, block.name, answer.stop_reason) == ("tool_use", "get_weather", "tool_use")
    jsonschema.validate(block.input, CITY)


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_shapes(engine: Serving, name: str) -> None:
    shape = {"type": "json_schema", "schema": CITY}
    body = {name: {"format": shape} if name == "output_config" else shape}
    answer = ask(engine, extra_body=body)
    jsonschema.validate(json.loads(answer.content[0].text), CITY)
    assert answer.stop_reason == "end_turn"


def test_a_call_that_was_cut_off() -> None:
    with scripted(CALL[:66], FinishReason.LENGTH) as server:
        answer = ask(server, tools=[WEATHER])
    [block] = answer.content
    assert (block.input, answer.stop_reason) == ({"city": "Köln"}, "max_tokens")


def test_a_conversation_with_calls_and_results() -> None:
    with scripted(f"I look.\n{CALL}") as server:
        first = ask(server, tools=[WEATHER])
        result: Any = {"type": "tool_result", "tool_use_id": first.content[-1].id}
        result |= {"content": [{"type": "text", "text": "12 degrees"}]}
        said = {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}}
        back = [{"role": "assistant", "content": first.content}]
        ask(
            server,
            tools=[WEATHER],
            messages=[*TURNS, *back, {"role": "user", "content": [result, said]}],
        )
        prompt = tokenizer().decode(server.backend.requests[-1].prompt_ids)
        with anthropic.Anthropic(base_url=server.base_url, api_key="none") as client:
            counted = client.messages.count_tokens(model=MODEL, messages=TURNS, tools=[WEATHER])
        assert counted.input_tokens == len(server.backend.requests[0].prompt_ids)
    assert "Tells the weather." in prompt
    assert f"I look.\n{CALL}" in prompt
    assert prompt.index("<tool_response>\n12 degrees\n</tool_response>") < prompt.index("And now?")


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_a_block(stream: bool) -> None:
    with scripted("<think>\nThe mill?\n</think>\n\nThe penstock.", marks=PUBLISHED[0]) as server:
        answer = ask(server, stream=stream)
        ask(server, messages=[*TURNS, {"role": "assistant", "content": answer.content}, *TURNS])
    thought, said = answer.content
    assert (thought.type, thought.thinking, thought.signature) == ("thinking", "The mill?", "")
    assert (said.text, answer.stop_reason) == ("The penstock.", "end_turn")


def test_turns_become_messages() -> None:
    def text(said: str) -> dict[str, Any]:
        return {"type": "text", "text": said}

    use = {"type": "tool_use", "id": "u", "name": "f", "input": {"a": 1}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    hidden = {"type": "redacted_thinking", "data": "x"}
    failed = {"type": "tool_result", "tool_use_id": "u", "content": "no", "is_error": True}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [text("b"), text("c")]},
        {"role": "assistant", "content": [thought, hidden, text("d"), use]},
        {"role": "assistant", "content": "e"},
        {"role": "user", "content": [failed, text("f")]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "v"}]},
    ]
    function = {"name": "f", "arguments": {"a": 1}}
    calls = [{"id": "u", "type": "function", "function": function}]
    assert messages_of([known_turn(i, turn, IgnoredFields()) for i, turn in enumerate(turns)]) == [
        {"role": "user", "content": "a\n\nbc"},
        {
            "role": "assistant",
            "content": "d\n\ne",
            "tool_calls": calls,
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "tool_call_id": "u", "content": "Error: no"},
        {"role": "user", "content": "f"},
        {"role": "tool", "tool_call_id": "v", "content": ""},
    ]
