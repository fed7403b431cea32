"""Every field that the official clients know has a verdict, and the parsers do as it says."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_messages
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

from penstock.deployments.ingress.http.anthropic import requests as anthropic
from penstock.deployments.ingress.http.embeddings import requests as embeddings
from penstock.deployments.ingress.http.field_table import Verdict, field_table
from penstock.deployments.ingress.http.ignored_fields import FieldPolicy, IgnoredFields
from penstock.deployments.ingress.http.openai import requests as openai
from penstock.deployments.ingress.http.responses import requests as responses
from penstock.workers.request import RequestError

USER = {"role": "user", "content": "a"}
# Of each API: the request types of the official clients, and a body that is complete.
APIS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "/v1/chat/completions": (
        [
            chat_params.CompletionCreateParamsNonStreaming,
            chat_params.CompletionCreateParamsStreaming,
        ],
        {"messages": [USER]},
    ),
    "/v1/completions": (
        [
            completion_create_params.CompletionCreateParamsNonStreaming,
            completion_create_params.CompletionCreateParamsStreaming,
        ],
        {"prompt": "a"},
    ),
    "/v1/messages": (
        [
            message_create_params.MessageCreateParamsNonStreaming,
            beta_messages.MessageCreateParamsNonStreaming,
        ],
        {"model": "a", "max_tokens": 1, "messages": [USER]},
    ),
    "/v1/messages/count_tokens": (
        [message_count_tokens_params.MessageCountTokensParams],
        {"model": "a", "messages": [USER]},
    ),
    "/v1/embeddings": ([embedding_create_params.EmbeddingCreateParams], {"input": "a"}),
    "/v1/responses": (
        [response_create_params.ResponseCreateParamsNonStreaming],
        {"input": "a"},
    ),
}


def parse(path: str, body: dict[str, Any], left_out: IgnoredFields) -> Any:
    content = json.dumps(body).encode()
    if path == "/v1/responses":
        return responses.parse(content, left_out)
    if path == "/v1/embeddings":
        return embeddings.parse(embeddings.EmbeddingRequest, content, left_out)
    if path == "/v1/messages":
        return anthropic.parse(anthropic.MessagesRequest, content, left_out)
    if path == "/v1/messages/count_tokens":
        return anthropic.parse(anthropic.CountTokensRequest, content, left_out)
    if path == "/v1/completions":
        return openai.parse(openai.CompletionRequest, content, left_out)
    return openai.parse(openai.ChatCompletionRequest, content, left_out)


@pytest.mark.parametrize("path", APIS)
def test_every_field_of_the_official_client_is_in_the_table(path: str) -> None:
    kinds, _ = APIS[path]
    known = {name for kind in kinds for name in typing.get_type_hints(kind)}
    assert len(known) > 4
    assert known - field_table()[path].keys() == set()


@pytest.mark.parametrize("path", APIS)
def test_the_parsers_do_as_the_table_says(path: str) -> None:
    _, body = APIS[path]
    value = {"a": 1}  # which no field takes that is not served
    for name, row in field_table()[path].items():
        if row.verdict in (Verdict.SERVED, Verdict.MAPPED):
            continue
        lenient, strict = IgnoredFields(FieldPolicy("ignore")), IgnoredFields()
        if row.verdict is Verdict.REFUSED:
            for left_out in (lenient, strict):
                with pytest.raises(RequestError) as refusal:
                    parse(path, body | {name: value}, left_out)
                assert (refusal.value.code, refusal.value.param) == ("unsupported_parameter", name)
            continue
        parse(path, body | {name: value}, lenient)
        assert lenient.names == (name,)
        if row.verdict is Verdict.IGNORED:
            parse(path, body | {name: value}, strict)
            continue
        with pytest.raises(RequestError) as refusal:
            parse(path, body | {name: value}, strict)
        assert (refusal.value.code, refusal.value.param) == ("unsupported_parameter", name)


def test_what_is_mapped_becomes_a_field_that_is_served() -> None:
    left_out = IgnoredFields()
    body = {"messages": [USER], "n_predict": 5, "repeat_penalty": 1.5, "reasoning_format": "none"}
    request = parse("/v1/chat/completions", body | {"reasoning": {"effort": "low"}}, left_out)
    assert (request.max_tokens, request.repetition_penalty) == (5, 1.5)
    assert (request.separate_reasoning, request.reasoning_effort) == (False, "low")
    assert left_out.names == ()
    mapped = {"n_predict", "repeat_penalty", "reasoning_format", "reasoning", "add_special_tokens"}
    table = field_table()["/v1/chat/completions"]
    assert {name for name, row in table.items() if row.verdict is Verdict.MAPPED} == mapped
    with pytest.raises(RequestError, match="another name of max_tokens"):
        parse("/v1/chat/completions", body | {"max_tokens": 4}, left_out)
