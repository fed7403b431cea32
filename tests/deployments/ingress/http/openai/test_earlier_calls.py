"""Calls that a conversation sends back, with arguments that the limit of tokens cut off."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.deployments.ingress.core.call import earlier_call
from penstock.workers.request import FinishReason, RequestError
from tests.deployments.serving import scripted, tokenizer

WHOLE = '{"city": "Köln", "days": [1, 2]}'


@pytest.mark.parametrize(
    ("arguments", "data"),
    [
        (WHOLE, {"city": "Köln", "days": [1, 2]}),
        ("", {}),
        ("{", {}),
        ('{"ci', {}),
        ('{"city": "Kö', {"city": "Kö"}),
        ('{"city": "Köln", "days": [1, ', {"city": "Köln", "days": [1]}),
    ],
)
def test_what_is_there_of_the_arguments_is_data(arguments: str, data: dict[str, Any]) -> None:
    call = earlier_call("c", "weather", arguments, "a")
    function = {"name": "weather", "arguments": data}
    assert call == {"id": "c", "type": "function", "function": function}


@pytest.mark.parametrize("arguments", ["hello", "{city}", "}"])
def test_what_is_no_beginning_of_json_is_refused(arguments: str) -> None:
    with pytest.raises(RequestError, match=r"messages\.a is not valid JSON") as refusal:
        earlier_call("c", "weather", arguments, "messages.a")
    assert refusal.value.param == "messages.a"


def test_a_conversation_with_a_call_that_was_cut_off_goes_on() -> None:
    function = {"name": "weather", "arguments": WHOLE[:11]}
    turns = [
        {"role": "user", "content": "How is it?"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "invalid arguments"},
    ]
    with scripted(tokenizer().encode("Ja."), FinishReason.STOP) as (serving, plain):
        answer = plain.post("/v1/chat/completions", json={"messages": turns})
        assert answer.status_code == 200, answer.text
        (request,) = serving.backend.requests
        assert json.dumps({"city": "K"}) in tokenizer().decode(request.prompt_ids)
