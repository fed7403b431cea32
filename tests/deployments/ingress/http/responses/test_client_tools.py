"""Custom tools and namespaces of the Responses API, as the official client reads their calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.deployments.ingress.http.ignored_fields import FieldPolicy
from penstock.deployments.ingress.http.responses.tools import arguments_of, name_in, text_of
from penstock.workers.request import FinishReason
from tests.deployments.ingress.http.responses.test_tools import official, respond
from tests.deployments.serving import ScriptedBackend, Serving, tokenizer

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin" LF'}
PATCH: Any = {"type": "custom", "name": "patch", "description": "Edits.", "format": GRAMMAR}
LOOK: Any = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
    "strict": False,
}
DOCS: Any = {"type": "namespace", "name": "mcp__docs", "description": "Docs.", "tools": [LOOK]}
TEXT = 'line "one"\n\\ and zwei: ü\n'


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def server_of(text: str, finish: FinishReason = FinishReason.STOP) -> Serving:
    steps = ([token_id] for token_id in tokenizer().encode(text))
    backend = ScriptedBackend(*steps, finish)
    return Serving(backend, max_model_len=2048, fields=FieldPolicy("ignore"))


def prompt_of(server: Serving) -> str:
    return server.core.named(None).tokenizer.decode(server.backend.requests[-1].prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_custom_tool(stream: bool) -> None:
    events: list[Any] = []
    with server_of(called("patch", arguments_of(TEXT))) as server:
        streamed = {"stream": True, "events": events} if stream else {}
        answer = respond(server, tools=[PATCH], **streamed)
        assert "follows this grammar" in prompt_of(server) and "*** Begin" in prompt_of(server)
        (call,) = answer.output
        assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", TEXT)
        if stream:
            told = [each for each in events if each.type.startswith("response.custom_tool_call")]
            assert [each.type.rpartition(".")[2] for each in told] == ["delta", "done"]
            assert told[0].delta == told[1].input == TEXT
        output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
        again = [{"role": "user", "content": "Edit."}, call.model_dump(exclude_none=True), output]
        respond(server, tools=[PATCH], input=again)
        assert json.dumps(TEXT, ensure_ascii=False) in prompt_of(server)
        assert "Done." in prompt_of(server)
        respond(server, tools=[PATCH], input=[output], previous_response_id=answer.id)
        assert json.dumps(TEXT, ensure_ascii=False) in prompt_of(server)


def test_a_custom_call_that_is_cut_off_has_what_there_is() -> None:
    text = called("patch", arguments_of(TEXT))
    with server_of(text[: text.index("zwei")], FinishReason.LENGTH) as server:
        (call,) = respond(server, tools=[PATCH]).output
    assert (call.type, call.input) == ("custom_tool_call", 'line "one"\n\\ and ')


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_namespace(stream: bool) -> None:
    with server_of(called("mcp__docs__look", '{"at": 1}')) as server:
        answer = respond(server, tools=[DOCS, LOOK], stream=stream)
        (call,) = answer.output
        assert (call.type, call.name, call.namespace) == ("function_call", "look", "mcp__docs")
        assert json.loads(call.arguments) == {"at": 1}
        assert "mcp__docs__look" in prompt_of(server)
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "Here."}
        again = [{"role": "user", "content": "Look."}, call.model_dump(exclude_none=True), output]
        respond(server, tools=[DOCS], input=again, tool_choice="none")
        assert "mcp__docs__look" in prompt_of(server)


def test_tools_of_a_server_are_left_out_but_not_chosen() -> None:
    with server_of("Ja.") as server, official(server) as client:
        raw = client.responses.with_raw_response.create(
            model="builtin", input="a", tools=[{"type": "web_search"}, LOOK]
        )
        assert raw.headers["x-penstock-ignored-fields"] == "tools.web_search"
        assert [tool.name for tool in raw.parse().tools] == ["look"]
        assert "web_search" not in prompt_of(server)
        for choice in ("required", {"type": "web_search"}):
            with pytest.raises(Exception, match="tool_choice"):
                client.responses.create(
                    model="builtin",
                    input="a",
                    tools=[{"type": "web_search"}],
                    tool_choice=choice,
                )


def test_a_call_of_a_tool_of_a_server_is_left_out_with_its_output() -> None:
    """Some clients answer a call of a fixed tool as one of a function."""
    call = {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec"}}
    output = {"type": "function_call_output", "call_id": "c", "output": "total 0"}
    asked = {"role": "user", "content": "List."}
    with server_of("Ja.") as server, official(server) as client:
        raw = client.responses.with_raw_response.create(
            model="builtin", input=[asked, call, output]
        )
        assert raw.headers["x-penstock-ignored-fields"] == (
            "input.local_shell_call, input.function_call_output"
        )
        assert "total 0" not in prompt_of(server)


@pytest.mark.parametrize(
    ("namespace", "name"),
    [(None, "look"), ("", "look"), ("mcp__docs", "mcp__docs__look"), ("a_", "a_look")],
)
def test_names(namespace: str | None, name: str) -> None:
    assert name_in(namespace, "look") == name


@given(st.text(st.characters(codec="utf-8")), st.integers(0, 400))
def test_the_text_of_a_custom_tool_comes_back(text: str, end: int) -> None:
    whole = arguments_of(text)
    assert text_of(whole) == text
    assert text.startswith(text_of(whole[: min(end, len(whole) - 2)]).rstrip("\\"))
