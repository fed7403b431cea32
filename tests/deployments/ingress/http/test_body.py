"""Large bodies of every shape: refusing or taking one must cost little, for all others wait.

Work is counted, not timed: calls of functions, Python's and C's, and problems that were written
down. A body has up to half a million elements here; whatever is done for each shows.
"""

from __future__ import annotations

import contextlib
import cProfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from penstock.deployments.ingress.core.service import MAX_BODY_BYTES
from penstock.deployments.ingress.http import body as bodies
from penstock.deployments.ingress.http.anthropic import requests as anthropic_types
from penstock.deployments.ingress.http.anthropic.requests import MessagesRequest
from penstock.deployments.ingress.http.body import (
    Strict,
    drop_ignored_fields,
    json_object,
    validated,
)
from penstock.deployments.ingress.http.body_errors import as_request_error
from penstock.deployments.ingress.http.body_limits import (
    LIMITS,
    MAX_PARTS,
    check_num_parts,
    check_sizes,
)
from penstock.deployments.ingress.http.ignored_fields import (
    HEADER,
    MAX_NAME_CHARS,
    MAX_NAMED,
    FieldPolicy,
    IgnoredFields,
)
from penstock.deployments.ingress.http.openai import requests as openai_types
from penstock.deployments.ingress.http.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
)
from penstock.deployments.ingress.http.responses import requests as responses_types
from penstock.deployments.ingress.http.tokenize import DetokenizeRequest
from penstock.workers.request import RequestError
from penstock.workers.sampling_defaults import SamplingDefaults

SIZE = 1 << 20  # of what is tested: a quarter of what may come, which is enough to tell
MAX_CALLS = 250_000  # half a call for each of the smallest elements
MAX_PROBLEMS = 64

CHAT = b'{"messages":[{"role":"user","content":"a"}],'
COMPLETION = b'{"prompt":"a",'
MESSAGES = b'{"max_tokens":1,"model":"a","messages":[{"role":"user","content":"a"}],'
RESPONSES = b'{"input":"a",'


def completion(body: bytes, left_out: IgnoredFields | None = None) -> Any:
    request = openai_types.parse(CompletionRequest, body, left_out)
    return request.params(SamplingDefaults()), request.options(), request.prompts()


def chat(body: bytes, left_out: IgnoredFields | None = None) -> Any:
    request = openai_types.parse(ChatCompletionRequest, body, left_out)
    return request.params(SamplingDefaults()), request.options(), request.prompt()


def messages(body: bytes, left_out: IgnoredFields | None = None) -> Any:
    request = anthropic_types.parse(MessagesRequest, body, left_out)
    return request.params(SamplingDefaults()), request.prompt()


def responses(body: bytes, left_out: IgnoredFields | None = None) -> Any:
    request = responses_types.parse(body, left_out)
    return request.params(SamplingDefaults()), request.prompt(request.messages(()))


def detokenize(body: bytes) -> Any:
    return validated(DetokenizeRequest, drop_ignored_fields(json_object(body), ("tokens",), {}, ()))


