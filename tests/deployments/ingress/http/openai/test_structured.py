"""Answers with a shape, and calls of tools, as OpenAI's own client asks for them and reads them.

Oracles: json, jsonschema, re, and what the client makes of the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from penstock.deployments.client import Client, ClientError
from penstock.deployments.ingress.http.openai.schemas import ChatCompletion, ChatCompletionChunk
from penstock.workers.request import FinishReason
from tests.deployments.serving import EngineBackend, ScriptedBackend, Serving, tokenizer

MESSAGES: Any = [{"role": "user", "content": "What feeds the turbine?"}]
MAX_MODEL_LEN = 1024
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "kelvin"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "Tells the weather.", "parameters": CITY}
CLOCK = {"name": "clock", "parameters": {"$ref": "#/$defs/none", "$defs": {"none": CITY}}}
TOOLS: Any = [{"type": "function", "function": each} for each in (WEATHER, CLOCK)]


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    backend = EngineBackend()
    with Serving(backend, max_model_len=MAX_MODEL_LEN) as started:
        yield started
    backend.stop()


def client_of(serving: Serving) -> Any:
    return openai.OpenAI(base_url=f"{serving.base_url}/v1", api_key="none", max_retries=0)


def chat(serving: Serving, **body: Any) -> Any:
    known = {"model": "builtin", "messages": MESSAGES, "max_tokens": 150, "seed": 3, **body}
    with client_of(serving) as client:
        answer = client.chat.completions.create(**known)
        if not known.get("stream"):
            ChatCompletion.model_validate(answer.model_dump(exclude_unset=True))
            return answer.choices[0]
        chunks = list(answer)
        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk.model_dump(exclude_unset=True))
        return [chunk.choices[0] for chunk in chunks]


def scripted(text: str) -> Serving:
    """A server whose model says `text`, token by token."""
    steps = ([token_id] for token_id in tokenizer().encode(text))
    return Serving(ScriptedBackend(*steps, FinishReason.STOP), max_model_len=MAX_MODEL_LEN)


def test_response_format_json_schema(serving: Serving) -> None:
    for strict in (True, False, None):
        schema = {"name": "weather", "schema": CITY, "strict": strict}
        shape = {"type": "json_schema", "json_schema": schema}
        choice = chat(serving, response_format=shape)
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), CITY)


def test_response_format_json_object_and_text(serving: Serving) -> None:
    choice = chat(serving, response_format={"type": "json_object"}, max_tokens=400, temperature=0.3)
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    plain = chat(serving, response_format={"type": "text"}, max_tokens=20)
    assert plain.message.content == chat(serving, max_tokens=20).message.content


@pytest.mark.parametrize("type_", ["json_object", "json_schema"])
def test_a_schema_where_llama_cpp_has_it(serving: Serving, type_: str) -> None:
    choice = chat(serving, extra_body={"response_format": {"type": type_, "schema": {"const": 5}}})
    assert (choice.message.content, choice.finish_reason) == ("5", "stop")


def test_streamed_is_the_same(serving: Serving) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "w", "schema": CITY}}
    whole = chat(serving, response_format=shape)
    pieces = chat(serving, response_format=shape, stream=True)
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.message.content
    assert pieces[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"structured_outputs": {"regex": r"[a-f]{4}-\d"}}, r"[a-f]{4}-\d"),
        ({"structured_outputs": {"choice": ["red", "dark blue"]}}, "red|dark blue"),
        ({"structured_outputs": {"grammar": 'start: "<" /[a-z]{3}/ ">"'}}, "<[a-z]{3}>"),
        ({"structured_outputs": {"json": {"const": "a b"}}}, '"a b"'),
        ({"structured_outputs": {"json": '{"const": 5}'}}, "5"),
        ({"guided_regex": "x{3}y"}, "xxxy"),
        ({"guided_choice": ["one"]}, "one"),
        ({"guided_json": {"const": True}}, "true"),
        ({"guided_grammar": 'root ::= "a" [0-9]'}, r"a\d"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_structured_outputs(serving: Serving, outputs: dict[str, Any], pattern: str) -> None:
    choice = chat(serving, extra_body=outputs)
    assert choice.finish_reason == "stop"
    assert re.fullmatch(pattern, choice.message.content)
    with client_of(serving) as client:
        answer = client.completions.create(
            model="builtin", prompt=["The", "A"], max_tokens=60, extra_body=outputs
        )
    assert all(re.fullmatch(pattern, each.text) for each in answer.choices)


def test_few_tokens_are_length(serving: Serving) -> None:
    choice = chat(serving, max_tokens=2, response_format={"type": "json_object"})
    assert choice.finish_reason == "length"


def schema_format(schema: Any, **more: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **more}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": schema_format(nested(40))}, "response_format.json_schema.schema"),
        (
            {"response_format": schema_format({"title": "x" * 70_000})},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": schema_format({"not": {"type": "string"}}, strict=True)},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "(a|b|ab)*" * 500}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"guided_regex": "["}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "tool_choice",
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "fly"}},
            },
            "tool_choice",
        ),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2]"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": nested(40)}}
                ],
            },
            "tools[0].function.parameters",
        ),
    ],
)
def test_refused_by_name_and_harms_no_other_request(
    serving: Serving, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(serving, extra_body=body)
    assert refused.value.param == param
    assert refused.value.code in ("invalid_value", "missing_parameter")
    assert chat(serving, extra_body={"guided_choice": ["well"]}).message.content == "well"


def test_a_deep_schema_is_refused_before_it_is_read(serving: Serving) -> None:
    """10 000 levels: the body itself is refused."""
    deep = '{"a":' * 10_000 + "1" + "}" * 10_000
    body = '{"messages": [{"role": "user", "content": "a"}], "guided_json": ' + deep + "}"
    with client_of(serving) as client, pytest.raises(openai.BadRequestError):
        client.post("/chat/completions", content=body, cast_to=object)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("choice", ["required", "get_weather", "clock"])
def test_forced_calls(serving: Serving, choice: str, streams: bool) -> None:
    named = {"type": "function", "function": {"name": choice}}
    fields = {
        "tools": TOOLS,
        "tool_choice": choice if choice == "required" else named,
        "parallel_tool_calls": False,
        "stream": streams,
    }
    answer = chat(serving, **fields)
    if streams:
        assert answer[-1].finish_reason == "tool_calls"
        assert not "".join(each.delta.content or "" for each in answer)
        pieces = [call for each in answer for call in each.delta.tool_calls or ()]
        assert pieces[0].id and pieces[0].function.name and pieces[0].type == "function"
        assert len(pieces) > 2, "arguments come in pieces"
        assert all(piece.index == 0 and piece.id is None for piece in pieces[1:])
        assert all(len(each.delta.tool_calls or ()) <= 1 for each in answer)
        name = pieces[0].function.name
        arguments = "".join(piece.function.arguments or "" for piece in pieces)
    else:
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        [call] = answer.message.tool_calls
        assert call.type == "function" and call.id.startswith("call_")
        name, arguments = call.function.name, call.function.arguments
    assert name == choice if choice != "required" else name in ("get_weather", "clock")
    jsonschema.validate(json.loads(arguments), CITY)


def test_cut_off_calls_are_length(serving: Serving) -> None:
    answer = chat(serving, tools=TOOLS, tool_choice="required", max_tokens=25)
    assert answer.finish_reason == "length"


SAID = 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.mark.parametrize("streams", [False, True])
def test_calls_in_an_answer_are_found(streams: bool) -> None:
    with scripted(SAID) as server:
        answer = chat(server, tools=TOOLS, stream=streams)
    if streams:
        text = "".join(each.delta.content or "" for each in answer)
        pieces = [call for each in answer for call in each.delta.tool_calls or ()]
        arguments = "".join(piece.function.arguments for piece in pieces)
        name, reason = pieces[0].function.name, answer[-1].finish_reason
    else:
        [call] = answer.message.tool_calls
        text, reason = answer.message.content, answer.finish_reason
        name, arguments = call.function.name, call.function.arguments
    assert (text.strip(), name, reason) == ("I look.", "get_weather", "tool_calls")
    assert json.loads(arguments) == {"city": "Köln"}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("stop", "reason"), [("Kö", "stop"), ('"arguments"', "stop"), ("\n</tool", "tool_calls")]
)
def test_a_stop_string_within_a_call_leaves_no_call_to_make(
    stop: str, reason: str, streams: bool
) -> None:
    with scripted(SAID) as server:
        answer = chat(server, tools=TOOLS, stream=streams, stop=[stop])
    ending = answer[-1] if streams else answer
    assert (ending.finish_reason, ending.stop_reason) == (reason, stop)


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_it_is_text(fields: dict[str, Any]) -> None:
    with scripted(SAID) as server:
        answer = chat(server, **fields)
    assert (answer.message.content, answer.message.tool_calls) == (SAID, None)
    assert answer.finish_reason == "stop"


def test_parallel_calls_only_where_wanted() -> None:
    twice = f"{SAID}\n{SAID}".replace("I look.\n", "")
    with scripted(twice) as server:
        both = chat(server, tools=TOOLS)
        one = chat(server, tools=TOOLS, parallel_tool_calls=False)
    assert len(both.message.tool_calls) == 2 and len(one.message.tool_calls) == 1
    assert len({call.id for call in both.message.tool_calls}) == 2


def test_a_conversation_with_calls_and_results() -> None:
    """What an answer gave goes back as it came, with the result, into the next prompt."""
    with scripted(SAID) as server:
        first = chat(server, tools=TOOLS)
        message = first.message.model_dump(exclude_none=True)
        call_id = first.message.tool_calls[0].id
        result = {"role": "tool", "tool_call_id": call_id, "content": "12 degrees"}
        chat(server, tools=TOOLS, messages=[*MESSAGES, message, result])
        prompt = tokenizer().decode(server.backend.requests[-1].prompt_ids)
    assert "Tells the weather." in prompt
    assert SAID in prompt
    assert "12 degrees" in prompt


@pytest.mark.parametrize(
    ("shape", "pattern"),
    [
        ({"json_schema": {"const": "a b"}}, '"a b"'),
        ({"json_schema": '{"const": 5}'}, "5"),
        ({"json_object": True, "max_tokens": 2}, r"\{.*"),
        ({"regex": "x{3}y"}, "xxxy"),
        ({"choice": ["red", "dark blue"]}, "red|dark blue"),
        ({"grammar": 'start: "<" /[a-z]{3}/ ">"'}, "<[a-z]{3}>"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_over_grpc(serving: Serving, shape: Any, pattern: str) -> None:
    with Client(serving.grpc_target) as client:
        fields = {"max_tokens": 60, **shape}
        assert re.fullmatch(pattern, client.complete("The", **fields).text, re.DOTALL)
        assert re.fullmatch(pattern, client.reply(MESSAGES, **fields).text, re.DOTALL)


@pytest.mark.parametrize(
    "shape", [{"regex": "["}, {"json_schema": "{" * 10_000}, {"choice": []}, {"grammar": "a"}]
)
def test_refused_over_grpc(serving: Serving, shape: Any) -> None:
    with Client(serving.grpc_target) as client, pytest.raises(ClientError) as refused:
        client.complete("The", max_tokens=5, **shape)
    assert (refused.value.code, refused.value.param) == ("invalid_value", next(iter(shape)))
