"""Tools and timings over gRPC, by the Python client and by bare messages.

Oracles: json and jsonschema, what HTTP gives for the same conversation, and the text that a
scripted model said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import jsonschema
import pytest

from penstock.deployments.client import Client, ClientError, Timings, ToolCall, types
from penstock.protos.penstock.v1 import inference_pb2 as pb
from penstock.protos.penstock.v1 import inference_pb2_grpc
from penstock.workers.request import FinishReason
from tests.deployments.serving import EngineBackend, ScriptedBackend, Serving, tokenizer

MESSAGES: Any = [{"role": "user", "content": "What feeds the turbine?"}]
MAX_MODEL_LEN = 1024
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"name": "get_weather", "description": "Tells the weather.", "parameters": CITY},
    {"name": "clock", "parameters": json.dumps(CITY), "strict": True},
]
SAID = 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    backend = EngineBackend()
    with Serving(backend, max_model_len=MAX_MODEL_LEN) as started:
        yield started
    backend.stop()


@pytest.fixture(scope="module")
def client(serving: Serving) -> Iterator[Client]:
    with Client(serving.grpc_target) as opened:
        yield opened


def scripted(text: str) -> Serving:
    """A server whose model says `text`, token by token."""
    steps = ([token_id] for token_id in tokenizer().encode(text))
    return Serving(ScriptedBackend(*steps, FinishReason.STOP), max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize("choice", ["required", "get_weather", "clock"])
def test_forced_calls(client: Client, choice: str) -> None:
    pieces = list(
        client.chat(
            MESSAGES,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=150,
            seed=3,
        )
    )
    assert not "".join(piece.text for piece in pieces)
    assert pieces[-1].finish_reason is types.FinishReason.STOP
    calls = [call for piece in pieces for call in piece.tool_calls]
    assert calls[0].id.startswith("call_") and calls[0].name
    assert len(calls) > 2, "arguments come in pieces"
    assert not any(call.id or call.name or call.index for call in calls[1:])
    assert calls[0].name == choice if choice != "required" else calls[0].name
    jsonschema.validate(json.loads("".join(call.arguments for call in calls)), CITY)


def test_the_prompt_is_the_one_that_http_makes(serving: Serving, client: Client) -> None:
    functions = [{**tool, "parameters": CITY} for tool in TOOLS]
    body = {
        "messages": MESSAGES,
        "tools": [{"type": "function", "function": each} for each in functions],
        "tool_choice": "required",
        "max_tokens": 150,
        "seed": 5,
        "return_token_ids": True,
    }
    over_http = httpx.post(f"{serving.base_url}/v1/chat/completions", json=body, timeout=60).json()
    answer = client.reply(MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=150, seed=5)
    assert list(answer.token_ids) == over_http["choices"][0]["token_ids"]
    assert answer.usage.prompt_tokens == over_http["usage"]["prompt_tokens"]
    theirs = [call["function"] for call in over_http["choices"][0]["message"]["tool_calls"]]
    ours = [{"name": call.name, "arguments": call.arguments} for call in answer.tool_calls]
    assert ours == theirs


def test_calls_in_an_answer_are_found() -> None:
    with scripted(SAID) as server, grpc.insecure_channel(server.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        tools = [pb.Tool(name="get_weather")]
        answers = list(stub.Chat(pb.ChatRequest(messages=MESSAGES, tools=tools)))
        assert "".join(answer.text for answer in answers).strip() == "I look."
        assert answers[-1].finish_reason == pb.FINISH_REASON_TOOL_CALLS
        calls = [call for answer in answers for call in answer.tool_calls]
        assert calls[0].name == "get_weather"
        assert json.loads("".join(call.arguments for call in calls)) == {"city": "Köln"}


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_it_is_text(fields: Any) -> None:
    with scripted(SAID) as server, Client(server.grpc_target) as client:
        answer = client.reply(MESSAGES, **fields)
    assert (answer.text, answer.tool_calls) == (SAID, ())


def test_parallel_calls_only_where_wanted() -> None:
    twice = f"{SAID}\n{SAID}".replace("I look.\n", "")
    with scripted(twice) as server, Client(server.grpc_target) as client:
        both = client.reply(MESSAGES, tools=TOOLS)
        one = client.reply(MESSAGES, tools=TOOLS, parallel_tool_calls=False)
    assert [call.index for call in both.tool_calls] == [0, 1]
    assert len({call.id for call in both.tool_calls}) == 2
    assert [call.arguments for call in one.tool_calls] == [both.tool_calls[0].arguments]


def test_a_conversation_with_calls_and_results() -> None:
    """What an answer gave goes back as it came, with the result, into the next prompt."""
    with scripted(SAID) as server, Client(server.grpc_target) as client:
        first = client.reply(MESSAGES, tools=TOOLS)
        said = {"role": "assistant", "content": first.text, "tool_calls": first.tool_calls}
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "12 degrees"}
        client.reply([*MESSAGES, said, result], tools=TOOLS)
        prompt = tokenizer().decode(server.backend.requests[-1].prompt_ids)
    assert "Tells the weather." in prompt
    assert SAID in prompt
    assert "12 degrees" in prompt


def call(**fields: Any) -> ToolCall:
    return ToolCall(**{"index": 0, "id": "1", "name": "f", "arguments": "{}", **fields})


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "fly"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2]"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"name": f"f{i}"} for i in range(129)]}, "tools"),
        ({"tools": [{"name": "f", "parameters": "{"}]}, "tools[0].parameters"),
        ({"tools": [{"name": "f", "parameters": '{"a":' * 10_000}]}, "tools[0].parameters"),
        ({"tools": [{"name": "f", "parameters": "[1]"}]}, "tools[0].parameters"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [call()]}]},
            "messages[0].tool_calls",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "tool_call_id": "1"}]},
            "messages[0].tool_call_id",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [call(arguments="hello")]}]},
            "messages[0].tool_calls[0].arguments",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [call(arguments="[" * 100_000)]}]},
            "messages[0].tool_calls[0].arguments",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [call(name="")]}]},
            "messages[0].tool_calls[0].name",
        ),
    ],
)
def test_refusals(client: Client, changed: dict[str, Any], param: str) -> None:
    messages = changed.get("messages", MESSAGES)
    fields = {name: value for name, value in changed.items() if name != "messages"}
    with pytest.raises(ClientError) as refused:
        client.reply(messages, max_tokens=5, **fields)
    assert refused.value.status is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.param == param
    assert ".function" not in refused.value.message


def test_an_unknown_mode_is_refused(serving: Serving) -> None:
    with grpc.insecure_channel(serving.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = pb.ChatRequest(messages=MESSAGES, tools=[pb.Tool(name="f")])
        request.tool_choice.MergeFromString(b"\x08\x63")  # field 1 (mode): 99
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Chat(request))
    assert dict(refused.value.trailing_metadata())["error-param"] == "tool_choice.mode"


def test_timings_where_requested(client: Client) -> None:
    for ask in (client.complete, client.reply):
        prompt: Any = MESSAGES if ask == client.reply else "The river"
        timings = ask(prompt, max_tokens=6, ignore_eos=True, n=2, return_timings=True).usage.timings
        assert isinstance(timings, Timings)
        assert timings.queue_s is not None and timings.prefill_s is not None
        assert timings.first_token_s is not None and timings.decode_s is not None
        assert timings.total_s is not None
        assert timings.queue_s >= 0 and timings.prefill_s > 0
        # Each is the slowest of both answers, so only the ends can be compared.
        assert timings.first_token_s <= timings.total_s and timings.decode_s < timings.total_s
        assert ask(prompt, max_tokens=2).usage.timings is None