Take = Callable[..., Any]  # of a body, and of what is left out of it
ELEMENTS = [
    b'{"type":"text","text":""}',
    b'{"role":"user","content":"a"}',
    b'{"role":"user","content":[{"type":"text","text":"a"}]}',
    b'{"role":"user","content":[5,5,5,5,5,5,5,5]}',
    b'{"role":"assistant","content":"","tool_calls":[{"id":"a","type":"function",'
    b'"function":{"name":"a","arguments":"{}"}}]}',
    b'{"type":"tool_use","id":"a","name":"a","input":{}}',
    b'{"type":"input_text","text":"a"}',
    b'{"type":"function_call_output","call_id":"a","output":"a"}',
    b'{"type":"function","function":{"name":"a"}}',
    b'{"type":"function","name":"a"}',
    b'{"name":"a","input_schema":{}}',
]
# Where elements go: how a body begins, how it ends, and who takes it.
LISTS: dict[str, tuple[bytes, bytes, Take]] = {
    "prompt": (b'{"prompt":[', b"]}", completion),
    "a prompt of prompts": (b'{"prompt":["a",', b"]}", completion),
    "a prompt of ids": (b'{"prompt":[5,', b"]}", completion),
    "a prompt of lists": (b'{"prompt":[[5],', b"]}", completion),
    "a list of a prompt": (b'{"prompt":[[5],[5,', b"]]}", completion),
    **{
        name: (COMPLETION + b'"%s":[' % name.encode(), b"]}", completion)
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "guided_choice")
    },
    "choice": (COMPLETION + b'"structured_outputs":{"choice":[', b"]}}", completion),
    "a schema": (COMPLETION + b'"guided_json":{"enum":[', b"]}}", completion),
    "messages": (b'{"messages":[', b"]}", chat),
    "content": (b'{"messages":[{"role":"user","content":[', b"]}]}", chat),
    "calls": (b'{"messages":[{"role":"assistant","tool_calls":[', b"]}]}", chat),
    "tools": (CHAT + b'"tools":[', b"]}", chat),
    "a tool's schema": (
        CHAT + b'"tools":[{"type":"function","function":{"name":"a","parameters":{"enum":[',
        b"]}}}]}",
        chat,
    ),
    "modalities": (CHAT + b'"modalities":[', b"]}", chat),
    "turns": (b'{"max_tokens":1,"model":"a","messages":[', b"]}", messages),
    "blocks": (
        b'{"max_tokens":1,"model":"a","messages":[{"role":"assistant","content":[',
        b"]}]}",
        messages,
    ),
    "a result": (
        b'{"max_tokens":1,"model":"a","messages":[{"role":"user","content":['
        b'{"type":"tool_result","tool_use_id":"a","content":[',
        b"]}]}]}",
        messages,
    ),
    "system": (MESSAGES + b'"system":[', b"]}", messages),
    "stop_sequences": (MESSAGES + b'"stop_sequences":[', b"]}", messages),
    "tools of Anthropic": (MESSAGES + b'"tools":[', b"]}", messages),
    "input": (b'{"input":[', b"]}", responses),
    "parts": (b'{"input":[{"role":"user","content":[', b"]}]}", responses),
    "an output": (
        b'{"input":[{"type":"function_call_output","call_id":"a","output":[',
        b"]}]}",
        responses,
    ),
    "a summary": (b'{"input":[{"type":"reasoning","summary":[', b"]}]}", responses),
    "tools of responses": (RESPONSES + b'"tools":[', b"]}", responses),
    "tokens": (b'{"tokens":[', b"]}", detokenize),
    "edits": (MESSAGES + b'"context_management":{"edits":[', b"]}}", messages),
    "include": (RESPONSES + b'"include":[', b"]}", responses),
    "a namespace": (
        RESPONSES + b'"tools":[{"type":"namespace","name":"a","tools":[',
        b"]}]}",
        responses,
    ),
}
# Elements that a list may well hold.
FITTING = {
    **dict.fromkeys(("messages", "turns"), (0, 1, 2, 3, 4)),
    **dict.fromkeys(("content", "result", "system"), (0,)),
    **{"calls": (4,), "blocks": (0, 5), "input": (1, 7), "parts": (6,), "an output": (6,)},
    **{"a namespace": (9,), "tools": (8,), "tools of responses": (9,), "tools of Anthropic": (10,)},
}
OBJECTS: dict[str, tuple[bytes, bytes, Take]] = {
    "a body": (b"{", b"}", chat),
    "logit_bias": (COMPLETION + b'"logit_bias":{', b"}}", completion),
    "chat_template_kwargs": (CHAT + b'"chat_template_kwargs":{', b"}}", chat),
    "metadata": (RESPONSES + b'"metadata":{', b"}}", responses),
    "a message": (b'{"messages":[{"role":"user",', b"}]}", chat),
    "a part": (b'{"messages":[{"role":"user","content":[{', b"}]}]}", chat),
    "a call": (b'{"messages":[{"role":"assistant","tool_calls":[{', b"}]}]}", chat),
    "a called function": (
        b'{"messages":[{"role":"assistant","tool_calls":[{"id":"a","function":{',
        b"}}]}]}",
        chat,
    ),
    "a tool": (CHAT + b'"tools":[{', b"}]}", chat),
    "a schema": (COMPLETION + b'"guided_json":{', b"}}", completion),
    "response_format": (CHAT + b'"response_format":{', b"}}", chat),
    "stream_options": (CHAT + b'"stream_options":{', b"}}", chat),
    "tool_choice": (CHAT + b'"tool_choice":{', b"}}", chat),
    "a turn": (b'{"max_tokens":1,"model":"a","messages":[{"role":"user",', b"}]}", messages),
    "a block": (
        b'{"max_tokens":1,"model":"a","messages":[{"role":"user","content":[{',
        b"}]}]}",
        messages,
    ),
    "an input": (
        b'{"max_tokens":1,"model":"a","messages":[{"role":"assistant","content":['
        b'{"type":"tool_use","id":"a","name":"a","input":{',
        b'}}]},{"role":"user","content":"a"}]}',
        messages,
    ),
    "a tool of Anthropic": (MESSAGES + b'"tools":[{"name":"a",', b"}]}", messages),
    "tool_choice of Anthropic": (MESSAGES + b'"tool_choice":{', b"}}", messages),
    "an item": (b'{"input":[{', b"}]}", responses),
    "text": (RESPONSES + b'"text":{', b"}}", responses),
    "reasoning": (RESPONSES + b'"reasoning":{', b"}}", responses),
    "reasoning of chat": (CHAT + b'"reasoning":{', b"}}", chat),
    "thinking": (MESSAGES + b'"thinking":{"type":"adaptive",', b"}}", messages),
    "a custom tool": (RESPONSES + b'"tools":[{"type":"custom","name":"a",', b"}]}", responses),
}


def list_body(name: str, element: bytes) -> tuple[bytes, Take]:
    head, tail, take = LISTS[name]
    num = SIZE // (len(element) + 1)
    return head + element + (b"," + element) * (num - 1) + tail, take


