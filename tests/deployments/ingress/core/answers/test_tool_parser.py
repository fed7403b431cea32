"""Calls in a text, however it is cut; the oracle is the same text in one piece, and json."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from penstock.deployments.ingress.core.answers.tool_forms.form_parser import MAX_BLOCK_CHARS
from penstock.deployments.ingress.core.answers.tool_forms.json_forms import HermesParser
from penstock.deployments.ingress.core.tools import Tool, Toolset, as_plain_messages, describe
from penstock.workers.request import RequestError
from tests.deployments.ingress.core.answers.models import read_calls

CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "}\\"]</tool_call>", "at": [1, {}]}}\n'
CALL += "</tool_call>"
TEXTS = {
    "none": "a <b> <tool",
    "one": CALL,
    "text around": f"Let me see.\n{CALL}\n and on",
    "two": f"{CALL}\n{CALL}",
    "other order": '<tool_call>{"arguments": {"x": 1}, "name": "look"}</tool_call>',
    "json in json": '<tool_call>{"name": "look", "arguments": "{\\"x\\": 1}"}</tool_call>',
    "no arguments": '<tool_call>{"name": "look"}</tool_call>',
    "no end": '<tool_call>{"name": "look", "arguments": {"a": 1}}',
    "no end, other order": '<tool_call>{"arguments": {}, "name": "look"}',
    "cut": '<tool_call>{"name": "look", "arguments": {"a": "un',
    "cut early": '<tool_call>{"name": "lo',
    "broken": "<tool_call>{look}</tool_call> and on",
    "never offered": '<tool_call>{"name": "rm", "arguments": {"path": "/"}}</tool_call>',
    "long name": f'<tool_call>{{"name": "{"x" * 2000}", "arguments": {{}}}}</tool_call>',
    "within": f"<tool_call>{CALL}",
}
CALLS = {
    "one": 1,
    "text around": 1,
    "two": 2,
    "other order": 1,
    "json in json": 1,
    "no arguments": 1,
    "no end": 1,
    "no end, other order": 1,
    "cut": 1,
}


def read(parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Text, and name and arguments of each call."""
    return read_calls(HermesParser(["look"], "answer"), parts)


@pytest.mark.parametrize("name", TEXTS)
def test_however_it_is_cut(name: str) -> None:
    whole = TEXTS[name]
    expected = read([whole])
    assert len(expected[1]) == CALLS.get(name, 0)
    if name not in CALLS and name != "within":
        assert expected[0] == whole, "what is no call stays text"
    assert read(list(whole)) == expected
    for seed in range(50):
        rng = random.Random(seed)
        cuts = sorted(rng.choices(range(len(whole) + 1), k=5))
        assert read([whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)])]) == expected


def test_arguments_are_what_was_said() -> None:
    text, [(name, arguments)] = read(list(TEXTS["text around"]))
    assert (text, name) == ("Let me see.\nand on", "look")
    assert json.loads(arguments) == {"place": '}"]</tool_call>', "at": [1, {}]}
    for same in ("other order", "json in json"):
        assert json.loads(read([TEXTS[same]])[1][0][1]) == {"x": 1}


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = HermesParser(["look"], "answer")
    parser.feed('<tool_call>{"name": "look", "arguments": {"a": "')
    assert [piece.arguments for piece in parser.feed("river")[1]] == ["river"]


def test_what_is_held_back_is_bounded() -> None:
    parser = HermesParser(["look"], "answer")
    block = "<tool_call>" + "x" * (MAX_BLOCK_CHARS + 100)
    assert parser.feed(block)[0] == block


def test_a_template_without_tools_gets_them_as_text() -> None:
    tools = Toolset((Tool("look", "Looks.", {"type": "object", "properties": {"a": {}}}),))
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is there?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "a mill", "tool_call_id": "1"},
    ]
    plain = as_plain_messages(messages, tools)
    assert [message["role"] for message in plain] == ["system", "user", "assistant", "user"]
    assert plain[0]["content"] == f"Be brief.\n\n{describe(tools)}"
    assert '"description": "Looks."' in plain[0]["content"]
    # The form that the prompt asks for is the form that is read back.
    assert read([plain[2]["content"]]) == ("", [("look", '{"a": 1}')])
    assert plain[3]["content"] == "<tool_response>\na mill\n</tool_response>"
    assert as_plain_messages(messages[1:2], None) == messages[1:2]
    assert as_plain_messages(messages[1:2], tools)[0]["role"] == "system"


@pytest.mark.parametrize(
    ("toolset", "param"),
    [
        (Toolset(()), "tools"),
        (Toolset((Tool("x"),) * 200), "tools"),
        (Toolset((Tool("a b"),)), "tools[0].function.name"),
        (Toolset((Tool("x" * 65),)), "tools[0].function.name"),
        (Toolset((Tool("a"), Tool("a"))), "tools[1]"),
        (Toolset((Tool("a", "\ud800"),)), "tools[0].function.description"),
        (Toolset((Tool("a", None, {"$ref": "http://x"}),)), "tools[0].function.parameters"),
        (Toolset((Tool("a", None, {"t": "x" * 70_000}),)), "tools[0].function.parameters"),
        (Toolset((Tool("a"),), must_call=True, only="b"), "tool_choice"),
    ],
)
def test_tools_are_checked(toolset: Toolset, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        toolset.check()
    assert (refused.value.code, refused.value.param) == ("invalid_value", param)
