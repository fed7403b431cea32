"""Tools, shapes and reasoning over OpenAI's Responses API, as the official client reads them.

Oracles: the client, which knows every event; json and jsonschema; the prompt that the model got.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from penstock.deployments.ingress.http.ignored_fields import IgnoredFields
from penstock.deployments.ingress.http.responses.items import items_of, known_items, messages_of
from penstock.deployments.ingress.http.responses.schemas import InputItems, ResponseBody
from penstock.workers.request import FinishReason
from penstock.workers.text.reasoning import PUBLISHED
from tests.deployments.serving import MODEL, EngineBackend, ScriptedBackend, Serving, tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather.",
    "parameters": CITY,
    "strict": False,
}
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 1}}\n</tool_call>'
)
QUESTION = "How is the weather?"


@pytest.fixture(scope="module")
def engine() -> Iterator[Serving]:
    backend = EngineBackend()
    with Serving(backend, max_model_len=1024) as started:
        yield started
    backend.stop()


@contextlib.contextmanager
def official(serving: Serving) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{serving.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def scripted(text: str, finish: FinishReason = FinishReason.STOP, **options: Any) -> Serving:
    steps = ([token_id] for token_id in tokenizer().encode(text))
    return Serving(ScriptedBackend(*steps, finish), max_model_len=1024, **options)


def respond(serving: Serving, **body: Any) -> Any:
    """A response; of a stream, what the client puts together of its events."""
    known = {"model": MODEL, "input": QUESTION, **body}
    with official(serving) as client:
        if not known.pop("stream", False):
            answer = client.responses.create(**known)
            ResponseBody.model_validate(answer.model_dump())
            return answer
        kept = known.pop("events", [])
        with client.responses.stream(**known) as stream:
            kept += list(stream)
            return stream.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
def test_calls_in_an_answer(stream: bool) -> None:
    with scripted(f"I look.\n{CALL}\n{CALL}") as server:
        answer = respond(server, tools=[WEATHER], stream=stream)
        one = respond(server, tools=[WEATHER], stream=stream, parallel_tool_calls=False)
    said, *calls = answer.output
    assert (said.type, said.content[0].text.strip(), said.status) == (
        *("message", "I look."),
        "completed",
    )
    assert [each.type for each in calls] == ["function_call"] * 2
    assert len({each.call_id for each in calls}) == len({each.id for each in answer.output}) - 1
    assert json.loads(calls[1].arguments) == {"city": "Köln", "days": 1}
    assert (calls[0].name, calls[0].status, answer.status) == (
        *("get_weather", "completed"),
        "completed",
    )
    assert len(one.output) == 2 and one.parallel_tool_calls is False
    assert answer.tools[0].name == "get_weather"


def test_the_events_of_a_call() -> None:
    events: list[Any] = []
    with scripted(CALL) as server:
        answer = respond(server, tools=[WEATHER], stream=True, events=events)
    kinds = [event.type for event in events]
    num = kinds.count("response.function_call_arguments.delta")
    assert num > 3, "arguments should come in many pieces"
    assert kinds == [
        *("response.created", "response.in_progress", "response.output_item.added"),
        *["response.function_call_arguments.delta"] * num,
        *("response.function_call_arguments.done", "response.output_item.done"),
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    [item] = answer.output
    added, *deltas, done, _, _ = events[2:]
    assert (added.item.arguments, added.item.call_id) == ("", item.call_id)
    assert "".join(event.delta for event in deltas) == done.arguments == item.arguments


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "name": "get_weather"}], ids=["required", "named"]
)
def test_forced_calls(engine: Serving, choice: Any, stream: bool) -> None:
    answer = respond(
        engine,
        tools=[WEATHER],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_output_tokens=200,
        stream=stream,
        extra_body={"seed": 4},
    )
    [item] = answer.output
    assert (item.type, item.name, answer.status) == ("function_call", "get_weather", "completed")
    jsonschema.validate(json.loads(item.arguments), CITY)
    chosen = answer.tool_choice if isinstance(choice, str) else answer.tool_choice.model_dump()
    assert chosen == choice


@pytest.mark.parametrize("stream", [False, True])
def test_shapes(engine: Serving, stream: bool) -> None:
    shape: Any = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
    answer = respond(
        engine, text={"format": shape}, max_output_tokens=200, stream=stream, extra_body={"seed": 4}
    )
    assert answer.status == "completed"
    jsonschema.validate(json.loads(answer.output_text), CITY)
    assert answer.text.format.name == "city"
    plain = respond(engine, text={"format": {"type": "json_object"}}, max_output_tokens=4)
    assert plain.output_text.lstrip().startswith("{")
    few: Any = {"temperature": 0, "max_output_tokens": 60}
    free = respond(engine, text={"format": {"type": "text"}, "verbosity": "low"}, **few)
    assert free.output_text == respond(engine, **few).output_text


def prompt_of(server: Serving) -> str:
    return tokenizer().decode(server.backend.requests[-1].prompt_ids)


def test_a_conversation_with_calls_and_results() -> None:
    """By the id of the response, and by sending back what it gave: the same prompt."""
    with scripted(f"I look.\n{CALL}") as server:
        first = respond(server, tools=[WEATHER])
        call_id = first.output[-1].call_id
        result = {"type": "function_call_output", "call_id": call_id, "output": "12 degrees"}
        respond(server, tools=[WEATHER], input=[result], previous_response_id=first.id)
        by_id = prompt_of(server)
        sent = [{"role": "user", "content": QUESTION}, *first.output, result]
        respond(server, tools=[WEATHER], input=sent)
        assert prompt_of(server) == by_id
    assert "Tells the weather." in by_id
    assert f"I look.\n{CALL}" in by_id
    assert "<tool_response>\n12 degrees\n</tool_response>" in by_id


def test_a_call_that_was_cut_off_stays_with_what_there_is_of_it() -> None:
    with scripted(CALL[:60], FinishReason.LENGTH) as server:
        answer = respond(server, tools=[WEATHER])
        [item] = answer.output
        result = {"type": "function_call_output", "call_id": item.call_id, "output": "cut off"}
        respond(server, tools=[WEATHER], input=[result], previous_response_id=answer.id)
        by_id = prompt_of(server)
        sent = [{"role": "user", "content": QUESTION}, *answer.output, result]
        respond(server, tools=[WEATHER], input=sent)
        assert prompt_of(server) == by_id
    assert (item.type, item.status, answer.status) == ("function_call", *["incomplete"] * 2)
    assert item.arguments and not item.arguments.endswith("}")
    assert by_id.count("get_weather") == 2 and "cut off" in by_id


def test_an_output_without_its_call_is_refused() -> None:
    output = {"type": "function_call_output", "call_id": "call_lost", "output": "12 degrees"}
    call = {"type": "function_call", "call_id": "call_lost", "name": "f", "arguments": "{}"}
    with scripted(CALL) as server, official(server) as client:
        first = respond(server, tools=[WEATHER])
        for ask in (
            lambda **body: respond(server, **body),
            lambda **body: client.responses.input_tokens.count(model=MODEL, **body),
        ):
            for body in (
                {"input": [output]},
                {"input": [output], "previous_response_id": first.id},
                {"input": [output, call]},
            ):
                with pytest.raises(openai.BadRequestError, match="call_id call_lost") as refused:
                    ask(**body)
                assert refused.value.param == "input"
                assert "No tool call found for function call output" in refused.value.message
            ask(input=[call, output])
            known = {**output, "call_id": first.output[0].call_id}
            ask(input=[known], previous_response_id=first.id)


def test_a_call_whose_arguments_are_no_json_can_be_answered() -> None:
    with scripted(CALL.replace('{"city": "Köln", "days": 1}', "{nonsense}")) as server:
        first = respond(server, tools=[WEATHER])
        [item] = first.output
        assert (item.type, item.arguments) == ("function_call", "{nonsense}")
        result = {"type": "function_call_output", "call_id": item.call_id, "output": "no JSON"}
        respond(server, tools=[WEATHER], input=[result], previous_response_id=first.id)
        assert '"name": "get_weather", "arguments": {}' in prompt_of(server)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_an_item(stream: bool) -> None:
    with scripted("<think>\nThe mill?\n</think>\n\nThe penstock.", marks=PUBLISHED[0]) as server:
        events: list[Any] = []
        known = {"events": events} if stream else {}
        answer = respond(server, stream=stream, **known)
        respond(server, input=[{"role": "user", "content": "a"}, *answer.output])
    thought, said = answer.output
    assert (thought.type, thought.summary) == ("reasoning", [])
    assert [part.text for part in thought.content] == ["The mill?"]
    assert answer.output_text == said.content[0].text == "The penstock."
    assert 5 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == ("The mill?" if stream else "")


def test_input_items() -> None:
    with scripted(CALL) as server, official(server) as client:
        first = respond(server, tools=[WEATHER], instructions="Be brief.")
        call_id = first.output[0].call_id
        result = {"type": "function_call_output", "call_id": call_id, "output": "12 degrees"}
        second = respond(server, tools=[WEATHER], input=[result], previous_response_id=first.id)
        InputItems.model_validate(client.get(f"/responses/{first.id}/input_items", cast_to=object))
        [item] = client.responses.input_items.list(first.id).data
        assert (item.type, item.role, item.content[0].text) == ("message", "user", QUESTION)
        oldest_first = client.responses.input_items.list(second.id, order="asc").data
        assert [each.type for each in oldest_first] == [
            *("message", "function_call"),
            "function_call_output",
        ]
        page = client.responses.input_items.list(second.id, limit=2)
        assert [each.id for each in page] == [each.id for each in reversed(oldest_first)]
        assert page.has_more
        for query in ("limit=0", "limit=a", "order=up", "after=nobody", "before=a"):
            with pytest.raises(openai.BadRequestError) as refused:
                client.get(f"/responses/{second.id}/input_items?{query}", cast_to=object)
            assert refused.value.param == query.partition("=")[0]
        with pytest.raises(openai.NotFoundError):
            client.responses.input_items.list("resp_nobody")


def test_items_to_messages_and_back() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    items = [
        {"role": "user", "content": "a"},
        thought,
        {"role": "assistant", "content": "b"},
        call,
        {**call, "call_id": "d"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"type": "function_call_output", "call_id": "d", "output": "2"},
        thought,
        call,
        {"role": "assistant", "content": "e"},
        {"role": "assistant", "content": "f"},
    ]
    messages = messages_of(known_items(items, IgnoredFields()))
    roles = ["user", "assistant", "tool", "tool", "assistant", "assistant", "assistant"]
    assert [each["role"] for each in messages] == roles
    assert [len(each.get("tool_calls", ())) for each in messages] == [0, 2, 0, 0, 1, 0, 0]
    assert messages[1]["reasoning_content"] == messages[4]["reasoning_content"] == "Hm."
    assert messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    again = items_of(messages, "r")
    assert len({each["id"] for each in again}) == len(again) == len(items)
    read = known_items(again, IgnoredFields())
    assert messages_of(read) == messages