def object_body(name: str, value: bytes) -> tuple[bytes, Take]:
    head, tail, take = OBJECTS[name]
    num = SIZE // (len(value) + 10)
    return head + b",".join(b'"%d":%s' % (i, value) for i in range(num)) + tail, take


class Work:
    """Counts what is done within it. A context manager."""

    num_calls = 0
    num_problems = 0

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        def counted(error: ValidationError, root: type[BaseModel]) -> RequestError:
            self.num_problems += error.error_count()
            return as_request_error(error, root)

        monkeypatch.setattr(bodies, "as_request_error", counted)

    def __enter__(self) -> Work:
        self._profile = cProfile.Profile()
        self._profile.enable()
        return self

    def __exit__(self, *_: object) -> None:
        self._profile.disable()
        self.num_calls = sum(entry.callcount for entry in self._profile.getstats())


def is_little(monkeypatch: pytest.MonkeyPatch, take: Take, body: bytes) -> None:
    with Work(monkeypatch) as work, contextlib.suppress(RequestError):
        take(body)
    assert work.num_calls <= MAX_CALLS
    assert work.num_problems <= MAX_PROBLEMS


@pytest.mark.parametrize("name", LISTS)
def test_long_lists_cost_little(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = [ELEMENTS[i] for i in FITTING.get(name, ())]
    for element in (b"5", b'""', b"[]", b"{}", *fitting):
        body, take = list_body(name, element)
        is_little(monkeypatch, take, body)


@pytest.mark.parametrize("name", OBJECTS)
def test_large_objects_cost_little(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (b"1", b'"a"'):
        body, take = object_body(name, value)
        is_little(monkeypatch, take, body)


@pytest.mark.parametrize("name", OBJECTS)
def test_large_objects_cost_little_where_unknown_fields_are_ignored(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, take = object_body(name, b"1")
    left_out = IgnoredFields(FieldPolicy("ignore"))
    is_little(monkeypatch, lambda given: take(given, left_out), body)
    assert len(left_out.names) <= MAX_NAMED
    assert len(left_out.text_headers().get(HEADER, "")) <= MAX_NAMED * (MAX_NAME_CHARS + 2) + 8


def test_many_schemas_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = b'{"anyOf":[%s]}' % b",".join([b"{}"] * 10_000)
    tools = [
        b'{"type":"function","function":{"name":"a%d","parameters":%s}}' % (i, schema)
        for i in range(120)
    ]
    body = CHAT + b'"tools":[' + b",".join(tools) + b"]}"
    assert len(body) < MAX_BODY_BYTES
    is_little(monkeypatch, chat, body)
    with pytest.raises(RequestError, match="together at most") as refusal:
        chat(body)
    assert refusal.value.param == "tools"


def test_the_last_of_many_is_still_looked_at() -> None:
    for body, param in (
        (b'{"prompt":[%s"a"]}' % (b"5," * 100_000), "prompt"),
        (COMPLETION + b'"allowed_token_ids":[%s"a"]}' % (b"5," * 9000), "allowed_token_ids[9000]"),
    ):
        with pytest.raises(RequestError) as refusal:
            completion(body)
        assert refusal.value.param == param
        assert "valid" in refusal.value.message


def test_an_unknown_field_among_many_is_named() -> None:
    fields = b",".join(b'"x%d":1' % i for i in range(50))
    body = b'{"messages":[{%s,"role":"user","content":[{"type":"text","text":"a"}]}]}' % fields
    with pytest.raises(RequestError) as refusal:
        chat(body)
    assert (refusal.value.code, refusal.value.param) == ("unknown_parameter", "messages[0].x0")
    schema = b'"guided_json":{%s}}' % fields  # a schema's keywords are no fields of ours
    assert completion(COMPLETION + schema)


def test_as_many_as_may_be() -> None:
    part = {"type": "text", "text": "a"}
    turn = {"role": "user", "content": [part] * (MAX_PARTS - 1)}
    check_num_parts([turn], "messages")
    with pytest.raises(RequestError, match="all together"):
        check_num_parts([turn, turn], "messages")
    check_num_parts([{"content": [{"type": "tool_use", "input": {"a": [5] * 10**6}}]}], "messages")
    for name, (most, _) in LIMITS.items():
        check_sizes({name: ["a"] * most}, LIMITS)
        with pytest.raises(RequestError) as refusal:
            check_sizes({name: ["a"] * (most + 1)}, LIMITS)
        assert refusal.value.param == name


def test_every_list_of_every_body_stops_at_its_first_problem() -> None:
    def lists(schema: Any) -> Iterator[dict[str, Any]]:
        parts = schema if isinstance(schema, list | tuple) else ()
        if isinstance(schema, dict):
            parts = tuple(schema.values())
            if schema.get("type") == "list":
                yield schema
        for part in parts:
            yield from lists(part)

    kinds = [Strict]
    num_lists = 0
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        for found in lists(kind.__pydantic_core_schema__):
            num_lists += 1
            assert found.get("fail_fast"), (kind, found)
    assert num_lists > 30
