"""The bounds in /openapi.json are the ones that the server enforces: neither wider nor narrower."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.workers.request import Delta, FinishReason, TokenLogprob
from tests.deployments.serving import ScriptedBackend, Serving

MAX_MODEL_LEN = 300
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ChatCompletionRequest": ("/v1/chat/completions", CHAT),
    "CompletionRequest": ("/v1/completions", {"prompt": "a"}),
    "ResponsesRequest": ("/v1/responses", {"input": "a"}),
    "MessagesRequest": ("/v1/messages", {**CHAT, "model": "builtin", "max_tokens": 4}),
    "DetokenizeRequest": ("/detokenize", {"tokens": []}),
}
NEEDED: dict[tuple[str, str], Any] = {  # or the field means nothing
    ("ChatCompletionRequest", "top_logprobs"): {"logprobs": True},
    ("CompletionRequest", "max_tokens"): {"echo": True},
    **{
        (kind, name): {"context_policy": "sink_window"}
        for kind in ("ChatCompletionRequest", "CompletionRequest")
        for name in ("sinks", "window", "roll")
    },
}


class OneToken(ScriptedBackend):
    """Answers with one token and its logprob, whatever the request."""

    async def generate(self, admission: AdmissionRequest) -> AsyncIterator[Delta]:
        scores = [TokenLogprob(5, -1.0, 1)]
        yield Delta(admission.request_id, [5], FinishReason.STOP, logprobs=scores)


@pytest.fixture(scope="module")
def raw() -> Iterator[httpx.Client]:
    with (
        Serving(OneToken(), max_model_len=MAX_MODEL_LEN) as server,
        httpx.Client(base_url=server.base_url, timeout=30) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def schemas(raw: httpx.Client) -> Any:
    return raw.get("/openapi.json").json()["components"]["schemas"]


def alternatives(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [part, *(inner for each in part.get("anyOf", ()) for inner in alternatives(each))]


def at_and_beyond(part: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(a value at a bound, one beyond it) for each bound that the schema has."""
    for each in alternatives(part):
        if "minimum" in each:
            yield each["minimum"], each["minimum"] - 1
        if "maximum" in each:
            yield each["maximum"], each["maximum"] + 1
        if "exclusiveMinimum" in each:
            yield each["exclusiveMinimum"] + 0.01, each["exclusiveMinimum"]
        if each.get("type") == "string" and "maxLength" in each:
            yield "a" * each["maxLength"], "a" * (each["maxLength"] + 1)
        if "minLength" in each:
            yield "a" * each["minLength"], ""
        inner = each.get("items", {})
        if "maxItems" in each and inner.get("type") in ("integer", "string"):
            value = {"integer": 1, "string": "a"}[inner["type"]]
            yield [value] * each["maxItems"], [value] * (each["maxItems"] + 1)
        if "minItems" in each and inner.get("type") in ("integer", "string"):
            yield [{"integer": 1, "string": "a"}[inner["type"]]], []
        if inner:
            yield from (([at], [beyond]) for at, beyond in at_and_beyond(inner))
        values = each.get("additionalProperties")
        if isinstance(values, dict):
            yield from (({"1": at}, {"1": beyond}) for at, beyond in at_and_beyond(values))


@pytest.mark.parametrize("kind", REQUESTS)
def test_what_is_stated_is_enforced(raw: httpx.Client, schemas: Any, kind: str) -> None:
    path, body = REQUESTS[kind]
    num_bounds = 0
    for name, part in schemas[kind]["properties"].items():
        for at, beyond in at_and_beyond(part):
            num_bounds += 1
            known = {**body, **NEEDED.get((kind, name), {})}
            refused = raw.post(path, json={**known, name: beyond})
            assert refused.status_code == 400, (name, beyond)
            error = refused.json()["error"]
            assert name in str(error), (name, error)
            taken = raw.post(path, json={**known, name: at})
            # What is as long as the context leaves no room for the prompt; a word of as many
            # characters may have too many tokens.
            crossed = "exceed" in taken.text or "64 tokens" in taken.text
            assert taken.status_code == 200 or crossed, (name, at, taken.text)
    assert num_bounds >= (2 if kind == "DetokenizeRequest" else 11)


def test_names_and_roles_are_stated(schemas: Any) -> None:
    chat = schemas["ChatCompletionRequest"]["properties"]
    assert {"enum": ["builtin"], "type": "string"} in chat["model"]["anyOf"]
    assert "tool" in schemas["ChatMessage"]["properties"]["role"]["enum"]
    assert chat["logit_bias"]["anyOf"][0]["maxProperties"] == 1024
    for tool in ("FunctionBody", "FunctionTool", "CustomTool", "MessagesTool"):
        assert schemas[tool]["properties"]["name"]["pattern"] == "^[A-Za-z0-9_-]{1,64}$"
    assert not [name for name in schemas if "__" in name], "two models have one name"
    longest = schemas["ResponsesRequest"]["properties"]["max_output_tokens"]["anyOf"][0]
    assert longest["maximum"] == MAX_MODEL_LEN
    prompts = schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    lists = [each for each in prompts if each["type"] == "array"]
    assert [each.get("maxItems") for each in lists] == [64, None, 64]


@pytest.mark.parametrize("kind", ["ChatCompletionRequest", "CompletionRequest"])
def test_events_are_as_the_document_has_them(raw: httpx.Client, kind: str) -> None:
    path, body = REQUESTS[kind]
    document = raw.get("/openapi.json").json()
    answers = document["paths"][path]["post"]["responses"]["200"]["content"]
    event = answers["text/event-stream"]["schema"]
    mark, spelt = event["properties"]["data"]["anyOf"]
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    lines = raw.post(path, json=streamed).text.splitlines()
    datas = [line.removeprefix("data: ") for line in lines if line]
    assert len(datas) >= 3 and datas[-1] == mark["const"]
    content = {**spelt["contentSchema"], "components": document["components"]}
    for data in datas[:-1]:
        jsonschema.validate({"data": data}, {**event, "components": document["components"]})
        jsonschema.validate(json.loads(data), content)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"object": "text_completion"}, content)
